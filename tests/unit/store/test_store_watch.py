# SPDX-License-Identifier: Apache-2.0
"""Watches on a healthy store, real and embedded."""

import threading

import pytest

from tests.support.watching import Recorder, wait_until
from twinpool.store import Batch, EtcdStore, Origin, PrefixWatch


def test_first_all_there_is_then_each_change_once(store: EtcdStore, root: str) -> None:
    store.put(root + "a", b"1")
    store.put(root + "b", b"1")
    recorder = Recorder(store, root).synced()
    store.put(root + "a", b"2")
    store.delete(root + "b")
    store.put(root + "c", b"1")
    wait_until(lambda: len(recorder.seen()) == 5)
    assert recorder.seen(Origin.FIRST) == [("a", "1"), ("b", "1")]
    assert recorder.seen(Origin.LIVE) == [("a", "2"), ("b", None), ("c", "1")]
    assert {key.removeprefix(root): item.value for key, item in recorder.watch.items().items()} == {
        "a": b"2",
        "c": b"1",
    }
    recorder.close()
    store.put(root + "d", b"1")
    assert len(recorder.seen()) == 5


def test_changes_carry_what_was_before(store: EtcdStore, root: str) -> None:
    store.put(root + "a", b"1")
    recorder = Recorder(store, root).synced()
    store.put(root + "a", b"2")
    store.delete(root + "a")
    wait_until(lambda: len(recorder.seen()) == 3)
    pairs = [
        (c.before and c.before.value, c.now and c.now.value) for b in recorder.batches for c in b.changes
    ]
    assert pairs == [(None, b"1"), (b"1", b"2"), (b"2", None)]
    recorder.close()


def test_an_empty_prefix_is_reported_as_in_step(store: EtcdStore, root: str) -> None:
    recorder = Recorder(store, root).synced()
    assert recorder.batches == [Batch(Origin.FIRST, ())]
    recorder.close()


def test_a_prefix_does_not_see_its_namesake(store: EtcdStore, root: str) -> None:
    recorder = Recorder(store, root + "pool/a/").synced()
    store.put(root + "pool/ab/w", b"x")
    store.put(root + "pool/a", b"x")
    store.put(root + "pool/a0", b"x")
    store.put(root + "pool/a/w", b"x")
    wait_until(recorder.seen)
    assert recorder.seen() == [("w", "x")]
    recorder.close()
    with pytest.raises(ValueError, match="start and end"):
        Recorder(store, root + "pool/a")


@pytest.mark.slow
def test_the_end_of_a_lease_is_a_change(store: EtcdStore, root: str) -> None:
    lease = store.grant(1)
    store.put(root + "k", b"x", lease.id)
    recorder = Recorder(store, root).synced()
    wait_until(lambda: recorder.seen() == [("k", "x"), ("k", None)], 6)
    recorder.close()


def test_a_transaction_on_several_watches(store: EtcdStore, root: str) -> None:
    recorders = [Recorder(store, root).synced() for _ in range(5)]
    for number in range(50):
        store.put(f"{root}{number % 7}", b"%d" % number)
    for recorder in recorders:
        wait_until(lambda recorder=recorder: len(recorder.seen()) == 50)  # type: ignore[misc]
        assert recorder.seen() == [(f"{number % 7}", f"{number}") for number in range(50)]
        recorder.close()


def test_a_callback_that_raises_does_not_end_the_watch(store: EtcdStore, root: str) -> None:
    seen: list[str] = []

    def on_batch(batch: Batch) -> None:
        seen.extend(change.key for change in batch.changes)
        raise RuntimeError("mine")

    watch = PrefixWatch(store, root, on_batch, name="test")
    watch.start()
    wait_until(lambda: watch.connected)
    store.put(root + "a", b"")
    store.put(root + "b", b"")
    wait_until(lambda: seen == [root + "a", root + "b"])
    watch.close()


def test_close_from_the_callback_and_twice(store: EtcdStore, root: str) -> None:
    closed = threading.Event()
    seen: list[str] = []

    def on_batch(batch: Batch) -> None:
        seen.extend(change.key for change in batch.changes)
        if batch.changes:
            watch.close()
            closed.set()

    watch = PrefixWatch(store, root, on_batch, name="test")
    watch.start()
    wait_until(lambda: watch.connected)
    store.put(root + "a", b"")
    assert closed.wait(5)
    store.put(root + "b", b"")
    watch.close()
    watch.close()
    assert seen == [root + "a"]


def test_a_compacted_history_is_listed_again_without_false_changes(store: EtcdStore, root: str) -> None:
    store.put(root + "same", b"1")
    store.put(root + "gone", b"1")
    old = store.list_prefix(root)
    store.put(root + "new", b"1")
    store.delete(root + "gone")
    store.compact(store.put(root + "new", b"2"))

    class Stale(EtcdStore):
        """Hands out one listing of the past, as if the watch had been slow."""

        def __init__(self) -> None:
            self.listings = 0

        def list_prefix(self, prefix: str):  # type: ignore[no-untyped-def]
            self.listings += 1
            return old if self.listings == 1 else store.list_prefix(prefix)

        def watch_call(self, prefix, start_revision, requests):  # type: ignore[no-untyped-def]
            return store.watch_call(prefix, start_revision, requests)

    recorder = Recorder(Stale(), root)
    wait_until(lambda: Origin.RELIST in recorder.origins())
    assert recorder.seen(Origin.RELIST) == [("new", "2"), ("gone", None)]
    store.put(root + "same", b"2")
    wait_until(lambda: recorder.seen(Origin.LIVE) == [("same", "2")])
    recorder.close()


def test_keys_that_are_not_utf8_do_not_stop_anything(store: EtcdStore, root: str) -> None:
    recorder = Recorder(store, root).synced()
    store._client.put(root.encode() + b"\xff\xfe", b"x")
    store.put(root + "z", b"y")
    wait_until(lambda: ("z", "y") in recorder.seen())
    assert len(store.list_prefix(root).items) == 2
    recorder.close()
