# SPDX-License-Identifier: Apache-2.0
"""The router's section: where it listens, how much may wait, and how it places."""

from __future__ import annotations

from pydantic import Field

from twinpool.config.base import RELOADABLE, Name, Names, OptionalName
from twinpool.config.requests import RequestLimits

MiB = 1 << 20


class RouterSection(RequestLimits):
    """A router."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=0, ge=0, le=65535, description="Port of the gRPC services; 0: a free one.")
    reuse_port: bool = Field(
        default=False,
        description="Share a fixed port with other router processes of this host: the kernel spreads connections over them.",
    )
    name: OptionalName = Field(default="", description="Stable name; empty: router and a random suffix.")
    pool: Name = Field(default="default", description="Pool whose workers answer.")
    pools: Names = Field(
        default=(), description="Pools whose workers answer; empty: router.pool and those of pools.further."
    )
    tokenizer_threads: int = Field(default=1, ge=1, le=64, description="Threads that tokenise.")

    trace_requests: int = Field(
        default=1000,
        ge=0,
        le=1 << 20,
        description="Requests whose steps and reasons are kept for `twinpool trace`, some 8 KB each; 0: none.",
    )
    record_bytes: int = Field(
        default=0,
        ge=0,
        le=1 << 30,
        description="Most memory of the newest calls to the core and their outcomes, kept for `twinpool core record`, in bytes; "
        "two states of the core, index included, come on top. 0: none are kept.",
    )
    token_cache_bytes: int = Field(
        default=256 * MiB,
        ge=0,
        le=1 << 40,
        description="Most memory of tokenised beginnings of conversations, in bytes: some 10 to 20 a token. 0: none are kept.",
    )

    chat_template: str = Field(
        default="",
        max_length=4096,
        description="File with a chat template that takes the place of the models' own; empty: theirs.",
    )
    call_format: str = Field(
        default="",
        max_length=64,
        description="How the models write calls of tools: hermes, deepseek, llama3_json, mistral, or a plug-in's name; empty: as "
        "their chat templates show.",
    )
    http_port: int = Field(
        default=-1,
        ge=-1,
        le=65535,
        description="Port of the OpenAI-compatible HTTP API; 0: a free one; -1: there is none.",
    )
    tenants_file: str = Field(
        default="",
        max_length=4096,
        description="YAML file of the tenants that are served, with their keys and limits; it is followed. Empty: everybody is.",
    )
    usage_file: str = Field(
        default="",
        max_length=4096,
        description="File to which what each tenant uses is appended, a line of JSON a stream; empty: none.",
    )
    max_usage_tenants: int = Field(
        default=10_000, ge=1, le=1 << 24, description="Most tenants whose usage is counted apart."
    )

    max_queue_requests: int = Field(
        default=4096,
        ge=1,
        le=1 << 24,
        description="Most requests that may wait.",
        json_schema_extra=RELOADABLE,
    )
    max_queue_tokens: int = Field(
        default=8 << 20,
        ge=1,
        le=1 << 40,
        description="Most prompt tokens that may wait, over all requests.",
        json_schema_extra=RELOADABLE,
    )
    max_queue_bytes: int = Field(
        default=256 * MiB,
        ge=1024,
        le=1 << 40,
        description="Most memory of waiting requests, in bytes.",
        json_schema_extra=RELOADABLE,
    )
    max_tenant_requests: int = Field(
        default=0,
        ge=0,
        le=1 << 24,
        description="Most requests of one tenant in flight; 0: no limit.",
        json_schema_extra=RELOADABLE,
    )
    tenant_tokens_per_second: float = Field(
        default=0.0,
        ge=0,
        le=1e12,
        description="Token rate of one tenant, prompt and max_tokens together; 0: no limit.",
        json_schema_extra=RELOADABLE,
    )
    tenant_burst_tokens: float = Field(
        default=0.0,
        ge=0,
        le=1e12,
        description="Tokens that a tenant may take at once above its rate; 0: ten seconds' worth.",
        json_schema_extra=RELOADABLE,
    )
    tenant_max_priority: int = Field(
        default=100,
        ge=-100,
        le=100,
        description="Highest priority of a tenant; higher ones are lowered to it.",
        json_schema_extra=RELOADABLE,
    )
    queue_ttl_seconds: float = Field(
        default=60.0,
        gt=0,
        le=86400,
        description="Longest wait in the queue, in seconds.",
        json_schema_extra=RELOADABLE,
    )
    ageing_seconds: float = Field(
        default=10.0,
        gt=0,
        le=86400,
        description="A waiting request rises one priority each time this passes, in seconds.",
        json_schema_extra=RELOADABLE,
    )
    order_stretch: float = Field(
        default=4.0,
        ge=0,
        le=1000,
        description="Without a deadline, a request is due this many times its expected compute later: short ones first; 0: by arrival.",
        json_schema_extra=RELOADABLE,
    )
    max_bypass: int = Field(
        default=32,
        ge=0,
        le=1 << 20,
        description="Most smaller requests that may go before one that does not fit yet.",
        json_schema_extra=RELOADABLE,
    )
    refuse_without_workers: bool = Field(
        default=False,
        description="Refuse a request at once where a role has no worker at all, instead of waiting for one.",
        json_schema_extra=RELOADABLE,
    )
    early_rejection: bool = Field(
        default=True,
        description="Refuse a request whose answer of the usual length would not end before its deadline, by what was measured.",
        json_schema_extra=RELOADABLE,
    )
    preemption: bool = Field(
        default=False,
        description="Let a request of higher priority take the place of a preemptible lower one that has no token yet.",
        json_schema_extra=RELOADABLE,
    )
    preemption_grace_seconds: float = Field(
        default=0.5,
        ge=0,
        le=86400,
        description="How long the higher one waits first, in seconds.",
        json_schema_extra=RELOADABLE,
    )
    max_attempts: int = Field(
        default=3,
        ge=1,
        le=100,
        description="Most placements of one request until its client has a token.",
        json_schema_extra=RELOADABLE,
    )
    max_resumes: int = Field(
        default=4,
        ge=0,
        le=1000,
        description="How often an answer of which the client has tokens goes on at the next token on other workers. 0: it fails.",
        json_schema_extra=RELOADABLE,
    )
    retry_ratio: float = Field(
        default=0.2,
        ge=0,
        le=100,
        description="How many failed attempts may be placed anew for each request. Lost workers, and refusals, do not count.",
        json_schema_extra=RELOADABLE,
    )
    retry_burst: float = Field(
        default=100.0,
        ge=0,
        le=1e6,
        description="Largest such budget, and the one at the start. 0 with retry_ratio 0: what a worker failed fails.",
        json_schema_extra=RELOADABLE,
    )
    breaker_failures: int = Field(
        default=5,
        ge=0,
        le=1 << 20,
        description="Failures of a worker in a row after which it gets no work for a while, if another one does the same; 0: never.",
        json_schema_extra=RELOADABLE,
    )
    breaker_open_seconds: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        description="How long it gets none before one request may prove it, in seconds; twice that each time it fails, at most 16 times.",
        json_schema_extra=RELOADABLE,
    )
    retry_backoff_seconds: float = Field(
        default=0.1,
        ge=0,
        le=3600,
        description="How long a request waits before it goes back to a worker that failed it, where all others did too, in seconds; "
        "doubled with each failure, at most 64 times as long. 0: not at all.",
        json_schema_extra=RELOADABLE,
    )
    max_refusals: int = Field(
        default=64,
        ge=0,
        le=1 << 20,
        description="Most refusals of one request by workers without room or about to leave; they cost no attempt.",
        json_schema_extra=RELOADABLE,
    )
    refusal_backoff_seconds: float = Field(
        default=0.25,
        gt=0,
        le=3600,
        description="How long a worker that refused gets no request of that size, in seconds, unless its load changes.",
        json_schema_extra=RELOADABLE,
    )
    finish_seconds: float = Field(
        default=1.0,
        ge=0,
        le=86400,
        description="How long answers on a decode worker that drains or flips may end by themselves before they go on elsewhere.",
        json_schema_extra=RELOADABLE,
    )
    prefill_window_tokens: int = Field(
        default=16384,
        ge=1,
        le=1 << 30,
        description="Most prompt tokens placed on one prefill worker at a time; the rest waits where it can still be placed elsewhere.",
        json_schema_extra=RELOADABLE,
    )
    transfer_window_requests: int = Field(
        default=32,
        ge=1,
        le=1 << 16,
        description="Most hand-offs towards one decode worker at a time.",
        json_schema_extra=RELOADABLE,
    )
    prefix_fetch: bool = Field(
        default=True,
        description="Let a worker pull a cached prefix from any other where that is predicted to be faster than computing it.",
        json_schema_extra=RELOADABLE,
    )
    fetch_backoff_seconds: float = Field(
        default=10.0,
        ge=0,
        le=3600,
        description="How long no prefix is pulled from a worker that did not deliver one, in seconds.",
        json_schema_extra=RELOADABLE,
    )
    local_prefill: bool = Field(
        default=True,
        description="Let a decode worker compute a prompt itself where that is predicted to cost less than a hand-off, "
        "its running streams included.",
        json_schema_extra=RELOADABLE,
    )
    harm_weight: float = Field(
        default=0.1,
        ge=0,
        le=1000,
        description="Seconds of delay of a prompt that a second of slowed streams is worth in a placement.",
        json_schema_extra=RELOADABLE,
    )
    expected_output_ratio: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of max_tokens that answers are believed to have, until some were seen.",
    )
    index_max_bytes: int = Field(
        default=256 * MiB,
        ge=0,
        le=1 << 40,
        description="Most memory of the prefix index, in bytes; 0: no limit. Above it the least used blocks are forgotten.",
    )
    retry_after_min_seconds: float = Field(
        default=0.05,
        ge=0,
        le=3600,
        description="Shortest delay that a refusal asks a client to wait, in seconds.",
        json_schema_extra=RELOADABLE,
    )
    retry_after_max_seconds: float = Field(
        default=60.0,
        ge=0,
        le=86400,
        description="Longest such delay, in seconds.",
        json_schema_extra=RELOADABLE,
    )
    prior_prefill_seconds: float = Field(
        default=0.002,
        ge=0,
        le=3600,
        description="Time of a prefill besides its tokens, in seconds, until prefills of the model were measured.",
    )
    prior_prefill_token_seconds: float = Field(
        default=1e-4, ge=0, le=3600, description="Time of one prompt token, in seconds, until then."
    )
    prior_transfer_seconds: float = Field(
        default=0.001,
        ge=0,
        le=3600,
        description="Time of a pull besides its blocks, in seconds, until pulls were measured.",
    )
    prior_transfer_block_seconds: float = Field(
        default=1.3e-4, ge=0, le=3600, description="Time of one block of a pull, in seconds, until then."
    )
    quarantine_seconds: float = Field(
        default=2.0,
        ge=0,
        le=3600,
        description="How long a worker whose stream broke gets no work, in seconds.",
    )
    reserve_timeout_seconds: float = Field(
        default=10.0,
        gt=0,
        le=600,
        description="Longest wait for a decode worker to reserve, in seconds. It answers between two of its steps.",
        json_schema_extra=RELOADABLE,
    )
    max_buffered_tokens: int = Field(
        default=16384,
        ge=1,
        le=1 << 24,
        description="Most tokens of a request that may wait for its client to read them; above it the request fails.",
    )
    client_stall_seconds: float = Field(
        default=60.0,
        gt=0,
        le=86400,
        description="Longest time that a client may read nothing while an event waits for it, in seconds; then its stream fails.",
    )
    stream_interval_seconds: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="Least time between two messages of one stream after its first token, in seconds; tokens gather "
        "meanwhile. 0: each step's tokens are sent at once. Larger values save most of the router's work a token.",
        json_schema_extra=RELOADABLE,
    )
    cancel_timeout_seconds: float = Field(
        default=5.0,
        gt=0,
        le=600,
        description="Longest wait for a worker to acknowledge a cancel, in seconds.",
    )
    drain_timeout_seconds: float = Field(
        default=30.0, ge=0, le=86400, description="Longest wait for running streams at a stop, in seconds."
    )

    resume_bytes: int = Field(
        default=256 * MiB,
        ge=0,
        le=1 << 40,
        description="Most memory of resumable answers, in bytes: some 20 to 40 a token. Above it ended ones are forgotten early, "
        "and while all that run take more, no request gets a resume grace.",
    )
    takeover_timeout_seconds: float = Field(
        default=2.0,
        gt=0,
        le=60,
        description="Longest wait for other routers and for workers when an answer of another router is asked for, in seconds.",
    )
    resume_key_file: str = Field(
        default="",
        description="File with the key that seals resume tokens, at least 16 bytes, the same for all routers. "
        "Empty: one that the first router puts into etcd.",
    )
