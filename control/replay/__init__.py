# SPDX-License-Identifier: Apache-2.0
"""Workload traces: reading them, and replaying them against a live cluster."""
