# SPDX-License-Identifier: Apache-2.0
"""Metrics of workers that change their role; see ``metrics``."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from twinpool.metric_buckets import TTFT_BUCKETS

__all__ = ["ROUTER_ROLE_CHANGES", "WORKER_FLIPS", "WORKER_FLIP_TIME", "WORKER_ROLE"]

ROUTER_ROLE_CHANGES = Counter(
    "twinpool_router_role_changes", "Workers that were seen to change their role, by the new one.", ["role"]
)
WORKER_ROLE = Gauge("twinpool_worker_role", "1 for the role that the worker has: prefill, decode.", ["role"])
WORKER_FLIPS = Counter(
    "twinpool_worker_flips",
    "Changes of role that have ended, by outcome: committed, rolled_back.",
    ["outcome"],
)
WORKER_FLIP_TIME = Histogram(
    "twinpool_worker_flip_time_seconds",
    "From the beginning of a change of role to its end, the wait for what ran included.",
    buckets=TTFT_BUCKETS,
)
