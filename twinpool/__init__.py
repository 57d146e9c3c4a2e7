# SPDX-License-Identifier: Apache-2.0
"""Twinpool: a prefill pool and a decode pool that share KV blocks."""

__version__ = "0.1.0"
