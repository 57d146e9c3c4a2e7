# SPDX-License-Identifier: Apache-2.0
"""The sections of the configuration: one class a section, one described field a key.

The description states the unit and the reason of the default; docs/configuration.md is generated from it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from twinpool.config.base import RELOADABLE, Endpoints, Name, OptionalName, Section

MiB = 1 << 20


class ClusterConfig(Section):
    """Which cluster this process belongs to, and its etcd."""

    name: Name = Field(default="local", description="Name of the cluster; part of every etcd key.")
    etcd_endpoints: Endpoints = Field(
        default=("127.0.0.1:2379",),
        min_length=1,
        max_length=9,
        description="etcd members as host:port; all are tried. In the environment: comma-separated.",
    )
    etcd_user: str = Field(default="", description="etcd user; empty: no authentication.")
    etcd_password_file: str = Field(default="", description="File that holds the etcd user's password.")
    etcd_ca_file: str = Field(
        default="", description="PEM file of the CA that signed etcd's certificate; empty: no TLS."
    )
    etcd_cert_file: str = Field(
        default="", description="PEM file of this process's client certificate for etcd."
    )
    etcd_key_file: str = Field(default="", description="PEM file of that certificate's private key.")
    etcd_timeout_seconds: float = Field(
        default=2.0,
        ge=0.1,
        le=60,
        description="Deadline of one etcd call, in seconds. Short: a silent member must not stall a lease.",
    )
    lease_ttl_seconds: int = Field(
        default=10,
        ge=2,
        le=3600,
        description="Life of a registration without a keep-alive, in seconds. At least 2: etcd counts whole seconds.",
    )


class ModelSection(Section):
    """The model that a worker serves."""

    path: str = Field(default="", description="Directory with config.json, safetensors and the tokenizer.")
    name: str = Field(
        default="", max_length=256, description="Served name; empty: the last part of the path."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Type of weights and KV. float32 is the fast and exact one on CPU."
    )
    attention: Literal["latent", "gqa"] = Field(
        default="latent",
        description="How a GQA model is run: through the latent (MLA) path by exact re-expression, or as it is.",
    )
    kernels: str = Field(
        default="",
        max_length=64,
        description="Backend of kernels to prefer (see twinpool kernels); empty: the fastest that fits the device.",
    )
    max_context_tokens: int = Field(
        default=0,
        ge=0,
        description="Most tokens that prompt and output may have together; 0: the model's own limit.",
    )


class KVConfig(Section):
    """The KV pool of a worker."""

    num_blocks: int = Field(
        default=1024, ge=2, le=1 << 24, description="Blocks in the pool; its memory is allocated at start."
    )
    block_tokens: int = Field(
        default=64,
        ge=16,
        le=128,
        multiple_of=16,
        description="Token positions a block; a multiple of 16 that kernels can tile. Part of the fingerprint.",
    )
    dtype: Literal["auto", "fp8_latent"] = Field(
        default="auto",
        description=(
            "How cached rows are stored. auto: in model.dtype; fp8_latent: the latent in 8 bits with a scale for each "
            "128 values, the rotary part in bfloat16 (656 instead of 1152 bytes a token and layer of DeepSeek-V3). Part of "
            "the fingerprint."
        ),
    )
    host_blocks: int = Field(
        default=0,
        ge=0,
        le=1 << 24,
        description=(
            "Blocks of host memory that keep the KV of preempted sequences; allocated at start. 0: such sequences are recomputed, "
            "which is right where host memory is scarce or preemption rare."
        ),
    )
    poison_freed: bool = Field(
        default=False,
        description="Fill freed blocks with NaN, so that a read of them shows. For tests: it costs a write.",
    )


class SchedulerSection(Section):
    """What one step of a worker may contain."""

    max_num_seqs: int = Field(default=64, ge=1, le=4096, description="Most sequences in one step.")
    max_batched_tokens: int = Field(
        default=2048,
        ge=1,
        le=1 << 20,
        description="Most tokens in one step, prefill and decode together; bounds step time.",
    )
    max_chunk_tokens: int = Field(
        default=512,
        ge=1,
        le=1 << 20,
        description="Most prompt tokens of one sequence in one step. Smaller chunks let the pull of KV overlap more.",
    )
    policy: Literal["fcfs", "priority", "shortest_uncached"] = Field(
        default="fcfs",
        description=(
            "Order of the waiting sequences: by arrival; by priority, then arrival; or fewest tokens to compute first. Under "
            "priority it also decides who gives way first."
        ),
    )
    max_overtaken: int = Field(
        default=64,
        ge=0,
        le=1 << 20,
        description=(
            "Admissions to the batch that a waiting sequence sees at most before it goes first, whatever the policy; 0: no "
            "bound. 64: a batch's worth."
        ),
    )
    ahead: Literal["auto", "on", "off"] = Field(
        default="auto",
        description=(
            "Whether a step of greedy decodes is begun before the tokens of the step before are told, so that the device does "
            "not wait for the host. `auto`: on a GPU. On a CPU it only delays every token by a step."
        ),
    )


class TransferConfig(Section):
    """How KV blocks move."""

    backend: Literal["nixl", "loopback"] = Field(
        default="nixl",
        description="nixl moves blocks between processes; loopback only inside one process, for tests.",
    )
    ucx_tls: str = Field(
        default="tcp,sm,self",
        description="UCX transports. tcp must be among them. With GPUs add cuda_copy,cuda_ipc; with RDMA add rc.",
    )
    lease_seconds: float = Field(
        default=30.0,
        ge=1,
        le=3600,
        description="How long an owner keeps offered blocks pinned without a sign of the reader, in seconds.",
    )
    read_deadline_seconds: float = Field(
        default=10.0,
        ge=0.1,
        le=600,
        description="Longest time of one read besides its bytes, in seconds. NIXL never reports a hung peer, so this does.",
    )
    floor_bytes_per_second: float = Field(
        default=100e6,
        ge=1e3,
        le=1e12,
        description="Slowest rate that a healthy pull has; its deadline is longer by its bytes over this.",
    )
    fetch_deadline_seconds: float = Field(
        default=5.0,
        ge=0.01,
        le=600,
        description="How long a prompt waits for a cached prefix, in seconds besides its bytes; then it is computed.",
    )
    digest: Literal["off", "sample", "always"] = Field(
        default="off",
        description="Check a digest of pulled blocks: never, in one transfer of 16, or always.",
    )
    poll_microseconds: int = Field(
        default=150,
        ge=10,
        le=100_000,
        description="Poll period of the transfer thread while reads are in flight, in microseconds.",
    )
    idle_poll_microseconds: int = Field(
        default=2000,
        ge=10,
        le=1_000_000,
        description="Poll period when nothing is in flight, in microseconds; bounds how long an idle owner stalls a reader.",
    )


class WorkerSection(Section):
    """A prefill or decode worker."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on and to register.")
    port: int = Field(default=0, ge=0, le=65535, description="Port of the gRPC services; 0: a free one.")
    name: OptionalName = Field(default="", description="Stable name; empty: role and a random suffix.")
    pool: Name = Field(default="default", description="Pool that the worker joins.")
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads of the engine.")
    device: str = Field(
        default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:<index>."
    )
    calibration_seconds: float = Field(
        default=1.0,
        ge=0,
        le=60,
        description="How long a starting worker may measure its prefill and decode steps, in seconds; 0: it does not.",
    )
    report_interval_seconds: float = Field(
        default=0.25, ge=0.01, le=60, description="Time between two load reports to a router, in seconds."
    )
    drain_timeout_seconds: float = Field(
        default=30.0, ge=0, le=86400, description="Longest wait for running requests at a stop, in seconds."
    )
    hang_seconds: float = Field(
        default=20.0,
        ge=0.5,
        le=3600,
        description="How long a loop may stand still with work at hand before the worker ends its sessions, in seconds. Above any step.",
    )
    give_up_seconds: float = Field(
        default=60.0,
        ge=0,
        le=86400,
        description="How long a loop may stand still, or the transfer path be broken, before the worker ends itself, to be started anew, "
        "in seconds; 0: it never does.",
    )
    offer_seconds: float = Field(
        default=5.0,
        ge=0,
        le=600,
        description="How long other workers may pull the most used prefixes of a worker that leaves, in seconds; 0: none are offered.",
    )
    offer_bytes: int = Field(
        default=1 << 30,
        ge=0,
        le=1 << 40,
        description="Most bytes of them that a worker that leaves offers.",
    )
    linger_seconds: float = Field(
        default=1.0,
        ge=0,
        le=3600,
        description="How long a worker that had to wait for running requests at a stop goes on serving its cached blocks to others.",
    )
    max_kept_answers: int = Field(
        default=1024,
        ge=0,
        le=1 << 20,
        description="Most resumable answers whose tokens a decode worker keeps for another router; the oldest go first.",
    )
    kept_bytes: int = Field(
        default=64 * MiB,
        ge=0,
        le=1 << 40,
        description="Most memory of those answers, in bytes: 4 a token, prompts included.",
    )


class KvEventsConfig(Section):
    """How a worker tells what it caches."""

    port: int = Field(
        default=0,
        ge=0,
        le=65534,
        description="Port on which events are published over ZeroMQ; the next one answers who missed some. 0: two free ones.",
    )
    heartbeat_seconds: float = Field(
        default=1.0,
        ge=0.05,
        le=60,
        description="A worker that has no event to publish says so after this time, in seconds, so that silence means loss.",
    )
    replay_batches: int = Field(
        default=10_000,
        ge=1,
        le=1 << 24,
        description="Batches of events kept for subscribers that missed some.",
    )
    replay_bytes: int = Field(
        default=16 * MiB, ge=1024, le=1 << 34, description="Most memory of those batches, in bytes."
    )
    segment_interval_seconds: float = Field(
        default=1.0,
        ge=0.5,
        le=3600,
        description="Time between two writes of locality to etcd, in seconds. At least 0.5: two writes a second a worker.",
    )
    silence_seconds: float = Field(
        default=5.0,
        ge=0.1,
        le=3600,
        description="A router that hears nothing of a worker for so long asks it, in seconds.",
    )
    resync_timeout_seconds: float = Field(
        default=2.0,
        ge=0.05,
        le=600,
        description="Longest wait for the next message of a replay or snapshot, in seconds.",
    )


class LogConfig(Section):
    """Logs on stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level that is written.", json_schema_extra=RELOADABLE
    )
    format: Literal["auto", "json", "console"] = Field(
        default="auto", description="auto: JSON unless stderr is a terminal."
    )

    @property
    def as_json(self) -> bool | None:
        """What ``logs.setup`` takes: None lets it look at the stream."""
        return None if self.format == "auto" else self.format == "json"


class MetricsConfig(Section):
    """The Prometheus endpoint."""

    enabled: bool = Field(default=True, description="Serve /metrics.")
    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=0, ge=0, le=65535, description="Port; 0: a free one.")
    short_prompt_tokens: int = Field(
        default=1024,
        ge=1,
        le=1 << 30,
        description="Longest prompt whose time to first token counts among those of short ones, too.",
        json_schema_extra=RELOADABLE,
    )


class TracingConfig(Section):
    """Spans of requests, by OpenTelemetry."""

    endpoint: str = Field(
        default="",
        description="Collector that takes OTLP over gRPC, as http://host:port; empty: nothing is traced. Needs twinpool[tracing].",
    )
    sample_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of requests that are traced where the client has not decided, 0 to 1.",
    )


class TlsConfig(Section):
    """Mutual TLS of every gRPC connection inside the cluster. All three files, or none."""

    cert_file: str = Field(
        default="", description="PEM file of this process's certificate chain. Read anew when it changes."
    )
    key_file: str = Field(default="", description="PEM file of its private key.")
    ca_file: str = Field(default="", description="PEM file of the CA that signed the peers' certificates.")
    server_name: str = Field(
        default="", description="Name to expect in a server's certificate; empty: the host dialled."
    )
    role_domain: str = Field(
        default="",
        description="Domain under which certificates name the role of their process (ROLE.DOMAIN; roles are router, worker, "
        "control, operator), which then decides what it may call; empty: all that the CA signed may call all.",
    )

    @property
    def enabled(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.cert_file)
