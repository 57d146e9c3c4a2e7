# SPDX-License-Identifier: Apache-2.0
"""Twinpool: a prefill pool and a decode pool that share KV blocks."""

import os

# gRPC reads both when it is first imported. Nothing here forks without exec, so its fork handlers only cost locks
# and log lines; its own log is for its developers, errors reach us as statuses.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__version__ = "0.1.0"
