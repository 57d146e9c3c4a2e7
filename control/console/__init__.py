# SPDX-License-Identifier: Apache-2.0
"""The console page: what an overview shows, in a browser. It only reads."""
