# SPDX-License-Identifier: Apache-2.0
"""The Ray cluster that the pools of a control process share: joined or started by the first, left by the last."""

import asyncio
import logging
import math
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from twinpool import logs
from twinpool.config import PoolKeys, TwinpoolConfig, pool_keys, pool_names
from twinpool.control.reconcile.plan import ROLES

HEAD_AWAY_SECONDS: Final = 7 * 24 * 3600
"""How long Ray's processes wait for a head that is gone. Workers serve without it; only restarts need it."""


class RayJoin:
    """One a control process. On its event loop."""

    def __init__(self, config: TwinpoolConfig) -> None:
        """``config``: with all pools."""
        self._config = config
        self._users = 0
        self._session_dir: str | None = None
        # Ray's processes are told to end with the thread that started them, so it lives as long as they are needed.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray-join")

    async def join(self) -> None:
        """Joins the configured Ray cluster, or starts a local one, unless another pool has done so. What it raises leaves it to the
        next one to try."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._join)
        restore_signals()

    async def leave(self) -> None:
        """The last one that leaves ends what the first one has begun."""
        if await asyncio.get_running_loop().run_in_executor(self._thread, self._leave):
            self._thread.shutdown(wait=False)

    def _join(self) -> None:
        if not self._users:
            self._init()
        self._users += 1

    def _leave(self) -> bool:
        import ray

        self._users -= 1
        if self._users:
            return False
        ray.shutdown()
        if self._session_dir is not None:
            shutil.rmtree(self._session_dir, ignore_errors=True)
        return True

    def _init(self) -> None:
        # Set before the import: Ray reads them once.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray runs its workers at niceness 15: a model worker would yield to everything else on the machine.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # A lost head ends all of Ray after a minute by default, workers that serve included.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(HEAD_AWAY_SECONDS))
        import ray

        logs.adopt("ray")
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
            num_cpus=_local_cpus(self._config),
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


def needs_of(pool: PoolKeys, joined: bool, role: str) -> dict[str, float]:
    """What Ray has to find for a worker of a role. ``joined``: whether others use the Ray cluster, too."""
    default = {"CPU": 1.0} if joined else {}
    return pool.resources(role) or default


def _local_cpus(config: TwinpoolConfig) -> int:
    """Of a local Ray: enough for what is configured. It also starts so many processes in advance."""
    asked, workers = 0.0, 0
    for name in pool_names(config):
        keys = pool_keys(config, name)
        assert keys is not None
        workers += sum(keys.workers(role) for role in ROLES)
        asked += sum(needs_of(keys, False, role).get("CPU", 0.0) * keys.workers(role) for role in ROLES)
    return max(1, workers, math.ceil(asked))


def restore_signals() -> None:
    """Puts this process's signal handlers back. Ray's own, set by its start, aborts the process 3 s after a SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if handler is not None:
            signal.signal(number, handler)
            signal.siginterrupt(number, False)
