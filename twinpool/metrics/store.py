# SPDX-License-Identifier: Apache-2.0
"""Metrics of what each process has to do with etcd."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from twinpool import metric_buckets

STORE_CALLS = Histogram(
    "twinpool_store_call_time_seconds",
    "One call of etcd, by operation.",
    ["operation"],
    buckets=metric_buckets.SHORT_BUCKETS,
)
STORE_FAILURES = Counter("twinpool_store_failures", "Calls of etcd that failed, by operation.", ["operation"])
STORE_CONNECTED = Gauge("twinpool_store_watch_connected", "1 while the watch is established.", ["watch"])
STORE_WATCH_RESTARTS = Counter(
    "twinpool_store_watch_restarts", "Watches set up anew, by cause.", ["watch", "cause"]
)
MEMBERSHIP_REGISTERED = Gauge("twinpool_membership_registered", "1 while this process is registered.")
MEMBERSHIP_LEASE_LOSSES = Counter("twinpool_membership_lease_losses", "Leases that ended against our will.")
MEMBERSHIP_INVALID_RECORDS = Counter(
    "twinpool_membership_invalid_records", "Records in etcd that could not be used, by cause.", ["cause"]
)
MEMBERSHIP_EVENTS = Counter(
    "twinpool_membership_events", "Changes of the workers seen in etcd, by kind.", ["kind"]
)
