# SPDX-License-Identifier: Apache-2.0
"""The transfer layer's events as metrics."""

from __future__ import annotations

from twinpool import metrics
from twinpool.transfer.base import Fault


class MetricsObserver:
    """A :class:`~twinpool.transfer.base.TransferObserver` that feeds Prometheus. Thread-safe, as its metrics are."""

    def pulled(
        self, *, blocks: int, descriptors: int, size_bytes: int, seconds: float, post_seconds: float
    ) -> None:
        metrics.NIXL_XFER_TIME.observe(seconds)
        metrics.NIXL_POST_TIME.observe(post_seconds)
        metrics.NIXL_BYTES.observe(size_bytes)
        metrics.NIXL_DESCRIPTORS.observe(descriptors)

    def pull_failed(self, fault: Fault) -> None:
        metrics.NIXL_FAILED_TRANSFERS.labels(reason=fault.value).inc()

    def fence_failed(self, reason: str) -> None:
        metrics.HANDOFF_FENCE_FAILURES.labels(reason=reason).inc()

    def leases_expired(self, count: int) -> None:
        metrics.NIXL_KV_EXPIRED.inc(count)

    def unknown_transfer(self, kind: str) -> None:
        metrics.HANDOFF_UNKNOWN_TRANSFERS.labels(kind=kind).inc()

    def release_unanswered(self) -> None:
        metrics.NIXL_FAILED_NOTIFICATIONS.inc()
