# SPDX-License-Identifier: Apache-2.0
"""What watches and calls do when the store or the way to it breaks."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stores import ONE_KIND, launch, port_of, running
from tests.support.tcp_proxy import TcpProxy
from tests.support.watching import Recorder, wait_until
from twinpool.errors import TwinpoolError
from twinpool.store import EtcdStore, Origin, StoreServer

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module", params=ONE_KIND)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    yield from running(request.param, tmp_path_factory.mktemp("store"))


@pytest.fixture
def proxy(server: StoreServer) -> Iterator[TcpProxy]:
    running = TcpProxy(server.endpoint)
    yield running
    running.close()


@pytest.fixture
def far(proxy: TcpProxy) -> Iterator[EtcdStore]:
    """The store through the proxy."""
    client = EtcdStore([proxy.endpoint], timeout_seconds=0.5)
    yield client
    client.close()


def test_a_cut_watch_finds_what_it_missed_and_nothing_else(
    store: EtcdStore, far: EtcdStore, proxy: TcpProxy, root: str
) -> None:
    for name in ("same", "changed", "ghost"):
        store.put(root + name, b"1")
    recorder = Recorder(far, root).synced()
    proxy.cut()
    wait_until(lambda: not recorder.watch.connected)
    store.put(root + "changed", b"2")
    store.delete(root + "ghost")
    store.put(root + "new", b"1")
    store.put(root + "flicker", b"1")
    store.delete(root + "flicker")
    # The history in between is gone, so only a listing can tell.
    store.compact(store.put(root + "new", b"2"))
    assert {key.removeprefix(root) for key in recorder.watch.items()} == {"same", "changed", "ghost"}
    proxy.heal()
    wait_until(lambda: Origin.RELIST in recorder.origins())
    assert sorted(recorder.seen(Origin.RELIST)) == [("changed", "2"), ("ghost", None), ("new", "2")]
    store.put(root + "same", b"2")
    wait_until(lambda: recorder.seen(Origin.LIVE) == [("same", "2")])
    assert recorder.connected == [True, False, True]
    recorder.close()


def test_many_cuts_lose_and_repeat_nothing(
    store: EtcdStore, far: EtcdStore, proxy: TcpProxy, root: str
) -> None:
    recorder = Recorder(far, root).synced()
    for number in range(60):
        store.put(f"{root}{number % 5}", b"%d" % number)
        if number % 7 == 3:
            proxy.cut()
            proxy.heal()
    expected = {str(slot): str(55 + slot) for slot in range(5)}
    wait_until(
        lambda: (
            {k.removeprefix(root): i.value.decode() for k, i in recorder.watch.items().items()} == expected
        )
    )
    by_key: dict[str, list[int]] = {}
    for key, value in recorder.seen():
        assert value is not None
        by_key.setdefault(key, []).append(int(value))
    assert all(values == sorted(set(values)) for values in by_key.values()), "repeated or out of order"
    recorder.close()


def test_a_call_into_a_black_hole_ends(store: EtcdStore, far: EtcdStore, proxy: TcpProxy, root: str) -> None:
    store.put(root + "k", b"1")
    wait_until(lambda: _answers(far, root))
    proxy.stall()
    with pytest.raises(TwinpoolError) as caught:
        far.get(root + "k")
    assert caught.value.reason == "STORE_UNAVAILABLE"
    proxy.heal()
    wait_until(lambda: _answers(far, root))


def _answers(store: EtcdStore, root: str) -> bool:
    try:
        return store.get(root + "k") is not None
    except TwinpoolError:
        return False


@pytest.mark.slow
def test_a_watch_in_a_black_hole_notices_and_recovers(
    store: EtcdStore, far: EtcdStore, proxy: TcpProxy, root: str
) -> None:
    recorder = Recorder(far, root).synced()
    proxy.stall()
    store.put(root + "k", b"1")
    # The connection's keep-alive: a ping after 6 s, answered within 2 s or given up.
    wait_until(lambda: not recorder.watch.connected)
    proxy.heal()
    wait_until(lambda: recorder.seen() == [("k", "1")])
    recorder.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONE_KIND)
def test_a_killed_store_comes_back(kind: str, tmp_path: Path) -> None:
    """The real one with its data, the embedded one without."""
    server = launch(kind, tmp_path)
    port = port_of(server)
    store = EtcdStore([server.endpoint], timeout_seconds=20)
    store.put("/t/kept", b"1")
    for _ in range(5):
        store.put("/t/gone", b"1")
    recorder = Recorder(store, "/t/").synced()
    try:
        server.kill()
        wait_until(lambda: not recorder.watch.connected)
        with pytest.raises(TwinpoolError):
            store.put("/t/x", b"")
        assert sorted(recorder.watch.items()) == ["/t/gone", "/t/kept"]
        server = launch(kind, tmp_path, port)
        store.put("/t/new", b"1")
        wait_until(lambda: recorder.watch.connected and ("new", "1") in recorder.seen())
        if kind == "etcd":
            assert Origin.RESET not in recorder.origins()
            assert recorder.seen(Origin.RELIST, Origin.LIVE) == [("new", "1")]
        else:
            assert Origin.RESET in recorder.origins()
            assert set(recorder.seen(Origin.RESET, Origin.LIVE)) == {
                ("new", "1"),
                ("gone", None),
                ("kept", None),
            }
    finally:
        recorder.close()
        store.close()
        server.stop()


@pytest.mark.slow
def test_a_wiped_etcd_is_told_from_a_restarted_one(tmp_path: Path) -> None:
    server = launch("etcd", tmp_path)
    port = port_of(server)
    store = EtcdStore([server.endpoint], timeout_seconds=20)
    for number in range(20):
        store.put("/t/k", b"%d" % number)
    recorder = Recorder(store, "/t/").synced()
    try:
        server.kill()
        shutil.rmtree(tmp_path / "data")
        server = launch("etcd", tmp_path, port)
        wait_until(lambda: Origin.RESET in recorder.origins())
        assert recorder.seen(Origin.RESET) == [("k", None)]
        store.put("/t/k", b"again")
        wait_until(lambda: recorder.seen(Origin.LIVE)[-1:] == [("k", "again")])
    finally:
        recorder.close()
        store.close()
        server.stop()
