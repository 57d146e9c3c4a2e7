# SPDX-License-Identifier: Apache-2.0
"""The control process of a cluster whose etcd runs elsewhere: the pools through Ray, and the ControlService."""

import asyncio
import contextlib
import tempfile
from functools import partial
from pathlib import Path

from twinpool import logs, rpc
from twinpool.config import TwinpoolConfig
from twinpool.control.console.server import Console
from twinpool.control.operations import Operations
from twinpool.control.overview.collect import Collector
from twinpool.control.pools import RayPools
from twinpool.control.service import ControlServer
from twinpool.control.view import ClusterView
from twinpool.errors import TwinpoolError
from twinpool.rpc import channel, stop_event
from twinpool.store import connect_store

log = logs.get_logger(__name__)


def run(config: TwinpoolConfig) -> int:
    """Runs until SIGINT or SIGTERM; returns the exit code."""
    logs.setup(config.log.level, config.log.as_json)
    return rpc.run(_control(config))


async def _control(config: TwinpoolConfig) -> int:
    stopping = stop_event()
    store = await asyncio.to_thread(connect_store, config.cluster)
    view = ClusterView(store, config)
    pools = RayPools(config, Path(tempfile.gettempdir()))
    operations = Operations(
        store, config, view, pools, partial(channel, config=config.rpc, tls=config.tls, role="worker")
    )
    collector = Collector(config, view, operations.all)
    server = ControlServer(config, view, operations, collector)
    console = Console(config, collector, operations.all) if config.control.http_port >= 0 else None
    try:
        await view.start()
        if not await _loaded(operations, stopping):
            return 0
        await pools.start()
        await pools.launch(operations.retired)
        operations.resume()
        await server.start()
        if console is not None:
            await console.start()
        log.info("control_serving", endpoint=server.endpoint, console=console.url if console else "")
        while not stopping.is_set():
            pools.check()
            try:
                await asyncio.wait_for(stopping.wait(), timeout=1.0)
            except TimeoutError:
                continue
        return 0
    finally:
        if console is not None:
            await console.stop()
        await server.stop()
        await collector.close()
        await operations.stop()
        await pools.stop()
        await view.stop()
        await asyncio.to_thread(store.close)


async def _loaded(operations: Operations, stopping: asyncio.Event) -> bool:
    """Reads the operations, however long etcd is away: without them a worker that was drained for good would be started.
    False if the process is told to stop meanwhile."""
    while not stopping.is_set():
        try:
            await operations.load()
            return True
        except TwinpoolError as error:
            log.warning("waiting_for_store", reason=error.reason)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), timeout=1.0)
    return False
