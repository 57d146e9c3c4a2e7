# SPDX-License-Identifier: Apache-2.0
"""Configuration of every process: flags over environment over YAML file over defaults."""

from twinpool.config.audit import AuditConfig
from twinpool.config.client import ClientSection, ClientTls
from twinpool.config.further import pool_config, pool_keys, pool_names, served_name, served_pools
from twinpool.config.load import ENV_FILE, ENV_PREFIX, env_name, load_config, to_env, to_yaml
from twinpool.config.model import TwinpoolConfig, fields, sections
from twinpool.config.page import config_schema
from twinpool.config.pools import ControlSection, FurtherPool, PoolKeys, PoolsSection
from twinpool.config.rebalance import RebalanceSection
from twinpool.config.reload import Values, check_reloadable, overlay, reloadable, source_of, value_at
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
from twinpool.errors import ConfigError

__all__ = [
    "ENV_FILE",
    "ENV_PREFIX",
    "AuditConfig",
    "ClientSection",
    "ClientTls",
    "ClusterConfig",
    "ConfigError",
    "ControlSection",
    "FurtherPool",
    "KVConfig",
    "KvEventsConfig",
    "LogConfig",
    "MetricsConfig",
    "ModelSection",
    "PoolKeys",
    "PoolsSection",
    "RebalanceSection",
    "RouterSection",
    "RpcConfig",
    "SchedulerSection",
    "SessionsSection",
    "TlsConfig",
    "TracingConfig",
    "TransferConfig",
    "TwinpoolConfig",
    "Values",
    "WorkerSection",
    "check_reloadable",
    "config_schema",
    "env_name",
    "fields",
    "load_config",
    "overlay",
    "pool_config",
    "pool_keys",
    "pool_names",
    "reloadable",
    "sections",
    "served_name",
    "served_pools",
    "source_of",
    "to_env",
    "to_yaml",
    "value_at",
]
