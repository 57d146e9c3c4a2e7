# SPDX-License-Identifier: Apache-2.0
"""A pool whose workers change their roles by one command, to and fro, while it serves; and what else runs in it meanwhile."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.asking import ask
from tests.support.cluster import Cluster, running_cluster
from tests.support.load import under_load
from tests.support.oracle import Oracle, oracle
from tests.support.steps import prompt
from tests.support.waiting import until_told
from twinpool.client import Client
from twinpool.v1.control_pb2 import WorkerRecord

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.timeout(1800)]

DRAIN_SECONDS = 30
BESIDE_SECONDS = 1.0
"""What a flip may take beside its drain."""

LONG_WAIT = 240.0
ROLES = {1: "prefill", 2: "decode"}


@dataclass
class Pool:
    """A cluster of two workers of each role, seen by its operator."""

    cluster: Cluster

    @property
    def oracle(self) -> Oracle:
        return oracle(self.cluster.model)

    def client(self) -> Client:
        return self.cluster.client()

    async def command(self, *arguments: str) -> tuple[int, Any, str]:
        """The command line: exit status, what it printed as JSON, and stderr."""
        command = [sys.executable, "-m", "twinpool.control.cli.main", *arguments]
        process = await asyncio.create_subprocess_exec(
            *command, "--control", self.cluster.state.control_endpoint, "-o", "json",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, error = await process.communicate()
        return process.returncode or 0, json.loads(out) if out.strip() else None, error.decode()

    async def split(self, prefill: int, decode: int) -> Any:
        """Rebalances, and returns what the command said once it is done."""
        numbers = ("--prefill", str(prefill), "--decode", str(decode))
        code, found, error = await self.command("rebalance", "default", *numbers, "--wait", "--yes")
        assert code == 0, error
        assert await self.roles() == {"prefill": prefill, "decode": decode}
        return found

    async def workers(self) -> dict[str, WorkerRecord]:
        return {record.worker.name: record for record in await self.cluster.workers()}

    async def roles(self) -> dict[str, int]:
        found = [ROLES[record.role] for record in await self.cluster.workers()]
        return {role: found.count(role) for role in ROLES.values()}

    async def operations(self) -> list[Any]:
        code, found, error = await self.command("get", "operations")
        assert code == 0, error
        return list(found)

    async def beside_the_drain(self, flip: str) -> tuple[float, float]:
        """Seconds of a flip that its worker's requests took, and those that everything else took."""
        code, found, error = await self.command("describe", "operation", flip)
        assert code == 0, error
        steps = {step["step"]: step["seconds"] for step in found["steps"]}
        assert list(steps) == ["write", "ask", "drain", "commit"]
        return steps["drain"], found["seconds"] - steps["drain"]


@pytest.fixture
def pool(checkpoint: Path, tmp_path: Path) -> Iterator[Pool]:
    settings = {
        "pools.prefill_workers": 2,
        "pools.decode_workers": 2,
        "worker.drain_timeout_seconds": DRAIN_SECONDS,
        "worker.threads": 1,
        "router.finish_seconds": 0.0,
        # Nothing that was cached is evicted: the tests are about flips, not about room.
        "kv.num_blocks": 2048,
    }
    with running_cluster(tmp_path, checkpoint, settings) as cluster:
        yield Pool(cluster)


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.slow)])
async def test_a_pool_is_rebalanced_to_and_fro_under_load(pool: Pool, rounds: int) -> None:
    before = await pool.workers()
    kept = prompt(48, 5)
    async with pool.client() as client:
        assert (await ask(client, pool.oracle, kept, 4)).done.usage.cached_tokens == 0
        async with under_load(pool, seed=801, longest=60, max_tokens=24) as load:  # type: ignore[arg-type]
            await load.more(3)
            for _ in range(rounds):
                done = await pool.split(3, 1)
                assert [move["to"] for move in done["moves"]] == ["prefill"]
                await load.more(3)
                # What was cached before is hit by workers that have another role now, or had one.
                assert (await ask(client, pool.oracle, kept, 4)).done.usage.cached_tokens >= 32
                await pool.split(2, 2)
                await load.more(3)
    assert [outcome.reason for outcome in load.outcomes if outcome.error is not None] == []
    assert all(len(outcome.tokens) == 24 for outcome in load.outcomes)
    found = await pool.operations()
    # Nobody was started or taken out instead.
    assert {operation["kind"] for operation in found} == {"flip", "rebalance"}
    assert {operation["state"] for operation in found} == {"succeeded"}
    flips = [operation for operation in found if operation["kind"] == "flip"]
    assert len(flips) == 2 * rounds
    taken = [await pool.beside_the_drain(operation["id"]) for operation in flips]
    others = sorted(other for _, other in taken)
    print(f"drain at most {max(drain for drain, _ in taken):.3f} s, the rest {others}")
    # What is not the drain is a dozen writes to etcd, two calls and the exchange of an object: some 50 ms of work, none of which
    # waits for requests.
    assert others[-1] < BESIDE_SECONDS
    assert all(operation["seconds"] < DRAIN_SECONDS + BESIDE_SECONDS for operation in flips)
    after = await pool.workers()
    assert {name: record.worker.incarnation for name, record in after.items()} == {
        name: record.worker.incarnation for name, record in before.items()
    }
    await pool.cluster.assert_quiescent(LONG_WAIT)


async def test_a_worker_that_dies_while_it_changes_leaves_the_pool_as_it_was_or_is_to_be(pool: Pool) -> None:
    """Held still in the middle of its change, then killed: it comes back, and the numbers are those of its role."""
    victim = (await pool.workers())["default-decode-0"]
    process = psutil.Process(victim.pid)
    process.send_signal(signal.SIGSTOP)
    code, begun, error = await pool.command("flip", "default-decode-0", "--to", "prefill", "--yes")
    assert code == 0, error
    process.kill()

    async def ended() -> bool:
        return all(operation["state"] != "running" for operation in await pool.operations())

    await until_told(ended, LONG_WAIT)
    (flip,) = [operation for operation in await pool.operations() if operation["id"] == begun["id"]]
    assert (flip["state"], flip["error"].split(":")[0]) == ("failed", "FLIP_FAILED")

    async def healed() -> bool:
        records = (await pool.workers()).values()
        ready = all(record.state == 2 for record in records)
        return ready and len(records) == 4 and await pool.roles() == {"prefill": 2, "decode": 2}

    await until_told(healed, LONG_WAIT)
    code, found, error = await pool.command("get", "pools")
    assert code == 0, error
    assert (found[0]["prefill"]["desired"], found[0]["decode"]["desired"]) == (2, 2)
    assert sorted(await pool.workers()) == [
        "default-decode-0",
        "default-decode-1",
        "default-prefill-0",
        "default-prefill-1",
    ]
    async with pool.client() as client:
        assert len((await ask(client, pool.oracle, prompt(40, 9), 8)).tokens) == 8
    await pool.cluster.assert_quiescent(LONG_WAIT)
