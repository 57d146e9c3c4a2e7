# SPDX-License-Identifier: Apache-2.0
"""A whole local cluster, workers in Ray, restarted worker by worker with `twinpool restart` under load: nobody notices."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cluster import Cluster, running_cluster
from tests.support.load import under_load
from tests.support.oracle import Oracle, oracle
from tests.support.waiting import until, until_told
from twinpool.client import Client
from twinpool.v1.control_pb2 import WORKER_STATE_READY, WorkerRecord

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.timeout(900)]

SETTINGS: dict[str, object] = {
    "pools.prefill_workers": 2,
    "pools.decode_workers": 2,
    "router.finish_seconds": 0.0,
    "router.queue_ttl_seconds": 600,
}
NAMES = [f"default-{role}-{number}" for role in ("prefill", "decode") for number in range(2)]
TOKENS = 60


class Site:
    """What a load asks."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @property
    def oracle(self) -> Oracle:
        return oracle(self.cluster.model)

    def client(self) -> Client:
        return self.cluster.client()

    async def command(self, *arguments: str) -> tuple[int, Any, str]:
        """The command line: exit status, what it printed, and stderr."""
        endpoint = self.cluster.state.control_endpoint
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "twinpool.control.cli.main",
            *arguments,
            "--control",
            endpoint,
            "-o",
            "json",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, error = await process.communicate()
        return process.returncode or 0, json.loads(out) if out.strip() else None, error.decode()

    async def records(self) -> dict[str, WorkerRecord]:
        """The workers that are ready, by name."""
        return {
            record.worker.name: record
            for record in await self.cluster.workers()
            if record.state == WORKER_STATE_READY
        }

    async def sees(self, prefill: int, decode: int) -> None:
        """Waits until the router can use so many workers."""
        async with self.client() as client:

            async def usable() -> bool:
                models = await client.models()
                return [(one.prefill_workers, one.decode_workers) for one in models] == [(prefill, decode)]

            await until_told(usable, 120.0)


@pytest.fixture(scope="module")
def site(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running_cluster(tmp_path_factory.mktemp("rolling"), checkpoint, SETTINGS) as cluster:
        yield Site(cluster)


async def test_every_worker_restarted_under_load(site: Site) -> None:
    before = await site.records()
    assert sorted(before) == sorted(NAMES)
    async with under_load(site, seed=601, longest=100, max_tokens=TOKENS) as load:  # type: ignore[arg-type]
        for name in NAMES:
            await load.more(2)
            code, operation, error = await site.command("restart", name, "--yes", "--wait")
            assert code == 0, error
            assert operation["state"] == "succeeded"
            await site.sees(2, 2)
        await load.more(3)
    assert [outcome.reason for outcome in load.outcomes if outcome.error is not None] == []
    assert all(len(outcome.tokens) == TOKENS for outcome in load.outcomes)
    after = await site.records()
    assert sorted(after) == sorted(NAMES)
    for name in NAMES:
        assert after[name].worker.incarnation != before[name].worker.incarnation
        assert not psutil.pid_exists(before[name].pid)
    await site.cluster.assert_quiescent(within=60)


async def test_a_drained_worker_stays_away_until_it_is_restarted(site: Site) -> None:
    name = "default-decode-1"
    pid = (await site.records())[name].pid
    async with under_load(site, seed=601, longest=100, max_tokens=TOKENS) as load:  # type: ignore[arg-type]
        await load.more(2)
        code, operation, error = await site.command("drain", name, "--yes", "--wait")
        assert code == 0, error
        assert operation["state"] == "succeeded"
        await until(lambda: not psutil.pid_exists(pid), 60)
        await site.sees(2, 1)
        await load.more(3)
        # Nobody has started it again: neither Ray nor the process that runs the pool.
        assert name not in {record.worker.name for record in await site.cluster.workers()}
        code, operation, error = await site.command("restart", name, "--yes", "--wait")
        assert code == 0, error
        assert operation["successor"]
        await site.sees(2, 2)
        await load.more(2)
    assert [outcome.reason for outcome in load.outcomes if outcome.error is not None] == []
    assert all(len(outcome.tokens) == TOKENS for outcome in load.outcomes)
    await site.cluster.assert_quiescent(within=60)
