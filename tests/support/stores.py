# SPDX-License-Identifier: Apache-2.0
"""Starts stores for tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from twinpool.store import StoreServer, find_etcd, start_store

KINDS = ["etcd", "embedded"]

# Tests that wait for leases run on one kind, and on the other in the long run only.
_PREFERRED = "etcd" if find_etcd() else "embedded"
ONE_KIND = [kind if kind == _PREFERRED else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


def launch(kind: str, directory: Path, port: int = 0) -> StoreServer:
    """Starts a store of a kind; skips where there is no etcd binary."""
    if kind == "etcd" and find_etcd() is None:
        pytest.skip("no etcd binary")
    return start_store(directory, prefer_embedded=kind == "embedded", port=port)


def running(kind: str, directory: Path) -> Iterator[StoreServer]:
    """The body of a fixture: a store that is stopped at the end."""
    server = launch(kind, directory)
    yield server
    server.stop()


def port_of(server: StoreServer) -> int:
    """The port of a store's endpoint."""
    return int(server.endpoint.rpartition(":")[2])
