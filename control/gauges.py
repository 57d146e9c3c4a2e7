# SPDX-License-Identifier: Apache-2.0
"""What a control process shows Prometheus of its pools and operations. While another one leads it shows nothing of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client import Gauge

from twinpool import metrics
from twinpool.control.flips import ROLES
from twinpool.control.reconcile.spec import desired
from twinpool.v1 import control_pb2 as pb

_BY_POOL = (metrics.CONTROL_DESIRED_WORKERS, metrics.CONTROL_READY_WORKERS, metrics.CONTROL_REPLICAS)


def show_pool(status: pb.PoolStatus) -> None:
    """Sets the gauges of one pool."""
    pool = status.spec.pool
    wanted: dict[tuple[str, ...], int] = {}
    ready: dict[tuple[str, ...], int] = {}
    stages: Counter[tuple[str, ...]] = Counter()
    for role, count in desired(status.spec).items():
        wanted[pool, role] = count
        ready[pool, role] = 0
    for replica in status.replicas:
        role, stage = ROLES.get(replica.role, "unknown"), _phase(replica.phase)
        stages[pool, role, stage] += 1
        if stage == "ready":
            ready[pool, role] = ready.get((pool, role), 0) + 1
    _set(metrics.CONTROL_DESIRED_WORKERS, wanted, pool)
    _set(metrics.CONTROL_READY_WORKERS, ready, pool)
    _set(metrics.CONTROL_REPLICAS, stages, pool)


def _set(gauge: Gauge, values: Mapping[tuple[str, ...], int], pool: str) -> None:
    """What is known of the pool and not among ``values`` becomes 0: never without a series, as a scrape may come at any time."""
    known = [tuple(labels) for labels in gauge._metrics]
    for labels in {*values, *(labels for labels in known if labels[0] == pool)}:
        gauge.labels(*labels).set(values.get(labels, 0))


def show_operation(operation: pb.Operation, what: str, running: Iterable[pb.Operation]) -> None:
    """An operation has "begun", was "resumed", has "succeeded" or "failed". ``running``: those under way now."""
    kind = kind_of(operation)
    metrics.CONTROL_OPERATIONS.labels(kind, what).inc()
    if what in ("succeeded", "failed"):
        seconds = time.time() - operation.created_at.ToNanoseconds() / 1e9
        metrics.CONTROL_OPERATION_TIME.labels(kind).observe(max(0.0, seconds))
    show_running(running)


def show_running(running: Iterable[pb.Operation]) -> None:
    """Sets the gauge of operations under way."""
    counts = Counter(kind_of(operation) for operation in running)
    for number in pb.OperationKind.values():
        if number != pb.OPERATION_KIND_UNSPECIFIED:
            kind = _kind(number)
            metrics.CONTROL_OPERATIONS_RUNNING.labels(kind).set(counts[kind])


def show_leader(leads: bool) -> None:
    """Whether this process acts."""
    metrics.CONTROL_LEADER.set(int(leads))
    if not leads:
        for gauge in (*_BY_POOL, metrics.CONTROL_OPERATIONS_RUNNING):
            gauge.clear()


def kind_of(operation: pb.Operation) -> str:
    """What an operation does, as a word."""
    return _kind(operation.kind)


def _kind(kind: pb.OperationKind.ValueType) -> str:
    return pb.OperationKind.Name(kind).removeprefix("OPERATION_KIND_").lower()


def _phase(phase: pb.ReplicaPhase.ValueType) -> str:
    return pb.ReplicaPhase.Name(phase).removeprefix("REPLICA_PHASE_").lower()
