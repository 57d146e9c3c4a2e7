# SPDX-License-Identifier: Apache-2.0
"""`twinpool flip` against real workers, a real control process and a real etcd: workers change their role while requests flow."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import ROUTER
from tests.support.asking import Outcome, ask
from tests.support.control import KEYS, Control, recorded
from tests.support.fleet import BLOCK, Fleet
from tests.support.load import under_load
from tests.support.quiescence import inspect
from tests.support.steps import prompt
from tests.support.stores import launch
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import until, until_told
from twinpool import rpc
from twinpool.config import ClusterConfig, RpcConfig
from twinpool.store import connect_store
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2, worker_pb2_grpc

pytestmark = [pytest.mark.integration, pytest.mark.faults]

WAIT_SECONDS = 120.0
WORKERS = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}
OTHER = {"prefill": "decode", "decode": "prefill"}
SETTINGS: dict[str, object] = {
    "kv.num_blocks": 32,
    "transfer.lease_seconds": 60,
    "transfer.read_deadline_seconds": 50,
    "cluster.lease_ttl_seconds": 4,
    "worker.drain_timeout_seconds": 60,
}


@dataclasses.dataclass
class Pools:
    """Two workers of each role, a router, a control process; all of them know etcd by a proxy's address."""

    fleet: Fleet
    control: Control
    proxy: TcpProxy

    def record(self, name: str) -> pb.WorkerRecord:
        """What the worker has registered; empty if nothing."""
        item = self.fleet.store.get(KEYS.worker("default", name))
        return pb.WorkerRecord() if item is None else pb.WorkerRecord.FromString(item.value)

    def note(self, name: str) -> pb.WorkerRecord:
        """The worker has the role that its record says."""
        worker, record = self.fleet.workers[name], self.record(name)
        worker.record = record
        worker.role = "prefill" if record.role == worker_pb2.ROLE_PREFILL else "decode"
        return record

    async def flip(self, name: str, *more: str, sees: bool = True) -> tuple[dict[str, Any], pb.WorkerRecord]:
        """To the other role by the command line, to the end; the operation, and the worker's record. The router sees it, if it
        can serve then."""
        to = OTHER[self.fleet.workers[name].role]
        code, operation, error = await self.control.run("flip", name, "--to", to, "--wait", "--yes", *more)
        assert code == 0, error
        assert (operation["state"], operation["kind"], operation["to"]) == ("succeeded", "flip", to)
        record = self.note(name)
        assert self.fleet.workers[name].role == to
        if sees:
            await self.fleet.router_sees()
        return operation, record

    async def home(self) -> None:
        """Every worker in the role of its name."""
        for name, role in WORKERS.items():
            self.note(name)
            if self.fleet.workers[name].role != role:
                await self.flip(name, "--force")


@pytest.fixture(scope="module")
def shared(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    directory = tmp_path_factory.mktemp("flipped")
    server = launch("etcd", directory / "store")
    proxy = TcpProxy(server.endpoint)
    store = connect_store(ClusterConfig(etcd_endpoints=(server.endpoint,)))
    fleet = Fleet(store, proxy.endpoint, checkpoint, directory, dict(SETTINGS))
    control = Control(fleet, directory)
    try:
        for name, role in WORKERS.items():
            fleet.start(role, name)
        asyncio.run(fleet.ready())
        asyncio.run(fleet.start_router(ROUTER))
        asyncio.run(control.back())
        yield Pools(fleet, control, proxy)
    finally:
        control.kill()
        fleet.end()
        store.close()
        proxy.close()
        server.stop()


@pytest.fixture
async def pools(shared: Pools) -> AsyncIterator[Pools]:
    """Left whole, at rest and in its roles."""
    yield shared
    shared.proxy.heal()
    await shared.home()
    await shared.fleet.router_sees()
    await shared.fleet.assert_quiet()
    await shared.fleet.assert_router_quiet()
    shared.fleet.assert_registered()


def failures(outcomes: list[Outcome]) -> list[str]:
    return [outcome.reason for outcome in outcomes if outcome.error is not None]


@asynccontextmanager
async def held_at_work(pools: Pools, name: str) -> AsyncIterator[None]:
    """A worker that has got something to do and takes no step of it until the end. All that was asked meanwhile is answered."""
    fleet = pools.fleet
    seam = fleet.faults(name)
    seam._ask(do="steps", run=False)
    running: list[asyncio.Task[Outcome]] = []

    async with fleet.client() as client:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not seam._ask(do="standing"):
                    tokens = prompt(BLOCK + len(running), 820 + len(running))
                    running.append(asyncio.create_task(ask(client, fleet.oracle, tokens, 8)))
                    await asyncio.wait(running[-1:], timeout=0.2)
            yield
        finally:
            if fleet.workers[name].process.poll() is None:
                fleet.faults(name)._ask(do="steps", run=True)
        outcomes = await asyncio.gather(*running)
        assert failures(outcomes) == []


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
async def test_workers_change_roles_to_and_fro_under_load(pools: Pools, rounds: int) -> None:
    """No request fails, every token is the oracle's, and it is the same incarnation all along."""
    before = {name: pools.record(name).worker for name in WORKERS}
    async with under_load(pools.fleet, seed=801, longest=100, max_tokens=60) as load:
        for _ in range(rounds):
            for name in ("decode-1", "prefill-0", "decode-1", "prefill-0"):
                await load.more(3)
                epoch = pools.record(name).epoch
                operation, record = await pools.flip(name)
                assert record.worker == before[name]
                assert (record.epoch, record.state) == (epoch + 1, pb.WORKER_STATE_READY)
                print(f"{name} became {operation['to']} in {operation['seconds']} s")
        await load.more(3)
    assert failures(load.outcomes) == []
    assert all(len(outcome.tokens) == 60 for outcome in load.outcomes)
    assert pools.fleet.router_metric("twinpool_router_role_changes_total") >= 4 * rounds
    # Whatever it was: these are the processes that there were.
    assert {name: pools.record(name).worker for name in WORKERS} == before


async def test_what_was_cached_in_the_one_role_is_hit_in_the_other(pools: Pools) -> None:
    """A decode worker computes the next prompt from the KV that it once pulled: no byte of it moves, none is computed."""
    fleet, shared_prompt = pools.fleet, prompt(6 * BLOCK, 811)
    async with fleet.client() as client:
        first = await ask(client, fleet.oracle, [*shared_prompt, 7], 2)
        holder, computer = first.done.decode_worker, first.done.prefill_worker
        cached = (await inspect(fleet.workers[holder].endpoint)).cached_blocks
        assert cached >= 6
        await pools.flip(holder)
        assert (await inspect(fleet.workers[holder].endpoint)).cached_blocks == cached
        # The one that has it as well is no prefill worker any more.
        await pools.flip(computer)
        fetched = fleet.metric(holder, "twinpool_worker_prefix_fetched_tokens_total")
        again = await ask(client, fleet.oracle, [*shared_prompt, 8], 2)
        assert again.done.prefill_worker == holder
        assert again.done.usage.cached_tokens >= 6 * BLOCK
        assert fleet.metric(holder, "twinpool_worker_prefix_fetched_tokens_total") == fetched
        assert fleet.metric(holder, "twinpool_worker_role", role="prefill") == 1
        assert fleet.metric(holder, "twinpool_worker_role", role="decode") == 0


async def test_an_answer_moves_off_a_worker_that_changes_its_role(pools: Pools) -> None:
    """At once: the answers of a tiny model end while a command line starts."""
    flipping: list[asyncio.Task[object]] = []
    decoders = ("decode-0", "decode-1")
    released = {name: pools.fleet.faults(name).count("to_owner:release") for name in decoders}
    moved = pools.fleet.router_metric("twinpool_router_migrations_total")

    async def change(name: str) -> None:
        record = pools.record(name)
        request = worker_pb2.ChangeRoleRequest(
            worker=record.worker, role=worker_pb2.ROLE_PREFILL, epoch=record.epoch
        )
        async with rpc.channel(record.endpoint, RpcConfig()) as channel:
            await worker_pb2_grpc.WorkerServiceStub(channel).ChangeRole(request, timeout=60)
        await until(lambda: pools.record(name).epoch == record.epoch + 1, WAIT_SECONDS)
        assert pools.note(name).role == worker_pb2.ROLE_PREFILL

    def flip_after_five(outcome: Outcome) -> bool:
        if len(outcome.tokens) >= 5 and not flipping:
            # The one that has taken a prompt over.
            (name,) = (n for n in decoders if pools.fleet.faults(n).count("to_owner:release") > released[n])
            flipping.append(asyncio.create_task(change(name)))
        return False

    async with pools.fleet.client() as client:
        outcome = await ask(client, pools.fleet.oracle, prompt(3 * BLOCK, 821), 290, leave=flip_after_five)
    assert len(outcome.tokens) == 290
    await flipping[0]
    assert pools.fleet.router_metric("twinpool_router_migrations_total") > moved


async def test_work_that_does_not_end_in_time_rolls_it_back(pools: Pools) -> None:
    name = "decode-1"
    before = pools.record(name)
    async with held_at_work(pools, name):
        arguments = ("flip", name, "--to", "prefill", "--timeout", "1", "--wait", "--yes")
        code, operation, error = await pools.control.run(*arguments)
        assert code == 1
        assert operation["state"] == "failed"
        assert operation["error"].startswith("FLIP_FAILED")
        assert "what runs has not ended" in error
    # It is what it was, and can be another one later.
    await until(lambda: pools.record(name).state == pb.WORKER_STATE_READY, WAIT_SECONDS)
    after = pools.record(name)
    assert (after.worker, after.role, after.epoch) == (before.worker, before.role, before.epoch + 1)
    await pools.fleet.router_sees()
    await pools.flip(name)


@pytest.mark.parametrize("killed_at", ["drain", "commit"])
async def test_the_next_control_process_goes_on(pools: Pools, killed_at: str) -> None:
    """It is killed while the worker has work, or while the worker cannot tell etcd of its new role."""
    name = "decode-0"
    async with held_at_work(pools, name):
        code, operation, error = await pools.control.run("flip", name, "--to", "prefill", "--yes")
        assert code == 0, error
        await until(
            lambda: (
                recorded(pools.fleet, operation["id"]).steps[-1:]
                and recorded(pools.fleet, operation["id"]).steps[-1].name == "drain"
            ),
            WAIT_SECONDS,
        )
        if killed_at == "commit":
            pools.proxy.cut()
        else:
            pools.control.kill()
    if killed_at == "commit":
        await until_told(partial(waits_in, pools, "commit"), WAIT_SECONDS)
        pools.control.kill()
        pools.proxy.heal()
    await pools.control.back()
    await until(
        lambda: recorded(pools.fleet, operation["id"]).state != pb.OPERATION_STATE_RUNNING, WAIT_SECONDS
    )
    found = recorded(pools.fleet, operation["id"])
    assert (found.state, found.error) == (pb.OPERATION_STATE_SUCCEEDED, "")
    assert [step.name for step in found.steps] == ["ask", "drain", "commit"]
    assert pools.note(name).role == worker_pb2.ROLE_PREFILL


async def waits_in(pools: Pools, step: str) -> bool:
    """Whether the newest operation is in this step and says what it waits for."""
    code, found, error = await pools.control.run("get", "operations")
    assert code == 0, error
    return bool(found[0]["step"] == step and found[0]["waits_for"])


async def test_a_worker_that_is_killed_before_it_counts_comes_back_as_it_was(pools: Pools) -> None:
    name = "decode-1"
    before = pools.record(name).worker.incarnation
    async with held_at_work(pools, name):
        code, operation, error = await pools.control.run("flip", name, "--to", "prefill", "--yes")
        assert code == 0, error
        await until(lambda: pools.record(name).state == pb.WORKER_STATE_FLIPPING, WAIT_SECONDS)
        pools.fleet.workers[name].kill()
        pools.fleet.start("decode", name)
        await pools.fleet.ready(name)
        await until(
            lambda: recorded(pools.fleet, operation["id"]).state != pb.OPERATION_STATE_RUNNING, WAIT_SECONDS
        )
    found = recorded(pools.fleet, operation["id"])
    assert found.state == pb.OPERATION_STATE_FAILED
    assert "has ended before it changed" in found.error
    record = pools.note(name)
    assert (record.role, record.epoch) == (worker_pb2.ROLE_DECODE, 1)
    assert record.worker.incarnation != before


async def test_a_worker_that_is_killed_afterwards_comes_back_as_what_it_became(pools: Pools) -> None:
    name = "decode-1"
    await pools.flip(name)
    pools.fleet.workers[name].kill()
    # Its supervisor knows nothing of it.
    pools.fleet.start("decode", name)
    await pools.fleet.ready(name)
    record = pools.note(name)
    assert (record.role, record.epoch) == (worker_pb2.ROLE_PREFILL, 1)
    await pools.fleet.router_sees()
    async with pools.fleet.client() as client:
        outcome = await ask(client, pools.fleet.oracle, prompt(3 * BLOCK, 831), 4)
        assert outcome.done.prefill_worker in ("prefill-0", "prefill-1", name)
    # One that leaves and comes back keeps it, too.
    process = pools.fleet.workers[name].process
    process.terminate()
    assert await asyncio.to_thread(process.wait, WAIT_SECONDS) == 0
    pools.fleet.start("decode", name)
    await pools.fleet.ready(name)
    assert pools.note(name).role == worker_pb2.ROLE_PREFILL


async def test_etcd_away_during_a_flip_is_waited_for(pools: Pools) -> None:
    name = "decode-1"
    async with under_load(pools.fleet, seed=841, longest=60, max_tokens=20) as load:
        await load.more(3)
        async with held_at_work(pools, name):
            code, operation, error = await pools.control.run("flip", name, "--to", "prefill", "--yes")
            assert code == 0, error
            await until(lambda: pools.record(name).state == pb.WORKER_STATE_FLIPPING, WAIT_SECONDS)
            pools.proxy.cut()
        # It is free now, and cannot tell anybody.
        await load.more(3)
        await until_told(partial(waits_in, pools, "commit"), WAIT_SECONDS)
        await load.more(3)
        pools.proxy.heal()
        await until(
            lambda: recorded(pools.fleet, operation["id"]).state != pb.OPERATION_STATE_RUNNING, WAIT_SECONDS
        )
        assert recorded(pools.fleet, operation["id"]).error == ""
        assert pools.note(name).role == worker_pb2.ROLE_PREFILL
        await pools.fleet.router_sees()
        await load.more(3)
    assert failures(load.outcomes) == []


async def test_what_makes_no_sense_is_refused(pools: Pools) -> None:
    run = pools.control.run
    code, _, error = await run("flip", "decode-0", "--to", "decode", "--yes")
    assert (code, "FLIP_REFUSED" in error) == (1, True)
    code, _, error = await run("flip", "nobody", "--to", "decode", "--yes")
    assert (code, "WORKER_NOT_FOUND" in error) == (2, True)
    code, _, error = await run("flip", "decode-0", "--to", "prefill")
    assert (code, "--yes" in error) == (2, True)
    await pools.flip("decode-0")
    code, _, error = await run("flip", "decode-1", "--to", "prefill", "--yes")
    assert (code, "LAST_OF_ROLE" in error) == (1, True)
    await pools.flip("decode-1", "--force", sees=False)
    # Requests wait for a decode worker, and nothing else.
    async with pools.fleet.client() as client:
        asked = asyncio.create_task(ask(client, pools.fleet.oracle, prompt(BLOCK, 851), 4))
        await until(lambda: pools.fleet.router_metric("twinpool_router_num_requests_waiting") == 1)
        await pools.flip("decode-1", "--force")
        assert (await asked).done.decode_worker == "decode-1"
