# SPDX-License-Identifier: Apache-2.0
"""Errors that cross a process boundary: one table, one exception, and their way onto the wire and back."""

from twinpool.errors.core import (
    DOMAIN,
    CheckpointError,
    ConfigError,
    TwinpoolError,
    as_twinpool_error,
)
from twinpool.errors.spec import ErrorSpec
from twinpool.errors.status import abort, from_rpc_error, to_status
from twinpool.errors.table import GROUPS, TABLE

__all__ = [
    "DOMAIN",
    "GROUPS",
    "TABLE",
    "CheckpointError",
    "ConfigError",
    "ErrorSpec",
    "TwinpoolError",
    "abort",
    "as_twinpool_error",
    "from_rpc_error",
    "to_status",
]
