# SPDX-License-Identifier: Apache-2.0
"""Conversations: what a client may send, and the next turn split into reasoning, content and calls of tools."""
