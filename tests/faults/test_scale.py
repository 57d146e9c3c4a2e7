# SPDX-License-Identifier: Apache-2.0
"""Scaling real workers in a Ray cluster that was joined, under load, by control processes of which one leads and may die."""

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.conftest import ROUTER
from tests.faults.test_control_lost import LONG_WAIT, Site
from tests.support.fleet import available_port
from tests.support.load import under_load
from tests.support.oracle import Oracle, oracle
from tests.support.quiescence import assert_quiescent
from tests.support.ray_head import RayHead
from tests.support.waiting import until, until_told
from tests.support.worker_client import start_router
from twinpool.client import Client
from twinpool.config import ClusterConfig
from twinpool.store import Keys, connect_store, start_store
from twinpool.v1 import control_pb2 as pb
from twinpool.v1.control_pb2 import RouterRecord, WorkerRecord

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.timeout(1200)]

CPUS = 4
KEYS = Keys("test")


@dataclass
class Scaled(Site):
    """A site with a router and any number of control processes."""

    endpoints: list[str] = field(default_factory=list)
    endpoint: str = ""
    more: dict[str, object] = field(default_factory=dict)

    @property
    def oracle(self) -> Oracle:
        return oracle(self.model)

    def client(self) -> Client:
        return Client(self.endpoint)

    def control(self) -> None:
        port = available_port()
        self.endpoints.append(f"127.0.0.1:{port}")
        self.start_control(
            {
                "control.port": port,
                "cluster.lease_ttl_seconds": 3,
                "pools.pending_timeout_seconds": 5,
                "pools.stop_workers": False,
                "pools.prefill_placement": "spread",
                "pools.decode_placement": "group",
                "worker.threads": 1,
            }
            | self.more
        )

    async def command(self, *arguments: str, control: int = -1) -> tuple[int, Any, str]:
        """The command line: exit status, what it printed as JSON, and stderr."""
        command = [sys.executable, "-m", "twinpool.control.cli.main", *arguments]
        process = await asyncio.create_subprocess_exec(
            *command, "--control", self.endpoints[control],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, error = await process.communicate()
        return process.returncode or 0, json.loads(out) if out.strip() else None, error.decode()

    async def scale(self, prefill: int, decode: int, *more: str, control: int = -1) -> tuple[int, Any, str]:
        numbers = ("--prefill", str(prefill), "--decode", str(decode))
        arguments = ("scale", "default", *numbers, "--yes", "-o", "json", *more)
        return await self.command(*arguments, control=control)

    async def pool(self) -> Any:
        code, pools, error = await self.command("get", "pools", "-o", "json")
        assert code == 0, error
        return pools[0]

    def operation(self, name: str) -> pb.Operation:
        item = self.store.get(KEYS.operation(name))
        return pb.Operation() if item is None else pb.Operation.FromString(item.value)

    def leader(self) -> int:
        """Which control process leads; -1: none."""
        item = self.store.get(KEYS.leader("controller"))
        return -1 if item is None else self.endpoints.index(item.value.decode())

    async def leads(self) -> int:
        await until(lambda: self.leader() >= 0, LONG_WAIT)
        return self.leader()

    async def sized(self, prefill: int, decode: int) -> None:
        """Waits until so many are ready, and none is left beside them."""

        def is_so() -> bool:
            items = self.store.list_prefix(KEYS.workers()).items.values()
            names = [WorkerRecord.FromString(item.value).worker.name for item in items]
            roles = [name.split("-")[1] for name in self.workers()]
            return (
                len(names) == len(roles)
                and roles.count("prefill") == prefill
                and roles.count("decode") == decode
            )

        await until(is_so, LONG_WAIT)


@pytest.fixture(scope="module")
def scaled(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scaled]:
    directory = tmp_path_factory.mktemp("scaled")
    short = Path(tempfile.mkdtemp(prefix="tp-ray-"))
    server = start_store(directory / "store")
    store = connect_store(ClusterConfig(etcd_endpoints=(server.endpoint,)))
    made = Scaled(directory, checkpoint, RayHead(short, cpus=CPUS), server.endpoint, store)
    try:
        asyncio.run(_started(made))
        yield made
    finally:
        made.end()
        store.close()
        server.stop()
        shutil.rmtree(short, ignore_errors=True)


async def _started(made: Scaled) -> None:
    made.control()
    await made.launched()
    await made.sized(1, 1)
    made.control()
    made.routers.append(start_router(made.model, made.store_endpoint, made.directory, ROUTER))
    await until(lambda: made.store.list_prefix(KEYS.routers).items, LONG_WAIT)
    (item,) = made.store.list_prefix(KEYS.routers).items.values()
    made.endpoint = RouterRecord.FromString(item.value).endpoint
    async with made.client() as client:

        async def ready() -> bool:
            return any(each.ready for each in await client.models())

        await until_told(ready, LONG_WAIT)


async def quiet(made: Scaled) -> None:
    await assert_quiescent([record.endpoint for record in made.workers().values()], within=LONG_WAIT)


async def test_a_pool_grows_and_shrinks_under_load_and_respects_a_cordon(scaled: Scaled) -> None:
    # The command goes to the one that stands by, and finds the leader.
    standby = 1 - await scaled.leads()
    async with under_load(scaled, seed=701, longest=60, max_tokens=30) as load:  # type: ignore[arg-type]
        await load.more(2)
        code, operation, error = await scaled.scale(2, 2, "--wait", control=standby)
        assert code == 0, error
        assert (operation["state"], operation["kind"]) == ("succeeded", "scale")
        assert sorted(scaled.workers()) == [
            "default-decode-0",
            "default-decode-1",
            "default-prefill-0",
            "default-prefill-1",
        ]
        await load.more(3)
        code, _, error = await scaled.command("cordon", "default-decode-0")
        assert code == 0, error
        await until(lambda: scaled.workers()["default-decode-0"].cordoned, LONG_WAIT)
        # What was placed before may end there.
        await load.more(6)
        before = len(load.outcomes)
        await load.more(8)
        elsewhere = {outcome.done.decode_worker for outcome in load.outcomes[before:]}
        assert elsewhere == {"default-decode-1"}
        code, operation, error = await scaled.scale(1, 1, "--wait")
        assert code == 0, error
        # The cordoned one has gone.
        assert "default-decode-1" in scaled.workers()
        assert len(scaled.workers()) == 2
        await load.more(3)
    assert [outcome.reason for outcome in load.outcomes if outcome.error is not None] == []
    assert all(len(outcome.tokens) == 30 for outcome in load.outcomes)
    await quiet(scaled)


async def test_a_replica_without_a_place_says_what_is_missing(scaled: Scaled) -> None:
    code, operation, error = await scaled.scale(1, CPUS, "--wait")
    assert code == 1
    assert operation["state"] == "failed"
    assert "REPLICA_PENDING" in error
    assert "CPU: 1 asked, 0 free on a node, 4 in all" in error
    pool = await scaled.pool()
    pending = [each for each in pool["replicas"] if each["phase"] == "pending"]
    assert len(pending) == 1
    assert "CPU: 1 asked" in pending[0]["cause"]
    code, events, error = await scaled.command("get", "events", "--warning", "-o", "json")
    assert code == 0, error
    told = [event["subject"] for event in events if event["reason"] == "ReplicaPending"]
    # Others may have waited for a while.
    assert pending[0]["name"] in told
    # Who never had a place is not waited for on the way down.
    code, _, error = await scaled.scale(1, 1, "--wait")
    assert code == 0, error
    await scaled.sized(1, 1)


async def test_a_worker_that_dies_again_and_again_waits_for_its_start(scaled: Scaled) -> None:
    await scaled.sized(1, 1)
    await scaled.leads()
    (name,) = (name for name in scaled.workers() if "-decode-" in name)
    for number in range(1, 4):
        pid = scaled.workers()[name].pid
        psutil.Process(pid).kill()

        def another() -> bool:
            record = scaled.workers().get(name)
            return record is not None and record.pid != pid  # noqa: B023

        await until(another, LONG_WAIT)

        async def told() -> bool:
            _, found, _ = await scaled.command("get", "events", "--subject", name, "-o", "json")
            reasons = [event["reason"] for event in found]
            return reasons.count("WorkerCrashed") + reasons.count("WorkerCrashLooping") >= number  # noqa: B023

        await until_told(told, LONG_WAIT)
    code, found, error = await scaled.command("describe", "worker", name, "-o", "json")
    assert code == 0, error
    assert found["replica"]["crashes"] == 3
    assert found["counts"]["total_blocks"] == 100
    last = [event for event in found["events"] if event["reason"] == "WorkerCrashLooping"]
    assert len(last) == 1
    assert "has ended 3 times" in last[0]["message"]
    # Its log's last line but the first of the next one.
    assert "log:" in last[0]["message"]
    await quiet(scaled)


@pytest.mark.parametrize("moment", ["begun", "starting", "leaving"])
async def test_the_one_that_stands_by_ends_a_scale_whose_leader_was_killed(
    scaled: Scaled, moment: str
) -> None:
    prefill, decode = (1, 1) if moment == "leaving" else (2, 2)
    if moment != "begun":
        await scaled.scale(3 - prefill, 3 - decode, "--wait", control=await scaled.leads())
    leader = await scaled.leads()
    before = scaled.workers()
    code, operation, error = await scaled.scale(prefill, decode, control=leader)
    assert code == 0, error
    if moment == "starting":
        await until(lambda: len(scaled.store.list_prefix(KEYS.workers()).items) > len(before), LONG_WAIT)
    elif moment == "leaving":
        await until(lambda: drains(scaled, operation["id"]), LONG_WAIT)
    scaled.controls[leader].kill()
    scaled.controls[leader].wait()
    # Another one to stand by; the one that does already takes over.
    scaled.control()
    await until(lambda: scaled.operation(operation["id"]).state != pb.OPERATION_STATE_RUNNING, LONG_WAIT)
    found = scaled.operation(operation["id"])
    assert found.state == pb.OPERATION_STATE_SUCCEEDED, found.error
    assert [step.name for step in found.steps] == ["write", "converge"]
    await scaled.sized(prefill, decode)
    # Nobody was started anew who was to stay.
    for name, record in scaled.workers().items():
        if name in before:
            assert record.worker.incarnation == before[name].worker.incarnation
            assert psutil.pid_exists(record.pid)
    await scaled.leads()
    await quiet(scaled)


def drains(scaled: Scaled, parent: str) -> list[pb.Operation]:
    """Drains that a scale has begun."""
    items = scaled.store.list_prefix(KEYS.operations).items.values()
    found = [pb.Operation.FromString(item.value) for item in items]
    return [op for op in found if op.parent == parent]
