# SPDX-License-Identifier: Apache-2.0
"""Metrics of a worker's hand-offs, and of NIXL below them."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from twinpool import metric_buckets

NIXL_XFER_TIME = Histogram(
    "twinpool_worker_nixl_xfer_time_seconds",
    "One read, from post to done.",
    buckets=metric_buckets.SHORT_BUCKETS,
)
NIXL_POST_TIME = Histogram(
    "twinpool_worker_nixl_post_time_seconds", "Posting one read.", buckets=metric_buckets.SHORT_BUCKETS
)
NIXL_BYTES = Histogram(
    "twinpool_worker_nixl_bytes_transferred", "Bytes of one read.", buckets=metric_buckets.BYTE_BUCKETS
)
NIXL_DESCRIPTORS = Histogram(
    "twinpool_worker_nixl_num_descriptors", "Descriptors of one read.", buckets=metric_buckets.COUNT_BUCKETS
)
NIXL_FAILED_TRANSFERS = Counter(
    "twinpool_worker_nixl_num_failed_transfers", "Reads that failed or timed out, by reason.", ["reason"]
)
NIXL_FAILED_NOTIFICATIONS = Counter(
    "twinpool_worker_nixl_num_failed_notifications", "Releases that could not be sent to the owner."
)
NIXL_KV_EXPIRED = Counter(
    "twinpool_worker_nixl_num_kv_expired_reqs", "Offers whose lease ended before the reader released them."
)
HANDOFF_FENCE_FAILURES = Counter(
    "twinpool_worker_fence_failures", "Tickets or reads that a fence refused, by reason.", ["reason"]
)
HANDOFF_OFFERS = Gauge("twinpool_worker_offers", "Offers that hold pins.")
HANDOFF_TRANSFERS = Gauge("twinpool_worker_transfers", "Reads in flight.")
HANDOFF_QUARANTINED_BLOCKS = Gauge(
    "twinpool_worker_quarantined_blocks", "Destination blocks that wait for the end of a read."
)
HANDOFF_UNKNOWN_TRANSFERS = Counter(
    "twinpool_worker_unknown_transfers", "Messages about a transfer that is not known, by kind.", ["kind"]
)
HANDOFF_PEERS = Gauge("twinpool_worker_peers", "Workers connected for hand-off.")
