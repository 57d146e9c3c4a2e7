# SPDX-License-Identifier: Apache-2.0
"""A whole cluster on one machine: store, Ray with its workers, routers, control service.

``twinpool demo`` runs it in its own process, ``twinpool up`` in a supervisor that stays. Everything is a child of that
process; ``stop`` ends all of it and leaves nothing, also after a start that failed half-way.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import psutil

from twinpool.client import Client
from twinpool.config import TwinpoolConfig, served_pools, to_env
from twinpool.control.controller import Controller
from twinpool.control.pool_set import PoolSet
from twinpool.control.view import ClusterView
from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger
from twinpool.store import Store, StoreServer, connect_store, start_store
from twinpool.v1 import inference_pb2 as pb

T = TypeVar("T")
Progress = Callable[[str, str], None]

ROUTER_STOP_SECONDS = 10.0
CHILD_STOP_SECONDS = 3.0
SERVING_POLL_SECONDS = 0.05

log = get_logger(__name__)


class LocalCluster:
    """Start once, stop once; both on the same event loop."""

    def __init__(self, config: TwinpoolConfig, directory: Path, *, embedded_store: bool = False) -> None:
        """``directory`` holds the store's data and ``logs/``; it must be writable and is not removed."""
        self.config = config
        self.directory = directory
        self._embedded_store = embedded_store
        self._server: StoreServer | None = None
        self._store: Store | None = None
        self._controller: Controller | None = None
        self._routers: list[subprocess.Popen[bytes]] = []
        self.router_endpoints: list[str] = []
        self.http_endpoints: list[str] = []

    @property
    def store_endpoint(self) -> str:
        """Where the store listens: host:port."""
        return self._server.endpoint if self._server else ""

    @property
    def store_kind(self) -> str:
        """ "etcd" or "embedded"."""
        return self._server.kind if self._server else ""

    @property
    def control_endpoint(self) -> str:
        """Where the ControlService listens: host:port."""
        return self._controller.endpoint if self._controller else ""

    @property
    def console_url(self) -> str:
        """Where the console page is; empty: nowhere."""
        return self._controller.console_url if self._controller else ""

    @property
    def worker_endpoints(self) -> list[str]:
        """Where the registered workers listen."""
        return [record.endpoint for record in self.view.workers()] if self._controller else []

    @property
    def controller(self) -> Controller:
        """What looks after the workers."""
        assert self._controller is not None, "the cluster is not started"
        return self._controller

    @property
    def view(self) -> ClusterView:
        """What the store says of the cluster."""
        return self.controller.view

    @property
    def pools(self) -> PoolSet:
        """The workers."""
        return self.controller.pools

    @property
    def router_pids(self) -> dict[str, int]:
        """Process ids by the routers' names."""
        return {f"router-{index}": process.pid for index, process in enumerate(self._routers)}

    def describe(self) -> str:
        """One line for a person."""
        workers = ", ".join(f"{record.worker.name} {record.endpoint}" for record in self.view.workers())
        return f"store {self.store_kind} {self.store_endpoint} · {workers} · router {', '.join(self.router_endpoints)}"

    async def start(self, progress: Progress, stopping: asyncio.Event) -> None:
        """Returns when requests can be served. Raises TwinpoolError; CANCELLED if ``stopping`` was set meanwhile."""
        pools = self.config.pools
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        progress("Starting the store", "")
        data = self.directory / "store"
        self._server = await asyncio.to_thread(start_store, data, prefer_embedded=self._embedded_store)
        cluster = self.config.cluster.model_copy(update={"etcd_endpoints": (self._server.endpoint,)})
        self.config = self.config.model_copy(update={"cluster": cluster})
        self._store = await asyncio.to_thread(connect_store, cluster)
        progress("Starting Ray", "")
        self._controller = Controller(self.config, self._store, self.directory / "logs")
        await self._controller.start()
        await _unless(self._controller.wait_leading(), stopping)
        wanted = sum(self._controller.wanted().values())
        progress("Loading the workers", f"0 of {wanted} ready")
        await _unless(
            self.view.wait_workers(
                wanted,
                pools.start_timeout_seconds,
                lambda ready: progress("Loading the workers", f"{ready} of {wanted} ready"),
                self._controller.check_start,
            ),
            stopping,
        )
        progress("Starting the router", "")
        for index in range(pools.routers):
            self._routers.append(self._spawn_router(index))
        records = await _unless(
            self.view.wait_routers(pools.routers, pools.start_timeout_seconds, self._check_routers), stopping
        )
        self.router_endpoints = [record.endpoint for record in records]
        self.http_endpoints = [record.http_endpoint for record in records if record.http_endpoint]
        for endpoint in self.router_endpoints:
            await _unless(self._wait_serving(endpoint), stopping)

    async def stop(self) -> None:
        """Ends everything in the reverse order of its start. Never raises; each step is bounded."""
        if self._controller is not None:
            # Nothing is to be started any more.
            await _quietly("control", self._controller.cease())
        await _quietly("routers", asyncio.to_thread(self._stop_routers))
        if self._controller is not None:
            await _quietly("pools", self._controller.stop())
        if self._store is not None:
            await _quietly("store client", asyncio.to_thread(self._store.close))
        if self._server is not None:
            await _quietly("store", asyncio.to_thread(self._server.stop))
        await _quietly("children", asyncio.to_thread(_end_children))

    def _spawn_router(self, index: int) -> subprocess.Popen[bytes]:
        name = f"router-{index}"
        router = self.config.router.model_copy(update={"name": name})
        env = _environment() | to_env(self.config.model_copy(update={"router": router}))
        with (self.directory / "logs" / f"{name}.log").open("ab") as log_file:
            # A session of its own: Ctrl-C in the terminal reaches this process alone, which then stops all in order.
            return subprocess.Popen(
                [sys.executable, "-m", "twinpool.control.cli.main", "serve", "router"],
                env=env,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def _wait_serving(self, endpoint: str) -> None:
        """Returns once the router has loaded the tokenizer and sees every worker."""
        pools = self.config.pools
        deadline = asyncio.get_running_loop().time() + pools.start_timeout_seconds
        async with Client(endpoint, self.config.rpc, self.config.tls) as client:
            while True:
                self._check_routers()
                # A router that has tenants tells nobody else how many workers it sees.
                closed = bool(self.config.router.tenants_file)
                if await client.serving() if closed else self._complete(await client.models()):
                    return
                if asyncio.get_running_loop().time() > deadline:
                    raise TwinpoolError("NO_WORKERS", f"router {endpoint} does not see the workers")
                await asyncio.sleep(SERVING_POLL_SECONDS)

    def _complete(self, models: list[pb.Model]) -> bool:
        """Whether a router sees all workers of the pools that it serves, and can serve all of their models."""
        wanted = self.controller.wanted(served_pools(self.config))
        return (
            bool(models)
            and all(model.ready for model in models)
            and sum(model.prefill_workers for model in models) >= wanted["prefill"]
            and sum(model.decode_workers for model in models) >= wanted["decode"]
        )

    def _check_routers(self) -> None:
        for index, process in enumerate(self._routers):
            if process.poll() is not None:
                path = self.directory / "logs" / f"router-{index}.log"
                raise TwinpoolError(
                    "INTERNAL", f"router-{index} ended with {process.returncode}: {_tail(path)}"
                )

    def _stop_routers(self) -> None:
        for process in self._routers:
            if process.poll() is None:
                process.terminate()
        for process in self._routers:
            try:
                process.wait(ROUTER_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                log.warning("router_killed", pid=process.pid)
                process.kill()
                process.wait()


def _environment() -> dict[str, str]:
    """The parent's environment without Twinpool's own variables: the configuration is handed on whole."""
    return {key: value for key, value in os.environ.items() if not key.startswith("TWINPOOL_")}


def _tail(path: Path, lines: int = 3) -> str:
    with contextlib.suppress(OSError):
        return " | ".join(path.read_text(errors="replace").strip().splitlines()[-lines:])
    return ""


async def _unless(work: Awaitable[T], stopping: asyncio.Event) -> T:
    """Awaits ``work``; if ``stopping`` is set first, cancels it and raises CANCELLED."""
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise TwinpoolError("CANCELLED", "stopped before the cluster was up")
    finally:
        for pending in (task, stop):
            if not pending.done():
                pending.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)


async def _quietly(what: str, work: Awaitable[object]) -> None:
    started = time.monotonic()
    try:
        await work
    except Exception:
        log.exception("stop_failed", part=what)
    else:
        log.info("stopped", part=what, seconds=round(time.monotonic() - started, 3))


def _end_children() -> None:
    """Ends what is left: Ray's helpers outlive its shutdown by seconds."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    _, alive = psutil.wait_procs(children, timeout=CHILD_STOP_SECONDS)
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(alive, timeout=CHILD_STOP_SECONDS)
