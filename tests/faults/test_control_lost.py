# SPDX-License-Identifier: Apache-2.0
"""The control process dies, or Ray's head: neither is on the way of a request, and no worker goes with them."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.support.asking import Outcome, ask
from tests.support.oracle import oracle
from tests.support.quiescence import assert_quiescent
from tests.support.ray_head import RayHead
from tests.support.steps import prompt
from tests.support.waiting import until, until_told
from tests.support.worker_client import start_router
from twinpool.client import Client
from twinpool.config import ClusterConfig, load_config, to_env
from twinpool.store import Keys, Store, connect_store, start_store
from twinpool.v1.control_pb2 import WORKER_STATE_READY, RouterRecord, WorkerRecord

pytestmark = [pytest.mark.integration, pytest.mark.faults]

NAMES = ["default-decode-0", "default-prefill-0"]
LONG_WAIT = 240.0
ANSWER = 280
_ENTRY = """
import sys
from twinpool.config import load_config
from twinpool.launch import run_process
sys.exit(run_process("control", load_config()))
"""


@dataclass
class Site:
    """etcd, Ray, a control process that runs one worker of each role in it, and a router."""

    directory: Path
    model: Path
    head: RayHead
    store_endpoint: str
    store: Store
    controls: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    routers: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    entry: str = _ENTRY
    environment: dict[str, str] = field(default_factory=dict)

    def start_control(self, more: Mapping[str, object] | None = None) -> None:
        settings: dict[str, object] = {
            "cluster.name": "test",
            "cluster.etcd_endpoints": self.store_endpoint,
            "model.path": str(self.model),
            "kv.num_blocks": 100,
            "kv.block_tokens": 16,
            "worker.drain_timeout_seconds": 5,
            "pools.ray_address": self.head.address,
            "log.format": "json",
            **(more or {}),
        }
        env = {key: value for key, value in os.environ.items() if not key.startswith("TWINPOOL_")}
        env |= to_env(load_config(None, settings, env={})) | {"RAY_AUTH_MODE": "disabled"} | self.environment
        with self.log(len(self.controls)).open("wb") as out:
            command = [sys.executable, "-c", self.entry]
            self.controls.append(
                subprocess.Popen(
                    command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
            )

    def log(self, number: int) -> Path:
        return self.directory / f"control-{number}.log"

    async def launched(self) -> None:
        """Waits until the newest control process acts, and has found the workers that there are."""
        number = len(self.controls) - 1

        def told() -> bool:
            text = self.log(number).read_text(errors="replace")
            assert self.controls[number].poll() is None, text[-4000:]
            return "control_leads" in text

        await until(told, LONG_WAIT)

    def workers(self) -> dict[str, WorkerRecord]:
        """Those that are ready."""
        items = self.store.list_prefix(Keys("test").workers(None)).items
        records = [WorkerRecord.FromString(item.value) for item in items.values()]
        return {record.worker.name: record for record in records if record.state == WORKER_STATE_READY}

    async def router(self) -> str:
        """Starts a router; its endpoint, once it sees both workers."""
        self.routers.append(start_router(self.model, self.store_endpoint, self.directory))
        await until(lambda: self.store.list_prefix(Keys("test").routers).items, LONG_WAIT)
        (item,) = self.store.list_prefix(Keys("test").routers).items.values()
        endpoint = RouterRecord.FromString(item.value).endpoint
        async with Client(endpoint) as client:

            async def ready() -> bool:
                return any(each.ready for each in await client.models())

            await until_told(ready, LONG_WAIT)
        return endpoint

    def end(self) -> None:
        for process in (*self.routers, *self.controls):
            process.kill()
            process.wait()
        self.head.end()


@pytest.fixture
def site(checkpoint: Path, tmp_path: Path) -> Iterator[Site]:
    # Ray's sockets need a short path.
    short = Path(tempfile.mkdtemp(prefix="tp-ray-"))
    server = start_store(tmp_path / "store")
    store = connect_store(ClusterConfig(etcd_endpoints=(server.endpoint,)))
    made = Site(tmp_path, checkpoint, RayHead(short, cpus=2), server.endpoint, store)
    try:
        yield made
    finally:
        made.end()
        store.close()
        server.stop()
        shutil.rmtree(short, ignore_errors=True)


@pytest.fixture
async def running(site: Site) -> AsyncIterator[tuple[Site, str]]:
    """With both workers ready; afterwards these very workers are at rest."""
    site.start_control()
    await site.launched()
    await until(lambda: sorted(site.workers()) == NAMES, LONG_WAIT)
    yield site, await site.router()
    await assert_quiescent([record.endpoint for record in site.workers().values()], within=LONG_WAIT)


async def asked(site: Site, endpoint: str, seed: int, at_five: Callable[[], None] | None = None) -> Outcome:
    """A whole answer, in the middle of which ``at_five`` happens."""
    happened: list[bool] = []

    def see(outcome: Outcome) -> bool:
        if at_five is not None and len(outcome.tokens) >= 5 and not happened:
            happened.append(True)
            at_five()
        return False

    async with Client(endpoint) as client:
        outcome = await ask(client, oracle(site.model), prompt(60, seed), ANSWER, leave=see)
    assert outcome.error is None
    assert len(outcome.tokens) == ANSWER
    assert outcome.done.attempts == 1
    return outcome


def pids(site: Site) -> dict[str, int]:
    return {name: record.pid for name, record in site.workers().items()}


@pytest.mark.timeout(900)
async def test_a_control_process_that_dies_takes_no_worker_with_it(running: tuple[Site, str]) -> None:
    """The next one finds the workers by their names, and can stop them."""
    site, endpoint = running
    before = pids(site)
    await asked(site, endpoint, 301, site.controls[0].kill)
    site.start_control()
    await site.launched()
    await asked(site, endpoint, 302)
    assert pids(site) == before
    # What dies is still restarted.
    psutil.Process(before[NAMES[0]]).kill()
    await until(lambda: pids(site).get(NAMES[0], before[NAMES[0]]) != before[NAMES[0]], LONG_WAIT)


@pytest.mark.timeout(900)
async def test_serving_needs_no_head_of_ray(running: tuple[Site, str]) -> None:
    site, endpoint = running
    before = pids(site)
    died: list[float] = []

    def kill_head() -> None:
        site.head.kill_head()
        died.append(time.monotonic())

    await asked(site, endpoint, 303, kill_head)
    assert died
    for seed in range(304, 308):
        await asked(site, endpoint, seed)
    assert pids(site) == before
    assert site.controls[0].poll() is None
