# SPDX-License-Identifier: Apache-2.0
"""A worker as a process of its own."""

import asyncio
import contextlib
import os
from typing import Final

from twinpool import logs, rpc
from twinpool.config import TwinpoolConfig
from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger
from twinpool.transfer.base import TransferError
from twinpool.worker.host import WorkerHost

EXIT_FAILED: Final = 1
"""The worker could not start, or could not go on."""

log = get_logger(__name__)


def run_worker(config: TwinpoolConfig, role: str) -> int:
    """Runs a worker in the foreground until SIGINT or SIGTERM. Returns the exit status: 0 after a clean stop."""
    logs.setup(config.log.level, config.log.as_json)
    return rpc.run(_run(config, role))


async def _run(config: TwinpoolConfig, role: str) -> int:
    stopping = rpc.stop_event()
    try:
        host = WorkerHost(config, role, os._exit)
        logs.bind_context(worker=host.key.name)
        if not await _unless(stopping, host):
            return 0
    except (TwinpoolError, TransferError, ImportError) as error:
        # Named, and without a traceback: the operator's mistake, not ours.
        reason = error.reason if isinstance(error, TwinpoolError) else type(error).__name__
        log.error("worker_not_started", reason=reason, detail=str(error))
        return EXIT_FAILED
    failure = asyncio.ensure_future(host.failure())
    stop = asyncio.ensure_future(stopping.wait())
    leave = asyncio.ensure_future(host.asked_to_leave())
    await asyncio.wait({failure, stop, leave}, return_when=asyncio.FIRST_COMPLETED)
    failed = failure.done()
    seconds = leave.result() if leave.done() else None
    for waiting in (failure, stop, leave):
        waiting.cancel()
    await host.stop(seconds)
    return EXIT_FAILED if failed else 0


async def _unless(stopping: asyncio.Event, host: WorkerHost) -> bool:
    """Starts the worker; a signal meanwhile ends the start. Whether it is ready."""
    starting = asyncio.ensure_future(host.start())
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not starting.done():
        log.info("worker_start_interrupted")
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return False
    starting.result()
    return True
