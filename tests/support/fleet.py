# SPDX-License-Identifier: Apache-2.0
"""Real worker processes with a fault seam each, a store, and maybe a router; the test starts, kills and restarts them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.fault_seam import ENTRY, PLAN_VARIABLE
from tests.support.oracle import Oracle, oracle
from tests.support.quiescence import QUIET_SECONDS, assert_quiescent
from tests.support.waiting import GIVE_UP_SECONDS
from tests.support.worker_client import (
    Request,
    RouterSession,
    WorkerProcess,
    start_router,
    start_worker,
    wait_ready,
)
from twinpool.client import Client
from twinpool.config import ClusterConfig
from twinpool.errors import TwinpoolError
from twinpool.store import Keys, Store, connect_store, start_store
from twinpool.v1.control_pb2 import RouterRecord
from twinpool.worker.seam import SEAM_VARIABLE

BLOCK = 16
POOL_BLOCKS = 24
ROOT = Path(__file__).parents[2]
COMMAND_SECONDS = 60.0


class Faults:
    """Commands to the seam of one worker process; see ``fault_seam`` for what they do."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _ask(self, **command: object) -> Any:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(COMMAND_SECONDS)
            client.connect(str(self._path))
            with client.makefile("rw") as stream:
                stream.write(json.dumps(command) + "\n")
                stream.flush()
                return json.loads(stream.readline())

    def counts(self) -> dict[str, int]:
        """Reads posted, messages sent by way and kind, what is held; a kind that never came is missing."""
        return dict(self._ask(do="counts"))

    def count(self, name: str) -> int:
        return self.counts().get(name, 0)

    def read(self, fault: str, kind: str = "data", value: str = "", skip: int = 0) -> int:
        """Plans a fault for a read that is not posted yet."""
        return int(self._ask(do="read", kind=kind, fault=fault, value=value, skip=skip))

    def note(self, way: str, kind: str, fault: str, times: int = 1) -> None:
        """Plans a fault for messages that are not sent yet."""
        self._ask(do="note", way=way, kind=kind, fault=fault, times=times)

    def free(self) -> None:
        self._ask(do="free")

    def clear(self) -> None:
        self._ask(do="clear")

    async def landed(self, seconds: float = GIVE_UP_SECONDS) -> None:
        """Waits until no read is held back any more."""
        deadline = time.monotonic() + seconds
        while self.count("late"):
            assert time.monotonic() < deadline, "a read is still held back"
            await asyncio.sleep(0.005)

    async def reached(self, name: str, count: int, seconds: float = GIVE_UP_SECONDS) -> None:
        """Waits until a count is at least ``count``."""
        deadline = time.monotonic() + seconds
        while self.count(name) < count:
            assert time.monotonic() < deadline, f"{name} did not reach {count}: {self.counts()}"
            await asyncio.sleep(0.01)


@dataclass
class Fleet:
    """Workers by name. ``settings`` are those of every worker."""

    store: Store
    endpoint: str
    model: Path
    directory: Path
    settings: dict[str, object] = field(default_factory=dict)
    plan: dict[str, object] = field(default_factory=dict)
    workers: dict[str, WorkerProcess] = field(default_factory=dict)
    starts: int = 0
    router: subprocess.Popen[bytes] | None = None
    router_record: RouterRecord = field(default_factory=RouterRecord)

    @property
    def oracle(self) -> Oracle:
        return oracle(self.model)

    @property
    def live(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers.values() if worker.process.poll() is None]

    def start(self, role: str, name: str, settings: Mapping[str, object] | None = None) -> WorkerProcess:
        """Starts a worker process, or the next one under an old name; it is not ready yet."""
        self.starts += 1
        plan = dict(self.plan)
        if "random" in plan:
            chances: Any = plan["random"]
            plan["random"] = chances | {"seed": f"{chances['seed']}-{self.starts}"}
        environment = {
            SEAM_VARIABLE: ENTRY,
            PLAN_VARIABLE: json.dumps(plan | {"directory": str(self.directory)}),
            "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
            # Every process hashes with a seed of its own, as in production.
            "PYTHONHASHSEED": str(self.starts),
        }
        worker = start_worker(
            role,
            name,
            self.model,
            self.endpoint,
            self.directory,
            self.settings | dict(settings or {}),
            environment,
        )
        self.workers[name] = worker
        return worker

    async def ready(self, *names: str) -> None:
        await asyncio.gather(*(wait_ready(self.store, self.workers[name]) for name in names or self.workers))

    def faults(self, name: str) -> Faults:
        return Faults(self.directory / f"{name}.sock")

    def clear_faults(self) -> None:
        for worker in self.live:
            self.faults(worker.name).clear()

    def request(self, prompt: Sequence[int], name: str, **spec: object) -> Request:
        record = next(iter(self.workers.values())).record
        eos = list(record.eos_token_ids)
        return Request(prompt, name, record.fingerprint, **({"stop": eos} | spec))  # type: ignore[arg-type]

    async def assert_quiet(self, *names: str, within: float = QUIET_SECONDS) -> None:
        chosen = [self.workers[name] for name in names] or self.live
        await assert_quiescent([worker.endpoint for worker in chosen], within=within)

    def metric(self, name: str, sample: str, **labels: str) -> float:
        """A worker's own figure; 0 if it was never counted."""
        return _scrape(self.workers[name].record.metrics_endpoint, sample, labels)

    @asynccontextmanager
    async def session(self, name: str, router: str = "test-router") -> AsyncIterator[RouterSession]:
        """The test's own session with a worker."""
        made = RouterSession(self.workers[name].record, router)
        try:
            await made.open()
            yield made
        finally:
            await made.close()

    # --- a router process

    async def start_router(self, settings: Mapping[str, object] | None = None, *, sees: bool = True) -> None:
        """Starts a router and waits until it sees every worker, if it ever will."""
        self.router = start_router(self.model, self.endpoint, self.directory, settings)
        deadline = time.monotonic() + 60
        while not (items := self.store.list_prefix(Keys("test").routers).items):
            assert self.router.poll() is None, (self.directory / "router.log").read_text()[-4000:]
            assert time.monotonic() < deadline, "the router does not register"
            await asyncio.sleep(0.05)
        self.router_record = RouterRecord.FromString(next(iter(items.values())).value)
        if sees:
            await self.router_sees()

    async def router_sees(self, seconds: float = 60.0) -> None:
        """Waits until the router can use every live worker."""
        wanted = [sum(worker.role == role for worker in self.live) for role in ("prefill", "decode")]
        deadline = time.monotonic() + seconds
        async with self.client() as client:
            while True:
                try:
                    models = await client.models()
                except TwinpoolError:
                    models = []
                if any(
                    model.ready and [model.prefill_workers, model.decode_workers] == wanted
                    for model in models
                ):
                    return
                assert time.monotonic() < deadline, f"the router sees {models}, not {wanted}"
                await asyncio.sleep(0.05)

    def client(self) -> Client:
        return Client(self.router_record.endpoint)

    def router_metric(self, sample: str, **labels: str) -> float:
        return _scrape(self.router_record.metrics_endpoint, sample, labels)

    async def assert_router_quiet(self, within: float = QUIET_SECONDS) -> None:
        """No request is in flight, queued or placed in the router's books."""
        names = ("inflight_requests", "num_requests_running", "num_requests_waiting", "queue_tokens")
        deadline = time.monotonic() + within
        while left := {name: v for name in names if (v := self.router_metric(f"twinpool_router_{name}"))}:
            assert time.monotonic() < deadline, f"the router still counts {left}"
            await asyncio.sleep(0.05)

    def assert_registered(self) -> None:
        """The store holds a record of each live worker, of this very process, and of no other."""
        items = self.store.list_prefix(Keys("test").workers(None)).items
        names = sorted(key.rsplit("/", 1)[1] for key in items)
        assert names == sorted(worker.name for worker in self.live)

    def end(self) -> None:
        """Kills what still runs."""
        for worker in self.live:
            worker.kill()
        if self.router is not None and self.router.poll() is None:
            self.router.kill()
            self.router.wait()


def _scrape(endpoint: str, sample: str, labels: Mapping[str, str]) -> float:
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as response:
        text = response.read().decode()
    return sum(
        found.value
        for family in text_string_to_metric_families(text)
        for found in family.samples
        if found.name == sample and labels.items() <= found.labels.items()
    )


@contextmanager
def running_fleet(
    directory: Path,
    model: Path,
    workers: Mapping[str, str],
    settings: Mapping[str, object] | None = None,
    plan: Mapping[str, object] | None = None,
) -> Iterator[Fleet]:
    """``workers`` (name to role) in processes of their own, ready; all are killed at the end. Pools are tiny and poisoned."""
    base: dict[str, object] = {
        "kv.num_blocks": POOL_BLOCKS,
        # No test that takes its time is to meet one of them by chance.
        "transfer.lease_seconds": 60,
        "transfer.read_deadline_seconds": 50,
        "cluster.lease_ttl_seconds": 4,
    }
    server = start_store(directory / "store")
    store = connect_store(ClusterConfig(etcd_endpoints=(server.endpoint,)))
    fleet = Fleet(store, server.endpoint, model, directory, base | dict(settings or {}), dict(plan or {}))
    try:
        for name, role in workers.items():
            fleet.start(role, name)
        asyncio.run(fleet.ready())
        yield fleet
    finally:
        fleet.end()
        store.close()
        server.stop()


def available_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
