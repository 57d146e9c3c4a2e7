# SPDX-License-Identifier: Apache-2.0
"""The whole configuration and the rules between its sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from twinpool.config.audit import AuditConfig
from twinpool.config.base import Section
from twinpool.config.client import ClientSection, client_rules
from twinpool.config.further import further_rules
from twinpool.config.pools import ControlSection, PoolsSection, broken_pool_rules
from twinpool.config.rebalance import RebalanceSection, rebalance_rules
from twinpool.config.router import RouterSection
from twinpool.config.rpc import RpcConfig
from twinpool.config.sections import (
    ClusterConfig,
    KVConfig,
    KvEventsConfig,
    LogConfig,
    MetricsConfig,
    ModelSection,
    SchedulerSection,
    TlsConfig,
    TracingConfig,
    TransferConfig,
    WorkerSection,
)
from twinpool.config.sessions import SessionsSection

# A prompt between router and worker: 4 bytes a token, and 16 for the hash of each block of 16 or more.
_WIRE_BYTES_PER_TOKEN = 5
_WIRE_OVERHEAD_BYTES = 64 * 1024


class TwinpoolConfig(BaseSettings):
    """Every setting of every Twinpool process. Frozen.

    The constructor takes its arguments alone; ``load_config`` adds the file and the environment.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="TWINPOOL_",
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    model: ModelSection = Field(default_factory=ModelSection)
    kv: KVConfig = Field(default_factory=KVConfig)
    kv_events: KvEventsConfig = Field(default_factory=KvEventsConfig)
    scheduler: SchedulerSection = Field(default_factory=SchedulerSection)
    transfer: TransferConfig = Field(default_factory=TransferConfig)
    router: RouterSection = Field(default_factory=RouterSection)
    worker: WorkerSection = Field(default_factory=WorkerSection)
    sessions: SessionsSection = Field(default_factory=SessionsSection)
    pools: PoolsSection = Field(default_factory=PoolsSection)
    control: ControlSection = Field(default_factory=ControlSection)
    rebalance: RebalanceSection = Field(default_factory=RebalanceSection)
    rpc: RpcConfig = Field(default_factory=RpcConfig)
    tls: TlsConfig = Field(default_factory=TlsConfig)
    client: ClientSection = Field(default_factory=ClientSection)
    log: LogConfig = Field(default_factory=LogConfig)
    audit: AuditConfig = Field(default_factory=AuditConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    tracing: TracingConfig = Field(default_factory=TracingConfig)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only arguments: a test or a child process must not change with a stray variable."""
        return (init_settings,)

    @model_validator(mode="after")
    def _rules(self) -> TwinpoolConfig:
        for message in broken_rules(self):
            raise ValueError(message)
        return self


def broken_rules(config: TwinpoolConfig) -> Iterator[str]:
    """The rules between keys that ``config`` breaks; each message starts with the key at fault."""
    scheduler, transfer, router, rpc = config.scheduler, config.transfer, config.router, config.rpc
    if scheduler.max_chunk_tokens > scheduler.max_batched_tokens:
        yield (
            f"scheduler.max_chunk_tokens: {scheduler.max_chunk_tokens} exceeds "
            f"scheduler.max_batched_tokens = {scheduler.max_batched_tokens}; a chunk must fit in a step"
        )
    if scheduler.max_num_seqs > scheduler.max_batched_tokens:
        yield (
            f"scheduler.max_num_seqs: {scheduler.max_num_seqs} exceeds scheduler.max_batched_tokens = "
            f"{scheduler.max_batched_tokens}; each running sequence needs one token a step"
        )
    if transfer.read_deadline_seconds >= transfer.lease_seconds:
        yield (
            f"transfer.read_deadline_seconds: {transfer.read_deadline_seconds} is not below "
            f"transfer.lease_seconds = {transfer.lease_seconds}; a read must end while its blocks are pinned"
        )
    if (
        transfer.backend == "nixl"
        and "tcp" not in transfer.ucx_tls.split(",")
        and transfer.ucx_tls not in ("", "all")
    ):
        yield f"transfer.ucx_tls: {transfer.ucx_tls!r} lacks tcp, without which UCX makes no connection"
    events = config.kv_events
    if events.silence_seconds <= events.heartbeat_seconds:
        yield (
            f"kv_events.silence_seconds: {events.silence_seconds} is not above kv_events.heartbeat_seconds = "
            f"{events.heartbeat_seconds}; a worker that is well would count as silent"
        )
    wire = router.max_prompt_tokens * _WIRE_BYTES_PER_TOKEN + _WIRE_OVERHEAD_BYTES
    if wire > rpc.max_message_bytes:
        yield (
            f"rpc.max_message_bytes: {rpc.max_message_bytes} is too small for a prompt of "
            f"router.max_prompt_tokens = {router.max_prompt_tokens}, which takes up to {wire} bytes between router and worker"
        )
    yield from broken_pool_rules(config.pools)
    yield from further_rules(config)
    yield from rebalance_rules(config.rebalance)
    yield from _file_rules(config)
    if broken := client_rules(config.client):
        yield broken


def _file_rules(config: TwinpoolConfig) -> Iterator[str]:
    tls, cluster = config.tls, config.cluster
    given = [name for name in ("cert_file", "key_file", "ca_file") if getattr(tls, name)]
    if given and len(given) < 3:
        missing = next(name for name in ("cert_file", "key_file", "ca_file") if name not in given)
        yield f"tls.{missing}: must be set, since tls.{given[0]} is: mutual TLS needs all three files"
    if bool(cluster.etcd_cert_file) != bool(cluster.etcd_key_file):
        missing = "etcd_key_file" if cluster.etcd_cert_file else "etcd_cert_file"
        yield f"cluster.{missing}: must be set, since its counterpart is"
    if cluster.etcd_cert_file and not cluster.etcd_ca_file:
        yield "cluster.etcd_ca_file: must be set, since cluster.etcd_cert_file is"
    if bool(cluster.etcd_user) != bool(cluster.etcd_password_file):
        missing = "etcd_password_file" if cluster.etcd_user else "etcd_user"
        yield f"cluster.{missing}: must be set, since its counterpart is"


def fields() -> Iterator[tuple[str, str, FieldInfo]]:
    """Every key as (section, name, field), in the order of the sections."""
    for section, kind in sections().items():
        for name, info in kind.model_fields.items():
            yield section, name, info


def sections() -> dict[str, type[Section]]:
    """The class of each section, by the section's name."""
    found: dict[str, type[Section]] = {}
    for section, info in TwinpoolConfig.model_fields.items():
        kind: Any = info.annotation
        assert issubclass(kind, Section)
        found[section] = kind
    return found
