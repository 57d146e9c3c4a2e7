# SPDX-License-Identifier: Apache-2.0
"""gRPC as every Twinpool process uses it: limits, keep-alive, mutual TLS, health, errors by the table."""

from twinpool.rpc.audit import AuditLog
from twinpool.rpc.caller import Caller, key_of
from twinpool.rpc.client import channel, wait_ready
from twinpool.rpc.deadline import Deadline
from twinpool.rpc.keys import digest_of, new_key
from twinpool.rpc.options import client_options, join_address, loopback_beside, server_options
from twinpool.rpc.run import run, stop_event
from twinpool.rpc.server import LIVE, Server
from twinpool.rpc.tls import HttpsContext
from twinpool.rpc.transport import wants_native

__all__ = [
    "LIVE",
    "AuditLog",
    "Caller",
    "Deadline",
    "HttpsContext",
    "Server",
    "channel",
    "client_options",
    "digest_of",
    "join_address",
    "key_of",
    "loopback_beside",
    "new_key",
    "run",
    "server_options",
    "stop_event",
    "wait_ready",
    "wants_native",
]
