# SPDX-License-Identifier: Apache-2.0
"""The rebalancer: which worker of a pool should change its role, and when. ``policy.py`` decides; it does no I/O and reads no
clock, so that the control process and the simulator run the same code."""
