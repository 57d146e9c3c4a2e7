# SPDX-License-Identifier: Apache-2.0
"""The role that etcd keeps for a worker, where etcd does not say whether it has written."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.waiting import until
from twinpool.config import ClusterConfig
from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.store import Keys, Store, StoreServer, connect_store, start_store
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker import role_book as module
from twinpool.worker.role_book import RoleBook

PREFILL, DECODE = pb.ROLE_PREFILL, pb.ROLE_DECODE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    made = start_store(tmp_path_factory.mktemp("store"), prefer_embedded=True)
    yield made
    made.stop()


@pytest.fixture
def store(server: StoreServer) -> Iterator[Store]:
    made = connect_store(ClusterConfig(etcd_endpoints=(server.endpoint,)))
    yield made
    made.close()


class Lossy:
    """A store of which writes are ``made``, ``kept`` back, or both; the answer to the first ``silent`` ones is lost."""

    def __init__(self, store: Store, silent: int, *, made: bool) -> None:
        self._store = store
        self.silent = silent
        self._made = made
        self.late: list[Callable[[], bool]] = []

    def get(self, key: str) -> Any:
        return self._store.get(key)

    def create(self, key: str, value: bytes) -> bool:
        return self._write(lambda: self._store.create(key, value))

    def replace(self, key: str, value: bytes, mod_revision: int) -> bool:
        return self._write(lambda: self._store.replace(key, value, mod_revision))

    def _write(self, write: Callable[[], bool]) -> bool:
        if not self.silent:
            return write()
        self.silent -= 1
        if self._made:
            write()
        else:
            self.late.append(write)
        raise TwinpoolError("STORE_UNAVAILABLE", "planted")


def book(store: Any, name: str, incarnation: int = 7) -> RoleBook:
    return RoleBook(store, "unit", "default", WorkerKey(name, incarnation))


async def test_the_last_role_outlives_the_incarnation(store: Store) -> None:
    first = book(store, "w-last")
    assert await first.last() is None
    await first.write(DECODE, 2)
    await first.write(PREFILL, 3)
    await first.write(PREFILL, 3)
    later = book(store, "w-last", 8)
    assert await later.last() == PREFILL
    assert await first.holds(PREFILL, 3)
    assert not await later.holds(PREFILL, 3), "it is not what this incarnation has written"
    assert await book(store, "w-other").last() is None


async def test_what_cannot_be_read_is_no_role(store: Store) -> None:
    key = Keys("unit").role("default", "w-odd")
    for value in (b"\xff\xff\xff", b""):
        store.put(key, value)
        assert await book(store, "w-odd").last() is None
    await book(store, "w-odd").write(DECODE, 2)
    assert await book(store, "w-odd").last() == DECODE


async def test_a_write_whose_answer_is_lost_is_looked_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    lossy = Lossy(store, 1, made=True)
    made = book(lossy, "w-lost")
    await made.write(DECODE, 2)
    assert not made.unsure
    assert await made.holds(DECODE, 2)


async def test_a_write_that_comes_late_does_not_undo_what_was_written_since(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gave up the change: whatever of it comes in afterwards must not count."""
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    for name, before in (("w-late-0", False), ("w-late-1", True)):
        if before:
            await book(store, name).write(DECODE, 1)
        lossy = Lossy(store, 1_000_000, made=False)
        made = book(lossy, name)
        writing = asyncio.create_task(made.write(PREFILL, 2))
        await until(lambda lossy=lossy: lossy.late)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        assert made.unsure
        lossy.silent = 0
        await made.write(DECODE, 2)
        assert not made.unsure
        assert not any(write() for write in lossy.late)
        assert await made.last() == DECODE
