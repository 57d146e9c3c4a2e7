# SPDX-License-Identifier: Apache-2.0
"""Leases and leadership."""

import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.stores import ONE_KIND, running
from tests.support.tcp_proxy import TcpProxy
from tests.support.watching import wait_until
from twinpool.errors import TwinpoolError
from twinpool.store import Election, EtcdStore, Keys, Lease, LeaseKeeper, LeaseLostError, StoreServer

TTL = 2


@pytest.fixture(scope="module", params=ONE_KIND)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    yield from running(request.param, tmp_path_factory.mktemp("store"))


class ScriptedStore(EtcdStore):
    """Grants and renews as told; everything else is not called."""

    def __init__(self, ttl: int = 1) -> None:
        self.ttl = ttl
        self.grants = 0
        self.renewals = 0
        self.revoked: list[int] = []
        self.fault: Exception | None = None

    def grant(self, ttl_seconds: int) -> Lease:
        self._fail()
        self.grants += 1
        return Lease(self.grants, self.ttl)

    def keep_alive(self, lease_id: int) -> int:
        self._fail()
        self.renewals += 1
        return self.ttl

    def revoke(self, lease_id: int) -> None:
        self.revoked.append(lease_id)
        self._fail()

    def _fail(self) -> None:
        if self.fault is not None:
            raise self.fault


class User:
    def __init__(self) -> None:
        self.held: list[int] = []
        self.losses = 0
        self.fault: Exception | None = None

    def hold(self, lease: Lease) -> None:
        if self.fault is not None:
            raise self.fault
        self.held.append(lease.id)

    def lost(self) -> None:
        self.losses += 1


@pytest.fixture
def scripted() -> Iterator[tuple[ScriptedStore, User, LeaseKeeper]]:
    store, user = ScriptedStore(), User()
    keeper = LeaseKeeper(store, 1, user, name="test")
    keeper.start()
    wait_until(lambda: user.held)
    yield store, user, keeper
    keeper.stop()


@pytest.fixture(params=[3])
def patient(request: pytest.FixtureRequest) -> Iterator[tuple[ScriptedStore, User, LeaseKeeper]]:
    """As ``scripted``, with a lease of more seconds: room for a machine that stands still for one."""
    store, user = ScriptedStore(ttl=request.param), User()
    keeper = LeaseKeeper(store, request.param, user, name="test")
    keeper.start()
    wait_until(lambda: user.held)
    yield store, user, keeper
    keeper.stop()


Scripted = tuple[ScriptedStore, User, LeaseKeeper]
UNAVAILABLE = TwinpoolError("STORE_UNAVAILABLE")


def test_it_renews_well_before_the_end(patient: Scripted) -> None:
    store, user, keeper = patient
    wait_until(lambda: store.renewals >= 1)
    assert keeper.valid, "renewed while half of the time was left"
    assert (store.grants, user.losses) == (1, 0)


def test_a_loss_is_told_once_and_ended_at_once(scripted: Scripted) -> None:
    store, user, keeper = scripted
    store.fault = LeaseLostError(1)
    wait_until(lambda: user.losses)
    store.fault = None
    wait_until(lambda: user.held[-1] == 2)
    assert (user.losses, store.grants) == (1, 2)
    wait_until(lambda: keeper.valid)


def test_without_the_store_the_own_clock_decides(scripted: Scripted) -> None:
    store, user, keeper = scripted
    store.fault = UNAVAILABLE
    wait_until(lambda: user.losses)
    assert not keeper.valid
    time.sleep(0.5)  # nothing may happen meanwhile
    assert user.losses == 1
    # The lease may have been prolonged by a restarted etcd: it is asked for before another is granted.
    store.fault = None
    wait_until(lambda: keeper.valid)
    assert store.grants == 1


def test_a_store_that_ends_every_lease_is_not_hammered(scripted: Scripted) -> None:
    store, user, _keeper = scripted
    user.fault = LeaseLostError(0)
    time.sleep(1.5)  # nothing may happen meanwhile
    assert store.grants < 20


def test_faults_of_the_user_do_not_end_the_keeper(scripted: Scripted) -> None:
    store, user, keeper = scripted
    user.fault = RuntimeError("mine")
    before = store.renewals
    wait_until(lambda: store.renewals > before + 1)
    user.fault = None
    held = len(user.held)
    wait_until(lambda: len(user.held) > held)
    wait_until(lambda: keeper.valid)


@pytest.mark.parametrize("patient", [3600], indirect=True)
def test_a_nudge_holds_soon_and_stop_revokes(patient: Scripted) -> None:
    # By itself it would renew in half an hour: what is held meanwhile was nudged for.
    store, user, keeper = patient
    for _ in range(3):
        held = len(user.held)
        keeper.nudge()
        wait_until(lambda held=held: len(user.held) > held)  # type: ignore[misc]
    store.fault = UNAVAILABLE
    keeper.stop()
    assert store.revoked == [1]


# --- leadership ----------------------------------------------------------------------------


class Candidate:
    def __init__(self, store: EtcdStore, keys: Keys, name: bytes, ttl_seconds: int = TTL) -> None:
        self.name = name
        self.changes: list[bool] = []
        self.election = Election(
            store, keys.leader("controller"), name, ttl_seconds=ttl_seconds, on_change=self.changes.append
        )
        self.election.start()


def leading(candidates: list[Candidate]) -> Candidate:
    """The one that leads, once there is one."""
    wait_until(lambda: any(candidate.election.is_leader for candidate in candidates))
    (found,) = [candidate for candidate in candidates if candidate.election.is_leader]
    return found


def test_one_leads_and_the_next_follows_at_once(store: EtcdStore, keys: Keys) -> None:
    # No lease ends while this runs: who follows was told.
    waiting = [Candidate(store, keys, b"%d" % number, ttl_seconds=3600) for number in range(3)]
    fences = []
    while waiting:
        leader = leading(waiting)
        for candidate in waiting:
            wait_until(lambda name=leader.name, follower=candidate.election: follower.leader() == name)  # type: ignore[misc]
        fences.append(leader.election.fence)
        waiting.remove(leader)
        leader.election.stop()
        assert (leader.changes, leader.election.fence) == ([True, False], 0)
    assert fences == sorted(set(fences))


def test_never_two_leaders_while_leases_are_taken_away(store: EtcdStore, keys: Keys) -> None:
    """Both campaign while the leader's lease is revoked again and again; fences of successive leaders rise."""
    key = keys.leader("controller")
    candidates = [Candidate(store, keys, name) for name in (b"a", b"b")]
    fences: list[int] = []
    for _ in range(4):
        wait_until(lambda: any(candidate.election.is_leader for candidate in candidates))
        item = store.get(key)
        assert item is not None
        fences.append(item.create_revision)
        store.revoke(item.lease_id)
        wait_until(lambda: (found := store.get(key)) is not None and found.create_revision != fences[-1])
    for candidate in candidates:
        candidate.election.stop()
    assert fences == sorted(set(fences))


@pytest.mark.slow
def test_a_leader_cut_off_steps_down_before_its_successor_steps_up(
    store: EtcdStore, keys: Keys, server: StoreServer
) -> None:
    proxy = TcpProxy(server.endpoint)
    far = EtcdStore([proxy.endpoint], timeout_seconds=0.5)
    cut_off = Candidate(far, keys, b"cut")
    wait_until(lambda: cut_off.election.is_leader)
    successor = Candidate(store, keys, b"next")
    both = threading.Event()
    proxy.stall()
    deadline = time.monotonic() + 60
    while not successor.election.is_leader:
        assert time.monotonic() < deadline
        time.sleep(0.002)
        if cut_off.election.is_leader and successor.election.is_leader:
            both.set()
    assert not both.is_set()
    assert not cut_off.election.is_leader
    proxy.heal()
    wait_until(lambda: cut_off.changes == [True, False] and cut_off.election.leader() == b"next")
    assert successor.election.is_leader
    for candidate in (cut_off, successor):
        candidate.election.stop()
    far.close()
    proxy.close()
