# SPDX-License-Identifier: Apache-2.0
"""What the transfer layer reports, as metrics and as the totals that Inspect shows."""

from twinpool import metrics
from twinpool.transfer.base import Fault


class WorkerObserver:
    """Implements ``transfer.base.TransferObserver``. Called on the transfer thread and on the step thread."""

    def __init__(self) -> None:
        # Each total is written by one thread alone: the transfer thread the bytes, the step thread the fences.
        self.bytes_read = 0
        self.fence_failures = 0

    def pulled(
        self, *, blocks: int, descriptors: int, size_bytes: int, seconds: float, post_seconds: float
    ) -> None:
        """Blocks and their generations arrived."""
        self.bytes_read += size_bytes
        metrics.NIXL_BYTES.observe(size_bytes)
        metrics.NIXL_DESCRIPTORS.observe(descriptors)
        metrics.NIXL_XFER_TIME.observe(seconds)
        metrics.NIXL_POST_TIME.observe(post_seconds)

    def pull_failed(self, fault: Fault) -> None:
        """A read failed, timed out or was cancelled."""
        metrics.NIXL_FAILED_TRANSFERS.labels(fault.value).inc()

    def fence_failed(self, reason: str) -> None:
        """A fence refused a ticket or a read."""
        self.fence_failures += 1
        metrics.HANDOFF_FENCE_FAILURES.labels(reason).inc()

    def leases_expired(self, count: int) -> None:
        """Offers ended because nobody renewed them."""
        metrics.NIXL_KV_EXPIRED.inc(count)

    def unknown_transfer(self, kind: str) -> None:
        """A message about a transfer or an attempt that is not known (any more)."""
        metrics.HANDOFF_UNKNOWN_TRANSFERS.labels(kind).inc()

    def release_unanswered(self) -> None:
        """The owner did not acknowledge a release in all its tries."""
        metrics.NIXL_FAILED_NOTIFICATIONS.inc()
