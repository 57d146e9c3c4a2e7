# SPDX-License-Identifier: Apache-2.0
"""Other people's clients against a router."""
