# SPDX-License-Identifier: Apache-2.0
"""The control process of a cluster whose etcd runs elsewhere. Several of them may run: one leads, the others stand by."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from twinpool import logs, metrics, rpc
from twinpool.config import TwinpoolConfig
from twinpool.control.controller import Controller
from twinpool.rpc import stop_event
from twinpool.store import connect_store

log = logs.get_logger(__name__)


def run(config: TwinpoolConfig) -> int:
    """Runs until SIGINT or SIGTERM; returns the exit code."""
    logs.setup(config.log.level, config.log.as_json)
    return rpc.run(_control(config))


async def _control(config: TwinpoolConfig) -> int:
    stopping = stop_event()
    metrics_endpoint = ""
    if config.metrics.enabled:
        port = metrics.start_http(config.metrics.host, config.metrics.port)
        metrics_endpoint = rpc.join_address(config.metrics.host, port)
    store = await asyncio.to_thread(connect_store, config.cluster)
    controller = Controller(config, store, Path(tempfile.gettempdir()))
    told: asyncio.Future[Any] = asyncio.ensure_future(stopping.wait())
    try:
        await controller.start()
        log.info(
            "control_serving",
            endpoint=controller.endpoint,
            console=controller.console_url,
            metrics=metrics_endpoint,
        )
        await asyncio.wait([told, controller.failed], return_when=asyncio.FIRST_COMPLETED)
        if controller.failed.done():
            raise controller.failed.result()
        return 0
    finally:
        told.cancel()
        await controller.stop()
        await asyncio.to_thread(store.close)
