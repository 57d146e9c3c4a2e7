# SPDX-License-Identifier: Apache-2.0
"""Starts stores for tests."""

from pathlib import Path

import pytest

from twinpool.store import StoreServer, find_etcd, start_store

KINDS = ["etcd", "embedded"]


def launch(kind: str, directory: Path, port: int = 0) -> StoreServer:
    """Starts a store of a kind; skips where there is no etcd binary."""
    if kind == "etcd" and find_etcd() is None:
        pytest.skip("no etcd binary")
    return start_store(directory, prefer_embedded=kind == "embedded", port=port)


def port_of(server: StoreServer) -> int:
    """The port of a store's endpoint."""
    return int(server.endpoint.rpartition(":")[2])
