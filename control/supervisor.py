# SPDX-License-Identifier: Apache-2.0
"""The process behind ``twinpool up``: runs a local cluster until it is told to stop, and publishes where it listens."""

import argparse
import asyncio
import faulthandler
import json
import os
import signal
import sys
from pathlib import Path

import psutil

from twinpool import logs, metrics
from twinpool.config import TwinpoolConfig, load_config
from twinpool.control import state
from twinpool.control.local import LocalCluster
from twinpool.errors import TwinpoolError, as_twinpool_error
from twinpool.rpc import join_address, run, stop_event

log = logs.get_logger(__name__)


def main() -> int:
    """Entry point of ``python -m twinpool.control.supervisor``; the configuration comes by the environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--embedded-store", action="store_true")
    parser.add_argument(
        "--with-parent", action="store_true", help="stop when the process that started this one ends"
    )
    arguments = parser.parse_args()
    config = load_config()
    logs.setup(config.log.level, config.log.as_json)
    # `kill -USR1` writes every thread's stack to the log: the way to see where a stuck cluster waits.
    faulthandler.register(signal.SIGUSR1)
    return run(_supervise(config, arguments.embedded_store, arguments.with_parent))


async def _supervise(config: TwinpoolConfig, embedded_store: bool, with_parent: bool) -> int:
    stopping = stop_event()
    if with_parent:
        _stop_with_parent(stopping)
    directory = state.directory(config.cluster.name)
    cluster = LocalCluster(config, directory, embedded_store=embedded_store)
    metrics_endpoint = ""
    try:
        if config.metrics.enabled:
            # Of the control process, which this one is; workers and routers have their own.
            port = metrics.start_http(config.metrics.host)
            metrics_endpoint = join_address(config.metrics.host, port)
        await cluster.start(lambda name, detail: _progress(directory, name, detail), stopping)
        state.write(_state(config, cluster, metrics_endpoint))
        log.info("cluster_up", routers=cluster.router_endpoints, control=cluster.control_endpoint)
        await stopping.wait()
        return 0
    except Exception as error:
        known = as_twinpool_error(error)
        log.exception("cluster_failed", reason=known.reason)
        _failure(directory, known)
        return 1
    finally:
        await cluster.stop()
        state.remove(config.cluster.name)


def _stop_with_parent(stopping: asyncio.Event) -> None:
    """A killed test or script can't stop its cluster; the end of its process does."""
    loop = asyncio.get_running_loop()
    parent = os.pidfd_open(os.getppid())

    def gone() -> None:
        loop.remove_reader(parent)
        os.close(parent)
        stopping.set()

    loop.add_reader(parent, gone)


def _state(config: TwinpoolConfig, cluster: LocalCluster, metrics_endpoint: str) -> state.LocalState:
    process = psutil.Process()
    return state.LocalState(
        cluster=config.cluster.name,
        pid=process.pid,
        started_at=process.create_time(),
        model=config.model.name or Path(config.model.path).name,
        store_kind=cluster.store_kind,
        store_endpoint=cluster.store_endpoint,
        control_endpoint=cluster.control_endpoint,
        router_endpoints=cluster.router_endpoints,
        http_endpoints=cluster.http_endpoints,
        console_url=cluster.console_url,
        metrics_endpoint=metrics_endpoint,
        tls=config.tls.model_dump() if config.tls.enabled else {},
    )


def _progress(directory: Path, name: str, detail: str) -> None:
    (directory / "progress.json").write_text(json.dumps({"stage": name, "detail": detail}))


def _failure(directory: Path, error: TwinpoolError) -> None:
    (directory / "progress.json").write_text(json.dumps({"error": error.message, "reason": error.reason}))


if __name__ == "__main__":
    sys.exit(main())
