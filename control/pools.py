# SPDX-License-Identifier: Apache-2.0
"""The pools: workers as Ray actors. Ray places them, restarts them and reports how they ended."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from twinpool.config import TwinpoolConfig, to_yaml
from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger

# What a worker's stop takes beyond the drain of its requests.
ACTOR_STOP_SECONDS = 15.0
HEAD_AWAY_SECONDS = 7 * 24 * 3600
"""How long Ray's processes wait for a head that is gone. Workers serve without it; only restarts need it."""
ROLES = ("prefill", "decode")
# Between two looks whether the name of an actor that was ended is free.
NAME_SECONDS = 0.05

log = get_logger(__name__)


class RayPools:
    """Runs the configured number of workers of each role. All methods on one event loop; Ray's calls run in a thread."""

    def __init__(self, config: TwinpoolConfig, log_dir: Path) -> None:
        """``log_dir``: each worker writes ``<name>.log`` there."""
        self._config = config
        self._log_dir = log_dir
        self._actors: dict[str, Any] = {}
        self._started: dict[str, asyncio.Future[Any]] = {}
        self._session_dir: str | None = None
        # One thread for Ray's blocking calls: a shutdown comes after a call that was cancelled but still runs.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray-calls")
        self._stopping = False

    @property
    def names(self) -> list[str]:
        """Names of the workers."""
        return sorted(self._actors)

    async def start(self) -> None:
        """Joins the configured Ray cluster or starts a local one."""
        await self._run(self._init)
        _restore_signals()

    async def _run(self, call: Callable[..., None], *arguments: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _init(self) -> None:
        # Set before the import: Ray reads them once.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray runs its workers at niceness 15: a model worker would yield to everything else on the machine.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # A lost head ends all of Ray after a minute by default, workers that serve included.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(HEAD_AWAY_SECONDS))
        import ray

        # Its notes on threads and tokens are for people who started Ray themselves.
        logging.getLogger("ray").setLevel(logging.ERROR)
        pools = self._config.pools
        if pools.ray_address:
            ray.init(
                address=pools.ray_address,
                namespace=self._namespace,
                log_to_driver=False,
                configure_logging=False,
            )
            return
        context: Any = ray.init(
            num_cpus=max(1, pools.prefill_workers + pools.decode_workers),
            include_dashboard=False,
            object_store_memory=pools.ray_object_store_bytes,
            namespace=self._namespace,
            log_to_driver=False,
            configure_logging=False,
        )
        self._session_dir = str(context.address_info["session_dir"])

    @property
    def _namespace(self) -> str:
        return f"twinpool-{self._config.cluster.name}"

    async def launch(self, without: frozenset[str] = frozenset()) -> None:
        """Creates the actors, but for those of the names ``without``; returns once all are on their way. Readiness shows in the
        store. A worker's name says in which role it begins; one that has changed it begins in the one that it had last."""
        pools = self._config.pools
        for role, count in zip(ROLES, (pools.prefill_workers, pools.decode_workers), strict=True):
            for index in range(count):
                name = f"{self._config.worker.pool}-{role}-{index}"
                if name not in without:
                    await self._run(self._create, role, name)
        log.info("workers_launched", workers=self.names)

    def _create(self, role: str, name: str) -> None:
        import ray

        if self._stopping:
            return

        from twinpool.worker.actor import WorkerActor

        worker = self._config.worker.model_copy(update={"name": name})
        text = to_yaml(self._config.model_copy(update={"worker": worker}))
        options: dict[str, Any] = {
            "name": name,
            "num_cpus": 1,
            "max_restarts": self._config.pools.max_restarts,
            "max_concurrency": 8,
        }
        if self._config.pools.ray_address:
            # Ray ends what a process owns with that process. Workers of a Ray that outlives this one outlive it too, and the
            # next one finds them by their names.
            options |= {"lifetime": "detached", "get_if_exists": True}
        log_file = str(self._log_dir / f"{name}.log")
        self._actors[name] = ray.remote(WorkerActor).options(**options).remote(text, role, log_file)

    def check(self) -> None:
        """Raises the error of a worker that could not start. Call it while waiting for readiness."""
        for name in list(self._actors):
            self.check_one(name)

    def check_one(self, name: str) -> None:
        """The same for one worker; nothing for one that is not run here."""
        actor = self._actors.get(name)
        if actor is None:
            return
        if name not in self._started:
            self._started[name] = asyncio.ensure_future(_call(actor.start.remote()))
        future = self._started[name]
        if future.done() and not future.cancelled() and (error := future.exception()) is not None:
            raise _cause(name, error)

    def manages(self, name: str) -> bool:
        """Whether a worker is run here."""
        return name in self._actors

    async def retire(self, name: str) -> None:
        """Ends a worker's process, without a drain, and does not start it again. Returns once its name is free."""
        import ray

        actor = self._actors.pop(name, None)
        started = self._started.pop(name, None)
        if started is not None:
            started.cancel()
            await asyncio.gather(started, return_exceptions=True)
        if actor is None:
            return
        with contextlib.suppress(Exception):  # it may be dead already
            await self._run(partial(ray.kill, actor, no_restart=True))
        while True:
            if not await asyncio.to_thread(_is_named, name):
                return
            await asyncio.sleep(NAME_SECONDS)

    async def add(self, role: str, name: str) -> None:
        """Starts a worker, unless it is run here already. One that nobody here has run before is not started."""
        if name not in self._actors and name in self._own_names():
            await self._run(self._create, role, name)

    def _own_names(self) -> set[str]:
        pools = self._config.pools
        counts = zip(ROLES, (pools.prefill_workers, pools.decode_workers), strict=True)
        return {f"{self._config.worker.pool}-{role}-{at}" for role, count in counts for at in range(count)}

    async def stop(self) -> None:
        """Stops every worker in order, then the local Ray."""
        self._stopping = True
        for future in self._started.values():
            future.cancel()
        await asyncio.gather(*self._started.values(), return_exceptions=True)
        await asyncio.gather(*(self._stop_actor(name, actor) for name, actor in self._actors.items()))
        self._actors.clear()
        await self._run(self._shutdown)
        self._thread.shutdown(wait=False)

    async def _stop_actor(self, name: str, actor: Any) -> None:
        import ray

        try:
            drain = self._config.worker.drain_timeout_seconds
            await asyncio.wait_for(_call(actor.stop.remote(drain)), drain + ACTOR_STOP_SECONDS)
        except Exception as error:  # the actor may be dead, restarting or stuck: it is killed either way
            log.warning("worker_stop_failed", worker=name, error=type(error).__name__)
        with contextlib.suppress(Exception):
            await self._run(partial(ray.kill, actor, no_restart=True))

    def _shutdown(self) -> None:
        import ray

        ray.shutdown()
        if self._session_dir is not None:
            shutil.rmtree(self._session_dir, ignore_errors=True)


def _restore_signals() -> None:
    """Puts this process's signal handlers back. Ray's own, set by its start, aborts the process 3 s after a SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if handler is not None:
            signal.signal(number, handler)
            signal.siginterrupt(number, False)


def _is_named(name: str) -> bool:
    """Whether Ray still knows an actor of the name."""
    import ray

    try:
        ray.get_actor(name)
    except ValueError:
        return False
    return True


async def _call(reference: Any) -> Any:
    return await reference


def _cause(name: str, error: BaseException) -> TwinpoolError:
    """What a worker's start raised; Ray wraps it."""
    cause: object = getattr(error, "cause", None)
    if isinstance(cause, TwinpoolError):
        return TwinpoolError(cause.reason, f"{name}: {cause.message}", metadata=cause.metadata)
    return TwinpoolError("INTERNAL", f"{name} could not start: {error}")
