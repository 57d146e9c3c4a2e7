# SPDX-License-Identifier: Apache-2.0
"""Every metric of every process: names, help, labels and buckets. Nothing outside of this package defines one, and
docs/metrics.md is made from it.

Names are ``twinpool_<component>_<what>_<unit>``, with vLLM's suffixes where vLLM has the same metric. Label sets are
bounded: pool, role, worker, reason, code; never a request id. One process has one router or one worker, so labels
that would be constant are left to the scraper.
"""

from __future__ import annotations

import platform
from typing import Final

from prometheus_client import Counter, Gauge, Histogram, Info

from twinpool import __version__
from twinpool.metric_buckets import (
    ITL_BUCKETS,
    LATENCY_BUCKETS,
    RATIO_BUCKETS,
    SHORT_BUCKETS,
    TOKEN_BUCKETS,
    TTFT_BUCKETS,
)
from twinpool.metric_endpoint import start_http as start_http
from twinpool.metrics.control import *  # noqa: F403
from twinpool.metrics.pools import *  # noqa: F403
from twinpool.metrics.roles import *  # noqa: F403
from twinpool.metrics.store import *  # noqa: F403
from twinpool.metrics.transfer import *  # noqa: F403

# --- every process ------------------------------------------------------------------------

BUILD_INFO: Final = Info("twinpool_build", "Version of the process.")
BUILD_INFO.info({"version": __version__, "python": platform.python_version()})
AUDIT_WRITE_FAILURES = Counter("twinpool_audit_write_failures", "Audit lines that their file did not get.")
CONFIG_GENERATION = Gauge(
    "twinpool_config_generation", "Generation of the applied configuration that the process runs; 0: none."
)
CONFIG_REFUSALS = Counter(
    "twinpool_config_refusals", "Applied configurations that the process refused, as a whole."
)

# --- router: requests ---------------------------------------------------------------------

ROUTER_REQUESTS = Counter(
    "twinpool_router_requests",
    "Requests that ended, by gRPC code and reason (OK and empty for success).",
    ["code", "reason"],
)
ROUTER_REQUEST_SUCCESS = Counter(
    "twinpool_router_request_success", "Choices that finished, by reason.", ["finished_reason"]
)
ROUTER_TENANT_REQUESTS = Counter(
    "twinpool_router_tenant_requests", "Requests that were placed, by tenant of the tenants file.", ["tenant"]
)
ROUTER_TENANT_TOKENS = Counter(
    "twinpool_router_tenant_tokens",
    "Tokens by tenant of the tenants file and kind (prompt, cached, completion).",
    ["tenant", "kind"],
)
ROUTER_INFLIGHT_REQUESTS = Gauge("twinpool_router_inflight_requests", "Requests received and not ended.")
ROUTER_REQUESTS_RUNNING = Gauge("twinpool_router_num_requests_running", "Requests placed and not ended.")
ROUTER_REQUESTS_WAITING = Gauge("twinpool_router_num_requests_waiting", "Requests in the queue.")
ROUTER_QUEUE_TOKENS = Gauge("twinpool_router_queue_tokens", "Prompt tokens of the requests in the queue.")
ROUTER_REJECTIONS = Counter(
    "twinpool_router_rejections", "Requests refused at admission, by reason.", ["reason"]
)
ROUTER_ATTEMPTS = Counter("twinpool_router_attempts", "Placements made.")
ROUTER_PREEMPTIONS = Counter(
    "twinpool_router_preemptions",
    "Requests that gave way to one of higher priority before their first token, by the lengths of the two prompts: long_by_short, "
    "long_by_long, short_by_short, short_by_long. Short is what metrics.short_prompt_tokens says.",
    ["kind"],
)
ROUTER_RETRIES = Counter(
    "twinpool_router_retries", "Attempts that failed and were placed anew, by failure reason.", ["reason"]
)
ROUTER_RETRY_BUDGET = Gauge(
    "twinpool_router_retry_budget",
    "Failed attempts that may still be placed anew; below 0: answers that went on anyway.",
)
ROUTER_RETRIES_DENIED = Counter(
    "twinpool_router_retries_denied",
    "Requests that failed for lack of retry budget, by failure reason.",
    ["reason"],
)
ROUTER_BREAKERS = Gauge(
    "twinpool_router_breakers", "Workers whose circuit breaker is not closed: open, half_open.", ["state"]
)
ROUTER_BREAKER_TRIPS = Counter("twinpool_router_breaker_trips", "Circuit breakers of workers that opened.")
ROUTER_RESUMES = Counter(
    "twinpool_router_resumes",
    "Answers that went on on other workers behind a sent token, by failure reason.",
    ["reason"],
)
ROUTER_REATTACHED = Counter(
    "twinpool_router_reattached",
    "Streams that asked for an answer again, by where it was: own (on this router), router, worker, lost.",
    ["source"],
)
ROUTER_KEPT_ANSWERS = Gauge(
    "twinpool_router_kept_answers", "Resumable answers that run here or are kept after their end."
)
ROUTER_KEPT_BYTES = Gauge("twinpool_router_kept_bytes", "Memory of resumable answers, prompts included.")
ROUTER_MIGRATIONS = Counter(
    "twinpool_router_migrations", "Answers that were moved off a decode worker that was about to leave."
)
ROUTER_PROMPT_TOKENS = Counter("twinpool_router_prompt_tokens", "Prompt tokens of accepted requests.")
ROUTER_GENERATION_TOKENS = Counter("twinpool_router_generation_tokens", "Tokens sent to clients.")
ROUTER_REQUEST_PROMPT_TOKENS = Histogram(
    "twinpool_router_request_prompt_tokens", "Length of a prompt in tokens.", buckets=TOKEN_BUCKETS
)
ROUTER_REQUEST_GENERATION_TOKENS = Histogram(
    "twinpool_router_request_generation_tokens", "Tokens generated for a request.", buckets=TOKEN_BUCKETS
)
ROUTER_TTFT = Histogram(
    "twinpool_router_time_to_first_token_seconds",
    "From a request's arrival to its first token.",
    buckets=TTFT_BUCKETS,
)
ROUTER_SHORT_TTFT = Histogram(
    "twinpool_router_short_time_to_first_token_seconds",
    "As twinpool_router_time_to_first_token_seconds, of prompts of at most metrics.short_prompt_tokens.",
    buckets=TTFT_BUCKETS,
)
ROUTER_ITL = Histogram(
    "twinpool_router_inter_token_latency_seconds",
    "Between two messages with tokens of one choice.",
    buckets=ITL_BUCKETS,
)
ROUTER_TPOT = Histogram(
    "twinpool_router_request_time_per_output_token_seconds",
    "Mean time between the tokens of a request, after the first.",
    buckets=ITL_BUCKETS,
)
ROUTER_E2E = Histogram(
    "twinpool_router_e2e_request_latency_seconds",
    "From a request's arrival to its end.",
    buckets=LATENCY_BUCKETS,
)
ROUTER_QUEUE_TIME = Histogram(
    "twinpool_router_request_queue_time_seconds", "Waiting for admission.", buckets=LATENCY_BUCKETS
)
ROUTER_PREFILL_TIME = Histogram(
    "twinpool_router_request_prefill_time_seconds",
    "From the decode worker's reservation to the first token.",
    buckets=LATENCY_BUCKETS,
)
ROUTER_HANDOFF_TIME = Histogram(
    "twinpool_router_request_handoff_time_seconds",
    "From the first token until the decode worker holds all KV.",
    buckets=TTFT_BUCKETS,
)
ROUTER_TRANSFER_TIME = Histogram(
    "twinpool_router_transfer_time_seconds",
    "Reads of a hand-off or of a prefix, as the reader measured them.",
    buckets=SHORT_BUCKETS,
)
ROUTER_PREDICTED_TRANSFER_TIME = Histogram(
    "twinpool_router_predicted_transfer_time_seconds",
    "What the cost model expected of the same reads.",
    buckets=SHORT_BUCKETS,
)
ROUTER_TRANSFER_ERROR = Histogram(
    "twinpool_router_transfer_prediction_error_seconds",
    "Predicted minus real time of a read, without the sign; direction over: it was faster.",
    ["direction"],
    buckets=SHORT_BUCKETS,
)
ROUTER_DECODE_TIME = Histogram(
    "twinpool_router_request_decode_time_seconds",
    "From the end of the hand-off to the last token.",
    buckets=LATENCY_BUCKETS,
)
ROUTER_TOKENIZE_TIME = Histogram(
    "twinpool_router_tokenize_time_seconds", "Tokenising and hashing one prompt.", buckets=SHORT_BUCKETS
)
ROUTER_TOKENIZED_CHARS = Gauge(
    "twinpool_router_tokenized_chars",
    "Characters of prompts since the start, by source: cache (their tokens were kept) or new.",
    ["source"],
)
ROUTER_TOKEN_CACHE_BYTES = Gauge(
    "twinpool_router_token_cache_bytes", "Memory of tokenised beginnings of conversations."
)
ROUTER_PLAN_TIME = Histogram(
    "twinpool_router_plan_time_seconds", "One call of the core's plan.", buckets=SHORT_BUCKETS
)

# --- router: locality and workers ---------------------------------------------------------

ROUTER_PREDICTED_CACHED_TOKENS = Counter(
    "twinpool_router_predicted_cached_tokens", "Prompt tokens that placement expected in the cache."
)
ROUTER_CACHED_TOKENS = Counter(
    "twinpool_router_cached_tokens", "Prompt tokens that the prefill worker found in its cache."
)
ROUTER_QUERY_TOKENS = Counter(
    "twinpool_router_query_tokens", "Prompt tokens of the prefills that the next counters are about."
)
ROUTER_BEST_CACHED_TOKENS = Counter(
    "twinpool_router_best_cached_tokens",
    "Prompt tokens that the worker with the longest prefix held when the request was placed.",
)
ROUTER_PREDICTION_ERROR = Histogram(
    "twinpool_router_prediction_error_tokens",
    "Predicted minus actual cached tokens of a prefill, without the sign; direction over: fewer were found.",
    ["direction"],
    buckets=(0.0, *TOKEN_BUCKETS),
)
ROUTER_LOCALITY_DEGRADED = Gauge(
    "twinpool_router_locality_degraded",
    "1 while the index is not to be trusted for this cause: unreachable, resyncing, no_event_stream, "
    "prediction_error, index_full, store_lost.",
    ["cause"],
)
ROUTER_KV_HIT_RATE = Histogram(
    "twinpool_router_kv_hit_rate", "Cached share of a prompt, 0 to 1.", buckets=RATIO_BUCKETS
)
ROUTER_PREFIX_FETCHES = Counter(
    "twinpool_router_prefix_fetches",
    "Cached prefixes that a placement let a worker pull: FETCHED, or why they were computed instead.",
    ["reason"],
)
ROUTER_PREFIX_FETCHED_BYTES = Counter(
    "twinpool_router_prefix_fetched_bytes", "Bytes of cached prefixes that workers pulled."
)
ROUTER_LOCAL_PREFILLS = Counter(
    "twinpool_router_local_prefills", "Placements whose prompt the decode worker computes itself."
)
ROUTER_INDEX_BLOCKS = Gauge("twinpool_router_index_blocks", "Block hashes in the prefix index.")
ROUTER_LOCALITY_WORKERS = Gauge(
    "twinpool_router_locality_workers",
    "Workers whose cache is followed, by state: live, resyncing, unreachable, segments.",
    ["state"],
)
ROUTER_LOCALITY_RESYNCS = Counter(
    "twinpool_router_locality_resyncs",
    "Replays and snapshots asked for, by kind and cause.",
    ["kind", "cause"],
)
ROUTER_LOCALITY_RESYNC_FAILURES = Counter(
    "twinpool_router_locality_resync_failures", "Replays and snapshots that were not answered."
)
ROUTER_KV_EVENT_BATCHES = Counter(
    "twinpool_router_kv_event_batches",
    "Batches of KV events, by outcome: applied, parked, duplicate, foreign, invalid.",
    ["outcome"],
)
ROUTER_KV_EVENT_DELAY = Histogram(
    "twinpool_router_kv_event_delay_seconds",
    "From a batch of KV events on the worker's clock to its arrival on the router's.",
    buckets=SHORT_BUCKETS,
)
ROUTER_WORKERS = Gauge("twinpool_router_workers", "Workers known, by role and state.", ["role", "state"])
ROUTER_SESSIONS = Gauge("twinpool_router_sessions", "Open sessions with workers.")
ROUTER_SESSION_FAILURES = Counter(
    "twinpool_router_session_failures", "Sessions that broke or could not be opened, by role.", ["role"]
)
ROUTER_QUARANTINES = Counter("twinpool_router_quarantines", "Workers put into quarantine, by role.", ["role"])
ROUTER_UNKNOWN_EVENTS = Counter(
    "twinpool_router_unknown_events", "Messages of workers of no known attempt, by kind.", ["kind"]
)
ROUTER_SESSION_TURNS = Counter(
    "twinpool_router_session_turns",
    "Later turns of sessions, by whether they ran on a worker of the turn before: kept, moved.",
    ["result"],
)

# --- worker: engine -----------------------------------------------------------------------

WORKER_REQUESTS_RUNNING = Gauge("twinpool_worker_num_requests_running", "Sequences in running state.")
WORKER_REQUESTS_WAITING = Gauge(
    "twinpool_worker_num_requests_waiting", "Sequences waiting for their first step."
)
WORKER_WAITING_PREFILL_TOKENS = Gauge(
    "twinpool_worker_waiting_prefill_tokens", "Prompt tokens not computed yet."
)
WORKER_KV_USAGE = Gauge(
    "twinpool_worker_kv_cache_usage_perc", "Share of blocks that sequences or pins hold, 0 to 1."
)
WORKER_BLOCKS = Gauge(
    "twinpool_worker_kv_blocks",
    "Blocks by state: free, cached, held, pinned, quarantined; and prefix_pinned of cached and held ones.",
    ["state"],
)
WORKER_PREFIX_PINS = Gauge("twinpool_worker_prefix_pins", "Pins that keep a prefix in the cache.")
WORKER_PIN_EVENTS = Counter(
    "twinpool_worker_prefix_pin_events",
    "What became of pins: pinned, renewed, refused, released, expired, gave_way.",
    ["outcome"],
)
WORKER_CACHE_CONFIG = Info("twinpool_worker_cache_config", "Layout of the KV pool.")
WORKER_PREFIX_QUERIES = Counter(
    "twinpool_worker_prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
)
WORKER_PREFIX_HITS = Counter("twinpool_worker_prefix_cache_hits", "Prompt tokens found in the prefix cache.")
WORKER_PREFIX_FETCHES = Counter(
    "twinpool_worker_prefix_fetches",
    "Prefixes pulled from another worker: FETCHED, or why they were computed instead.",
    ["reason"],
)
WORKER_PREFIX_FETCHED_TOKENS = Counter(
    "twinpool_worker_prefix_fetched_tokens", "Prompt tokens whose KV was pulled from another worker's cache."
)
WORKER_PREFIX_FETCH_TIME = Histogram(
    "twinpool_worker_prefix_fetch_time_seconds",
    "What a prompt waited for its prefix, pulled or given up.",
    buckets=SHORT_BUCKETS,
)
WORKER_PREEMPTIONS = Counter("twinpool_worker_num_preemptions", "Sequences preempted for lack of blocks.")
WORKER_SWAPPED_BLOCKS = Counter(
    "twinpool_worker_swapped_blocks",
    "Blocks of preempted sequences copied to host memory (direction out) and back (in).",
    ["direction"],
)
WORKER_EVICTED_BLOCKS = Counter(
    "twinpool_worker_evicted_blocks",
    "Cached blocks that are cached no more: evicted, or dropped with the cache.",
)
WORKER_PROMPT_TOKENS = Counter("twinpool_worker_prompt_tokens", "Prompt tokens computed.")
WORKER_GENERATION_TOKENS = Counter("twinpool_worker_generation_tokens", "Tokens drawn.")
WORKER_STEP_TIME = Histogram(
    "twinpool_worker_step_time_seconds", "One step: plan, model, sampling.", buckets=ITL_BUCKETS
)
WORKER_PLAN_TIME = Histogram(
    "twinpool_worker_plan_time_seconds", "The scheduler's share of a step.", buckets=SHORT_BUCKETS
)
WORKER_STEP_TOKENS = Histogram("twinpool_worker_step_tokens", "Tokens in one step.", buckets=TOKEN_BUCKETS)
WORKER_STEPS_AHEAD = Counter(
    "twinpool_worker_steps_ahead", "Steps begun before the tokens of the step before were told."
)
WORKER_STEP_FAILURES = Counter("twinpool_worker_step_failures", "Steps that raised.")
WORKER_ATTEMPT_FAILURES = Counter(
    "twinpool_worker_attempt_failures", "Attempts that this worker failed or refused, by reason.", ["reason"]
)
WORKER_CANCELLED_ATTEMPTS = Counter("twinpool_worker_cancelled_attempts", "Attempts ended by a cancel.")
WORKER_CANCEL_TIME = Histogram(
    "twinpool_worker_cancel_time_seconds", "From a cancel to its acknowledgement.", buckets=TTFT_BUCKETS
)
WORKER_KEPT_ANSWERS = Gauge(
    "twinpool_worker_kept_answers", "Resumable answers whose tokens are kept for another router."
)
WORKER_SESSIONS = Gauge("twinpool_worker_sessions", "Open sessions with routers.")
WORKER_OFFERED_BLOCKS = Counter("twinpool_worker_offered_blocks", "Cached blocks taken by others at its end.")
WORKER_UNREADY = Gauge(
    "twinpool_worker_unready",
    "1 while the worker is not ready for this cause: event_loop, step_loop, transfer_thread, transfer, lease.",
    ["cause"],
)
WORKER_UTILIZATION = Gauge(
    "twinpool_worker_utilization_ratio", "Share of the last 10 s spent in steps, 0 to 1, by role.", ["role"]
)
WORKER_UTILIZATION_SWING = Gauge(
    "twinpool_worker_utilization_swing_ratio",
    "The greatest minus the smallest such share of the last 5 minutes, by role.",
    ["role"],
)
WORKER_MODEL_LOAD_TIME = Gauge("twinpool_worker_model_load_seconds", "Time that loading the model took.")

# --- worker: KV events and locality -------------------------------------------------------

WORKER_KV_EVENT_BATCHES = Counter("twinpool_worker_kv_event_batches", "Batches of KV events published.")
WORKER_KV_EVENT_REQUESTS = Counter(
    "twinpool_worker_kv_event_requests",
    "Requests for past events by kind: replay, snapshot, invalid.",
    ["kind"],
)
WORKER_LOCALITY_WRITES = Counter(
    "twinpool_worker_locality_writes",
    "Writes of locality to etcd, by kind (base, delta, drop) and result.",
    ["kind", "result"],
)
WORKER_LOCALITY_BYTES = Counter("twinpool_worker_locality_bytes", "Bytes of locality written to etcd.")
