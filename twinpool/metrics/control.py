# SPDX-License-Identifier: Apache-2.0
"""Metrics of control processes; see ``metrics``."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from twinpool.metric_buckets import LATENCY_BUCKETS, SHORT_BUCKETS

__all__ = [
    "CONTROL_DESIRED_WORKERS",
    "CONTROL_EVENTS",
    "CONTROL_LEADER",
    "CONTROL_OPERATIONS",
    "CONTROL_OPERATIONS_RUNNING",
    "CONTROL_OPERATION_TIME",
    "CONTROL_READY_WORKERS",
    "CONTROL_REBALANCE_DECISIONS",
    "CONTROL_RECONCILE_TIME",
    "CONTROL_REPLICAS",
]

CONTROL_LEADER = Gauge(
    "twinpool_control_leader", "1 while this control process acts; the others stand by and have no figures."
)
CONTROL_RECONCILE_TIME = Histogram(
    "twinpool_control_reconcile_time_seconds",
    "One look of the reconciler at its pools, by outcome: done, waited (it must not act now), failed.",
    ["outcome"],
    buckets=SHORT_BUCKETS,
)
CONTROL_OPERATIONS = Counter(
    "twinpool_control_operations",
    "Operations by kind (drain, restart, flip, scale, rebalance) and what became of them: begun, resumed, succeeded, failed.",
    ["kind", "outcome"],
)
CONTROL_OPERATIONS_RUNNING = Gauge(
    "twinpool_control_operations_running", "Operations under way, by kind.", ["kind"]
)
CONTROL_OPERATION_TIME = Histogram(
    "twinpool_control_operation_time_seconds",
    "From an operation's beginning to its end, by kind.",
    ["kind"],
    buckets=LATENCY_BUCKETS,
)
CONTROL_EVENTS = Counter(
    "twinpool_control_events", "Events that were recorded, by reason; docs/pools.md lists them.", ["reason"]
)
CONTROL_REBALANCE_DECISIONS = Counter(
    "twinpool_control_rebalance_decisions",
    "Decisions of the rebalancer by pool, kind (flip, scale, nothing) and reason.",
    ["pool", "kind", "reason"],
)
CONTROL_DESIRED_WORKERS = Gauge(
    "twinpool_control_desired_workers", "Workers that are wanted, by pool and role.", ["pool", "role"]
)
CONTROL_READY_WORKERS = Gauge(
    "twinpool_control_ready_workers", "Workers that take work, by pool and role.", ["pool", "role"]
)
CONTROL_REPLICAS = Gauge(
    "twinpool_control_replicas",
    "Workers by pool, role and where they stand: pending, starting, ready, unready, draining, flipping, backoff, held.",
    ["pool", "role", "state"],
)
