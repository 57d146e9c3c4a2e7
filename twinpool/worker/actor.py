# SPDX-License-Identifier: Apache-2.0
"""A worker inside a Ray actor. Ray places and restarts it; requests never pass through Ray.

The worker starts with the actor, not with the first call: after a crash Ray makes the actor anew and calls nobody, and
the new one has to serve under a new incarnation all the same.
"""

import asyncio
import contextlib
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import yaml

from twinpool import logs, rpc
from twinpool.config import TwinpoolConfig, load_config
from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger
from twinpool.worker.host import Failure, WorkerHost
from twinpool.worker.leave import asked_at, directory

EXIT_FAILED: Final = 1
"""Exit status of an actor whose worker can't go on: Ray starts it anew as often as it is allowed to."""

STOP_SECONDS: Final = 60.0
"""Longest wait for the worker's thread after it was told to stop."""

log = get_logger(__name__)


class HostThread:
    """A WorkerHost with a thread and an event loop of its own, so that Ray's loop never waits for the worker's."""

    def __init__(
        self, config: TwinpoolConfig, role: str, *, owns_process: bool = False, leave_at: Path | None = None
    ) -> None:
        """``owns_process``: whether an event loop of it that stands still ends the process. ``leave_at``: the socket on which its
        node may ask it to leave."""
        self._leave_at = leave_at
        self._config = config
        self._role = role
        self._owns_process = owns_process
        self._ready: Future[dict[str, object]] = Future()
        self._host: WorkerHost | None = None
        self._aio: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._drain_seconds: float | None = None
        self._stop_wanted = False
        self.failure: Failure | None = None
        self._thread = threading.Thread(target=self._main, name="twinpool-worker", daemon=True)

    def start(self) -> None:
        """Begins to start the worker."""
        self._thread.start()

    @property
    def ready(self) -> "Future[dict[str, object]]":
        """Done when the worker is ready, with its health; or with why it could not start (a TwinpoolError)."""
        return self._ready

    def health(self) -> dict[str, object]:
        """The worker's health; a worker that has not started is not ready."""
        host = self._host
        return {"ready": False} if host is None else host.health()

    def stop(self, drain_seconds: float | None, timeout: float = STOP_SECONDS) -> bool:
        """Drains and ends the worker; whether its thread has ended."""
        self._drain_seconds = drain_seconds
        self._stop_wanted = True
        loop, stopping = self._aio, self._stopping
        if loop is not None and stopping is not None and self._thread.is_alive():
            # RuntimeError: it has just ended by itself.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stopping.set)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            rpc.run(self._run())
        except BaseException as error:
            log.exception("worker_thread_failed")
            self._settle(error)

    async def _run(self) -> None:
        self._aio, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        if self._stop_wanted:
            # Told to stop before there was an event to set.
            self._stopping.set()
        async with asked_at(self._leave_at, self._stopping.set):
            await self._serve(self._stopping)

    async def _serve(self, told: asyncio.Event) -> None:
        host = WorkerHost(self._config, self._role, os._exit if self._owns_process else None)
        logs.bind_context(worker=host.key.name)
        starting = asyncio.ensure_future(host.start())
        stopping = asyncio.ensure_future(told.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
        try:
            await starting
        except BaseException as error:
            log.error("worker_not_started", type=type(error).__name__, detail=str(error))
            stopping.cancel()
            self._settle(error)
            return
        self._host = host
        self._ready.set_result(host.health())
        failing = asyncio.ensure_future(host.failure())
        leaving = asyncio.ensure_future(host.asked_to_leave())
        await asyncio.wait({failing, stopping, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            self.failure = failing.result()
        seconds = leaving.result() if leaving.done() else self._drain_seconds
        for waiting in (failing, stopping, leaving):
            waiting.cancel()
        await host.stop(seconds)
        if self.failure is not None and not self.failure.superseded:
            os._exit(EXIT_FAILED)

    def _settle(self, error: BaseException) -> None:
        if self._ready.done():
            return
        if not isinstance(error, TwinpoolError):
            # Ray pickles it; other exceptions may not survive that.
            reason = "CANCELLED" if isinstance(error, asyncio.CancelledError) else "INTERNAL"
            error = TwinpoolError(reason, f"{type(error).__name__}: {error}")
        self._ready.set_exception(error)


class WorkerActor:
    """The actor's class; wrap it with ``ray.remote``. Its methods are coroutines, so that calls never queue up."""

    def __init__(self, config_yaml: str, role: str, log_file: str = "", from_node: bool = False) -> None:
        """``config_yaml``: the whole configuration; neither file nor environment of this host changes it. With ``from_node`` it goes
        over these instead. ``log_file``: appended to; empty logs to stderr, which Ray keeps."""
        config = load_config(None, yaml.safe_load(config_yaml) or {}, env=None if from_node else {})
        stream = Path(log_file).open("a", buffering=1, encoding="utf-8") if log_file else None  # noqa: SIM115
        logs.setup(config.log.level, config.log.as_json, stream)
        leave_at = directory() / f"{config.worker.name}.sock" if from_node else None
        self._thread = HostThread(config, role, owns_process=True, leave_at=leave_at)
        self._thread.start()
        if _reconstructed():
            # Nobody asks an actor that Ray has made anew whether it could start.
            self._thread.ready.add_done_callback(_exit_on_error)

    async def start(self) -> dict[str, object]:
        """Returns the worker's health (worker, incarnation, endpoint ...) once it is ready. Raises TwinpoolError."""
        return await asyncio.shield(asyncio.wrap_future(self._thread.ready))

    async def health(self) -> dict[str, object]:
        """Identity, readiness, and how long ago the step loop last turned."""
        return self._thread.health()

    async def stop(self, drain_seconds: float | None = None) -> bool:
        """Drains for at most ``drain_seconds`` (None: as configured) and ends the worker; the actor stays for ``kill``.
        Whether all of it ended. Idempotent."""
        return await asyncio.to_thread(self._thread.stop, drain_seconds)


def _reconstructed() -> bool:
    import ray

    return bool(ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed)


def _exit_on_error(ready: "Future[Any]") -> None:
    if not ready.cancelled() and ready.exception() is not None:
        os._exit(EXIT_FAILED)
