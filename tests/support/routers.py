# SPDX-License-Identifier: Apache-2.0
"""Several router processes over one fleet of workers; a test kills them with SIGKILL and starts them again."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from tests.support.fleet import Fleet, _scrape
from tests.support.worker_client import start_router
from twinpool.client import Client
from twinpool.errors import TwinpoolError
from twinpool.store import Keys
from twinpool.v1.control_pb2 import RouterRecord

START_SECONDS = 120.0


class Routers:
    """By name. ``settings`` are those of each."""

    def __init__(self, fleet: Fleet, settings: Mapping[str, object]) -> None:
        self.fleet = fleet
        self.records: dict[str, RouterRecord] = {}
        self._settings = dict(settings)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self, name: str) -> None:
        """Starts one, or the next one under an old name, and waits until it serves with every live worker."""
        before = self.records.get(name)
        settings = self._settings | {"router.name": name}
        fleet, process = self.fleet, None
        process = self._processes[name] = start_router(fleet.model, fleet.endpoint, fleet.directory, settings)
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, (fleet.directory / "router.log").read_text()[-4000:]
            assert time.monotonic() < deadline, f"{name} does not serve"
            item = await asyncio.to_thread(fleet.store.get, Keys("test").router(name))
            record = RouterRecord.FromString(item.value) if item is not None else RouterRecord()
            fresh = before is None or record.incarnation != before.incarnation
            if record.endpoint and fresh and await self._sees_all(record.endpoint):
                self.records[name] = record
                return
            await asyncio.sleep(0.05)

    async def _sees_all(self, endpoint: str) -> bool:
        wanted = [sum(worker.role == role for worker in self.fleet.live) for role in ("prefill", "decode")]
        async with Client(endpoint) as client:
            try:
                models = await client.models()
            except TwinpoolError:
                return False
        return any([one.prefill_workers, one.decode_workers] == wanted and one.ready for one in models)

    def endpoint(self, name: str) -> str:
        return self.records[name].endpoint

    def metric(self, name: str, sample: str, **labels: Any) -> float:
        return _scrape(self.records[name].metrics_endpoint, sample, labels)

    def kill(self, name: str) -> None:
        """SIGKILL: its record stays in the store until its lease ends."""
        self._processes[name].kill()
        self._processes[name].wait()

    def alive(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def end(self) -> None:
        """In good order, so that their records go at once."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    async def assert_quiet(self, within: float = 30.0) -> None:
        """No request is in flight, queued or placed in any live router's books."""
        names = ("inflight_requests", "num_requests_running", "num_requests_waiting", "queue_tokens")
        deadline = time.monotonic() + within
        for router in [name for name in self.records if self.alive(name)]:
            while left := {n: v for n in names if (v := self.metric(router, f"twinpool_router_{n}"))}:
                assert time.monotonic() < deadline, f"{router} still counts {left}"
                await asyncio.sleep(0.05)
