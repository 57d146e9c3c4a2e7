# SPDX-License-Identifier: Apache-2.0
"""Configuration of every process: flags over environment over YAML file over defaults."""

from twinpool.config.audit import AuditConfig
from twinpool.config.client import ClientSection, ClientTls
from twinpool.config.load import ENV_FILE, ENV_PREFIX, env_name, load_config, to_env, to_yaml
from twinpool.config.model import TwinpoolConfig
from twinpool.config.page import config_schema
from twinpool.config.pools import ControlSection, PoolsSection
from twinpool.config.rebalance import RebalanceSection
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
    "KVConfig",
    "KvEventsConfig",
    "LogConfig",
    "MetricsConfig",
    "ModelSection",
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
    "WorkerSection",
    "config_schema",
    "env_name",
    "load_config",
    "to_env",
    "to_yaml",
]
