# SPDX-License-Identifier: Apache-2.0
"""The cluster at one moment, collected from its workers and routers."""
