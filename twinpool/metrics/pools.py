# SPDX-License-Identifier: Apache-2.0
"""What a router counts by pool and model, beside its sums over all of them."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from twinpool import metric_buckets

# --- router: pools ------------------------------------------------------------------------

ROUTER_POOL_REQUESTS = Counter(
    "twinpool_router_pool_requests", "Requests that were accepted, by pool and model.", ["pool", "model"]
)
ROUTER_POOL_RUNNING = Gauge(
    "twinpool_router_pool_num_requests_running",
    "Requests placed and not ended, by pool and model.",
    ["pool", "model"],
)
ROUTER_POOL_WAITING = Gauge(
    "twinpool_router_pool_num_requests_waiting",
    "Requests in the queue of a pool and model.",
    ["pool", "model"],
)
ROUTER_POOL_QUEUE_TOKENS = Gauge(
    "twinpool_router_pool_queue_tokens",
    "Prompt tokens of the requests in the queue of a pool and model.",
    ["pool", "model"],
)
ROUTER_POOL_TTFT = Histogram(
    "twinpool_router_pool_time_to_first_token_seconds",
    "From a request's arrival to its first token, by pool and model.",
    ["pool", "model"],
    buckets=metric_buckets.TTFT_BUCKETS,
)
ROUTER_POOL_ITL = Histogram(
    "twinpool_router_pool_inter_token_latency_seconds",
    "Between two messages with tokens of one choice, by pool and model.",
    ["pool", "model"],
    buckets=metric_buckets.ITL_BUCKETS,
)
