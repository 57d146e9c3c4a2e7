# SPDX-License-Identifier: Apache-2.0
"""The control process that leads is killed at each step of each kind of operation, under load; the one that stands by ends it.
So does the leader itself after etcd has stood still, and a pool heals whose worker is killed in the middle of its change.

Real workers in a Ray cluster that was joined. Each case begins from the pool as the one before has left it.
"""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faults.conftest import ROUTER
from tests.faults.test_control_lost import LONG_WAIT
from tests.faults.test_scale import KEYS, Scaled
from tests.support.kill_points import ENTRY, KILL_VARIABLE, POINTS, STEPS, arm, kind_name
from tests.support.load import Load, under_load
from tests.support.quiescence import assert_quiescent
from tests.support.ray_head import RayHead
from tests.support.waiting import until, until_told
from tests.support.worker_client import start_router
from twinpool.config import ClusterConfig
from twinpool.store import StoreServer, connect_store, start_store
from twinpool.v1 import control_pb2 as pb

pytestmark = [
    pytest.mark.integration,
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).parents[2]
CPUS = 5
ROLES = {1: "prefill", 2: "decode"}
TOKENS = 30


@dataclass
class Killed(Scaled):
    """A site whose control processes end where the file ``kill`` says."""

    etcd: StoreServer = field(init=False)

    @property
    def kill(self) -> Path:
        return self.directory / "kill"

    def spec(self) -> pb.PoolSpec:
        item = self.store.get(KEYS.pool("default"))
        return pb.PoolSpec() if item is None else pb.PoolSpec.FromString(item.value)

    def wanted(self) -> tuple[int, int]:
        """Prefill and decode workers by the pool's record."""
        return self.spec().prefill.desired, self.spec().decode.desired

    def there(self) -> tuple[int, int]:
        """Prefill and decode workers that are ready."""
        roles = [ROLES[record.role] for record in self.workers().values()]
        return roles.count("prefill"), roles.count("decode")

    def operations(self) -> list[pb.Operation]:
        items = self.store.list_prefix(KEYS.operations).items.values()
        return [pb.Operation.FromString(item.value) for item in items]

    def new(self, kind: str, known: set[str]) -> pb.Operation | None:
        """The operation of a kind that an operator has begun since."""
        found = (op for op in self.operations() if op.id not in known and not op.parent)
        return next((op for op in found if kind_name(op.kind) == kind), None)

    async def launched_to_stand_by(self) -> None:
        """Waits until the newest control process answers."""

        async def answers() -> bool:
            code, _, error = await self.command("get", "workers", "-o", "json")
            assert self.controls[-1].poll() is None, error
            return code == 0

        await until_told(answers, LONG_WAIT)

    def incarnations(self) -> dict[str, int]:
        return {name: record.worker.incarnation for name, record in self.workers().items()}


@pytest.fixture(scope="module")
def killed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    directory = tmp_path_factory.mktemp("killed")
    short = Path(tempfile.mkdtemp(prefix="tp-ray-"))
    server = start_store(directory / "store")
    store = connect_store(ClusterConfig(etcd_endpoints=(server.endpoint,)))
    made = Killed(directory, checkpoint, RayHead(short, cpus=CPUS), server.endpoint, store)
    made.etcd = server
    made.entry, made.more = ENTRY, {"pools.decode_workers": 2, "cluster.lease_ttl_seconds": 6}
    made.environment = {KILL_VARIABLE: str(made.kill), "PYTHONPATH": str(ROOT)}
    try:
        asyncio.run(_started(made))
        yield made
    finally:
        made.end()
        store.close()
        made.etcd.stop()
        shutil.rmtree(short, ignore_errors=True)


async def _started(made: Killed) -> None:
    made.control()
    await made.launched()
    made.control()
    await until(lambda: made.there() == (1, 2), LONG_WAIT)
    made.routers.append(start_router(made.model, made.store_endpoint, made.directory, ROUTER))
    await until(lambda: made.store.list_prefix(KEYS.routers).items, LONG_WAIT)
    (item,) = made.store.list_prefix(KEYS.routers).items.values()
    made.endpoint = pb.RouterRecord.FromString(item.value).endpoint
    async with made.client() as client:

        async def ready() -> bool:
            return any(each.ready for each in await client.models())

        await until_told(ready, LONG_WAIT)


@dataclass
class Case:
    """What an operator asks for, and what there shall be afterwards."""

    command: tuple[str, ...]
    wanted: tuple[int, int]
    there: tuple[int, int]
    victim: str = ""
    """The worker that it is about."""


def case_of(kind: str, killed: Killed) -> Case:
    prefill, decode = killed.wanted()
    role = "decode" if decode >= prefill else "prefill"
    names = sorted(name for name, record in killed.workers().items() if ROLES[record.role] == role)
    victim = names[-1]
    if kind in ("drain", "restart"):
        fewer = (prefill, decode - 1) if role == "decode" else (prefill - 1, decode)
        there = fewer if kind == "drain" else (prefill, decode)
        return Case((kind, victim, "--yes"), (prefill, decode), there, victim)
    if kind == "flip":
        other, step = ("prefill", 1) if role == "decode" else ("decode", -1)
        target = (prefill + step, decode - step)
        return Case(("flip", victim, "--to", other, "--yes"), target, target, victim)
    if kind == "scale":
        step = 1 if prefill + decode == 3 else -1
        target = (prefill, decode + step) if role == "decode" else (prefill + step, decode)
    else:
        # One worker changes its role, and one comes or goes.
        target = {(1, 2): (3, 1), (2, 1): (1, 3), (3, 1): (1, 2), (1, 3): (2, 1)}[prefill, decode]
    numbers = ("--prefill", str(target[0]), "--decode", str(target[1]), "--yes")
    return Case((kind, "default", *numbers), target, target)


def assert_once(killed: Killed, kind: str, case: Case, found: pb.Operation, before: dict[str, int]) -> None:
    """What the operation does was done, once, and nothing else."""
    now = killed.incarnations()
    parts = [op for op in killed.operations() if op.parent == found.id]
    kinds = sorted(kind_name(op.kind) for op in parts)
    assert {op.state for op in parts} <= {pb.OPERATION_STATE_SUCCEEDED}, parts
    stayed = {name for name in before if name in now and now[name] == before[name]}
    if kind == "flip":
        assert now == before
        assert killed.workers()[case.victim].epoch == found.epoch + 1
    elif kind == "drain":
        assert (stayed, set(now)) == (set(before) - {case.victim}, set(before) - {case.victim})
    elif kind == "restart":
        assert (stayed, set(now)) == (set(before) - {case.victim}, set(before))
        # The first one that came after is there still.
        assert now[case.victim] == found.successor.incarnation
    else:
        # A change of the size: one comes or goes, everybody else is who he was.
        more = len(now) - len(before)
        assert (len(stayed), abs(more)) == (min(len(now), len(before)), 1)
        assert len(set(now) | set(before)) == max(len(now), len(before))
        wanted = ["drain"] if more < 0 else []
        assert kinds == (wanted if kind == "scale" else ["flip", "scale"])


@pytest.mark.parametrize(("kind", "step", "moment"), POINTS, ids=["-".join(point) for point in POINTS])
async def test_another_one_ends_what_was_begun(killed: Killed, kind: str, step: str, moment: str) -> None:
    # Also what a case before has left empty.
    await killed.leads()
    alive = [each for each in killed.controls if each.poll() is None]
    assert len(alive) == 2
    before, known = killed.incarnations(), {op.id for op in killed.operations()}
    case = case_of(kind, killed)
    async with under_load(killed, seed=901, longest=60, max_tokens=TOKENS, streams=2) as load:  # type: ignore[arg-type]
        await load.more(2)
        arm(killed.kill, kind, step, moment)
        # The answer may be lost with the process.
        await killed.command(*case.command, "-o", "json")
        # Whichever leads by then.
        await until(lambda: any(each.poll() is not None for each in alive), LONG_WAIT)
        assert [each.poll() for each in alive if each.poll() is not None] == [-signal.SIGKILL]
        assert not killed.kill.exists()
        begun = killed.new(kind, known)
        assert begun is not None
        assert (begun.state, begun.steps[-1].name) == (pb.OPERATION_STATE_RUNNING, step)
        killed.control()
        await until(lambda: killed.operation(begun.id).state != pb.OPERATION_STATE_RUNNING, LONG_WAIT)
        await load.more(2)
    found = killed.operation(begun.id)
    assert (found.state, found.error) == (pb.OPERATION_STATE_SUCCEEDED, "")
    assert tuple(each.name for each in found.steps) == STEPS[kind]
    assert [outcome.reason for outcome in load.outcomes if outcome.error is not None] == []
    assert all(len(outcome.tokens) == TOKENS for outcome in load.outcomes)
    await until(lambda: (killed.wanted(), killed.there()) == (case.wanted, case.there), LONG_WAIT)
    assert_once(killed, kind, case, found, before)
    await killed.launched_to_stand_by()
    if kind == "drain":
        prefill, decode = case.wanted
        code, _, error = await killed.scale(prefill, decode, "--wait")
        assert code == 0, error
    await assert_quiescent([record.endpoint for record in killed.workers().values()], within=LONG_WAIT)


async def assert_went_well(killed: Killed, case: Case, begun: pb.Operation, load: Load) -> None:
    """What was asked for is there, and nobody who asked for answers meanwhile has noticed."""
    found = killed.operation(begun.id)
    assert (found.state, found.error) == (pb.OPERATION_STATE_SUCCEEDED, "")
    assert [outcome.reason for outcome in load.outcomes if outcome.error is not None] == []
    await until(lambda: (killed.wanted(), killed.there()) == (case.wanted, case.there), LONG_WAIT)
    await assert_quiescent([record.endpoint for record in killed.workers().values()], within=LONG_WAIT)


@pytest.mark.parametrize(
    ("kind", "step", "where"),
    [
        ("flip", "write", "get operations"),
        ("scale", "write", "get operations"),
        ("rebalance", "flip", "get operations"),
        ("flip", "drain", "get pools"),
        ("scale", "converge", "get pools"),
        ("rebalance", "scale", "get operations"),
    ],
)
async def test_etcd_that_stands_still_is_waited_for_and_that_is_said(
    killed: Killed, kind: str, step: str, where: str
) -> None:
    leader, known = await killed.leads(), {op.id for op in killed.operations()}
    case = case_of(kind, killed)
    async with under_load(killed, seed=911, longest=60, max_tokens=TOKENS, streams=2) as load:  # type: ignore[arg-type]
        await load.more(2)
        arm(killed.kill, kind, step, "begun", killed.etcd.pid, signal.SIGSTOP)
        try:
            await killed.command(*case.command, "-o", "json", control=leader)
            await until(lambda: not killed.kill.exists(), LONG_WAIT)

            async def said() -> bool:
                code, found, _ = await killed.command(*where.split(), "-o", "json", control=leader)
                return code == 0 and any(
                    "etcd" in (each.get("waits_for") or each.get("waiting") or "") for each in found
                )

            await until_told(said, LONG_WAIT)
            # Nobody who asks for an answer notices.
            await load.more(2)
        finally:
            os.kill(killed.etcd.pid, signal.SIGCONT)
        begun = killed.new(kind, known)
        assert begun is not None
        await until(lambda: killed.operation(begun.id).state != pb.OPERATION_STATE_RUNNING, LONG_WAIT)
        await load.more(2)
    await assert_went_well(killed, case, begun, load)


@pytest.mark.parametrize(
    ("kind", "step"), [("flip", "drain"), ("scale", "converge"), ("rebalance", "flip"), ("restart", "end")]
)
async def test_etcd_that_is_killed_and_comes_back_with_what_it_held(
    killed: Killed, kind: str, step: str
) -> None:
    leader, known = await killed.leads(), {op.id for op in killed.operations()}
    case = case_of(kind, killed)
    async with under_load(killed, seed=917, longest=60, max_tokens=TOKENS, streams=2) as load:  # type: ignore[arg-type]
        await load.more(2)
        arm(killed.kill, kind, step, "begun", killed.etcd.pid)
        await killed.command(*case.command, "-o", "json", control=leader)
        await until(lambda: killed.etcd.process.poll() is not None, LONG_WAIT)
        # Nobody who asks for an answer notices.
        await load.more(2)
        port = int(killed.etcd.endpoint.rpartition(":")[2])
        killed.etcd = await asyncio.to_thread(start_store, killed.directory / "store", port=port)
        begun = killed.new(kind, known)
        assert begun is not None
        await until(lambda: killed.operation(begun.id).state != pb.OPERATION_STATE_RUNNING, LONG_WAIT)
        await load.more(2)
    await assert_went_well(killed, case, begun, load)


@pytest.mark.parametrize(
    ("step", "moment", "ends"),
    [
        ("write", "begun", [pb.OPERATION_STATE_FAILED]),
        ("write", "done", [pb.OPERATION_STATE_FAILED]),
        # It does all by itself once it was asked, so it may have committed by then.
        ("ask", "done", [pb.OPERATION_STATE_FAILED, pb.OPERATION_STATE_SUCCEEDED]),
        ("drain", "done", [pb.OPERATION_STATE_FAILED, pb.OPERATION_STATE_SUCCEEDED]),
        ("commit", "done", [pb.OPERATION_STATE_SUCCEEDED]),
    ],
)
async def test_a_worker_that_is_killed_while_it_changes_leaves_a_whole_pool(
    killed: Killed, step: str, moment: str, ends: list[int]
) -> None:
    """As it was or as it is to be, as the operation says."""
    leader, known = await killed.leads(), {op.id for op in killed.operations()}
    case, former, before = case_of("flip", killed), killed.wanted(), killed.incarnations()
    async with under_load(killed, seed=921, longest=60, max_tokens=TOKENS, streams=2) as load:  # type: ignore[arg-type]
        await load.more(2)
        arm(killed.kill, "flip", step, moment, killed.workers()[case.victim].pid)
        code, _, error = await killed.command(*case.command, "-o", "json", control=leader)
        assert code == 0, error
        await until(lambda: not killed.kill.exists(), LONG_WAIT)
        begun = killed.new("flip", known)
        assert begun is not None
        await until(lambda: killed.operation(begun.id).state != pb.OPERATION_STATE_RUNNING, LONG_WAIT)
        await load.more(2)
    found = killed.operation(begun.id)
    assert found.state in ends
    succeeded = found.state == pb.OPERATION_STATE_SUCCEEDED
    assert succeeded or found.error.startswith("FLIP_FAILED")
    wanted = case.wanted if succeeded else former
    # The record of the one that was killed is there until its lease ends.
    await until(lambda: killed.incarnations().get(case.victim, 0) not in (0, before[case.victim]), LONG_WAIT)
    await until(lambda: (killed.wanted(), killed.there()) == (wanted, wanted), LONG_WAIT)
    assert set(killed.workers()) == set(before)
    assert [outcome.reason for outcome in load.outcomes if outcome.error is not None] == []
    await assert_quiescent([record.endpoint for record in killed.workers().values()], within=LONG_WAIT)
