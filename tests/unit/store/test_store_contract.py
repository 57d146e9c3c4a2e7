# SPDX-License-Identifier: Apache-2.0
"""What every store does, on a real etcd and on the embedded one."""

import threading
import time

import pytest

from tests.support.watching import wait_until
from twinpool.errors import TwinpoolError
from twinpool.store import AsyncStore, EtcdStore, LeaseLostError, StoreServer


def test_put_get_delete_with_versions(store: EtcdStore, root: str) -> None:
    key = root + "k"
    assert store.get(key) is None
    first = store.put(key, b"one")
    second = store.put(key, b"\x00\xff")
    assert second > first
    item = store.get(key)
    assert item is not None
    assert (item.key, item.value, item.version, item.lease_id) == (key, b"\x00\xff", 2, 0)
    assert (item.create_revision, item.mod_revision) == (first, second)
    assert store.delete(key)
    assert not store.delete(key)
    assert store.get(key) is None
    third = store.put(key, b"")
    again = store.get(key)
    assert again is not None
    assert (again.value, again.version, again.create_revision) == (b"", 1, third)


def test_create_only_where_there_is_nothing(store: EtcdStore, root: str) -> None:
    assert store.create(root + "k", b"one")
    assert not store.create(root + "k", b"two")
    item = store.get(root + "k")
    assert item is not None
    assert item.value == b"one"


def test_one_of_many_creators_wins(store: EtcdStore, root: str) -> None:
    barrier = threading.Barrier(8)
    won: list[int] = []

    def create(number: int) -> None:
        barrier.wait()
        if store.create(root + "k", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    item = store.get(root + "k")
    assert item is not None
    assert [b"%d" % number for number in won] == [item.value]


def test_replace_needs_the_revision_that_was_read(store: EtcdStore, root: str) -> None:
    revision = store.put(root + "k", b"one")
    assert store.replace(root + "k", b"two", revision)
    assert not store.replace(root + "k", b"three", revision)
    item = store.get(root + "k")
    assert item is not None
    assert item.value == b"two"
    assert not store.replace(root + "other", b"x", revision)


def test_delete_if_spares_a_key_made_anew(store: EtcdStore, root: str) -> None:
    old = store.put(root + "k", b"one")
    store.delete(root + "k")
    new = store.put(root + "k", b"two")
    assert not store.delete_if(root + "k", old)
    assert store.get(root + "k") is not None
    store.put(root + "k", b"three")
    assert store.delete_if(root + "k", new)


def test_prefixes_end_at_a_path_boundary(store: EtcdStore, root: str) -> None:
    for name in ("a/1", "a/2", "ab/1", "a", "a0", "a.1", "b/1"):
        store.put(root + name, b"x")
    assert sorted(store.list_prefix(root + "a/").items) == [root + "a/1", root + "a/2"]
    assert store.delete_prefix(root + "a/") == 2
    assert len(store.list_prefix(root).items) == 5
    for bad in (root + "a", "a/", ""):
        with pytest.raises(ValueError, match="start and end"):
            store.list_prefix(bad)
        with pytest.raises(ValueError, match="start and end"):
            store.delete_prefix(bad)


def test_long_listings_come_whole_and_at_one_revision(store: EtcdStore, root: str) -> None:
    for number in range(250):
        store.put(f"{root}{number:04d}", b"%d" % number)
    snapshot = store.list_prefix(root)
    assert [item.value for item in snapshot.items.values()] == [b"%d" % number for number in range(250)]
    assert snapshot.revision >= max(item.mod_revision for item in snapshot.items.values())
    assert snapshot.precedes(store.list_prefix(root))


def test_a_listing_may_exceed_grpcs_message_limit(store: EtcdStore, root: str) -> None:
    value = bytes(range(256)) * 2048
    for number in range(12):
        store.put(f"{root}{number}", value)
    items = store.list_prefix(root).items
    assert len(items) == 12
    assert all(item.value == value for item in items.values())
    store.delete_prefix(root)


def test_a_lease_that_ends_takes_its_keys(store: EtcdStore, root: str) -> None:
    lease = store.grant(3)
    assert lease.ttl_seconds >= 3
    store.put(root + "k", b"x", lease.id)
    assert store.create(root + "l", b"x", lease.id)
    store.put(root + "free", b"x", lease.id)
    store.put(root + "free", b"x")  # no longer under the lease
    wait_until(lambda: sorted(store.list_prefix(root).items) == [root + "free"])
    with pytest.raises(LeaseLostError):
        store.keep_alive(lease.id)
    with pytest.raises(LeaseLostError):
        store.put(root + "k", b"x", lease.id)
    with pytest.raises(LeaseLostError):
        store.create(root + "k", b"x", lease.id)
    assert store.get(root + "k") is None


@pytest.mark.slow
def test_keep_alive_prolongs_and_revoke_ends_at_once(store: EtcdStore, root: str) -> None:
    lease = store.grant(2)
    store.put(root + "k", b"x", lease.id)
    ended = time.monotonic() + 3
    while time.monotonic() < ended:
        assert store.keep_alive(lease.id) >= 2
        time.sleep(0.4)  # nothing may happen meanwhile
    assert store.get(root + "k") is not None
    store.revoke(lease.id)
    assert store.get(root + "k") is None
    store.revoke(lease.id)


def test_calls_after_close_are_unavailable(server: StoreServer, root: str) -> None:
    store = EtcdStore([server.endpoint])
    store.put(root + "k", b"x")
    store.close()
    with pytest.raises(TwinpoolError) as caught:
        store.get(root + "k")
    assert caught.value.reason == "STORE_UNAVAILABLE"


async def test_the_async_form_does_the_same(server: StoreServer, root: str) -> None:
    store = AsyncStore(EtcdStore([server.endpoint]))
    lease = await store.grant(5)
    assert await store.create(root + "k", b"one", lease.id)
    assert await store.keep_alive(lease.id) == lease.ttl_seconds
    item = await store.get(root + "k")
    assert item is not None
    assert await store.replace(root + "k", b"two", item.mod_revision)
    assert [found.value for found in (await store.list_prefix(root)).items.values()] == [b"two"]
    assert await store.put(root + "l", b"x") > item.mod_revision
    assert await store.delete(root + "l")
    assert await store.delete_if(root + "k", item.create_revision)
    assert await store.delete_prefix(root) == 0
    await store.revoke(lease.id)
    await store.close()


def test_a_failed_member_is_left_for_another(server: StoreServer, root: str) -> None:
    store = EtcdStore(["127.0.0.1:1", server.endpoint, "127.0.0.1:2"], timeout_seconds=2)
    failures = []
    for number in range(30):
        try:
            store.put(root + "k", b"%d" % number)
        except TwinpoolError as error:
            failures.append(error.reason)
    # Each dead member may cost a call, but the living one is kept once it was found.
    assert len(failures) <= 2
    assert set(failures) <= {"STORE_UNAVAILABLE"}
    store.close()
