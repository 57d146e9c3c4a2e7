# SPDX-License-Identifier: Apache-2.0
"""Control processes in this process, over a real store and the workers of a test's own site."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.tcp_proxy import TcpProxy
from tests.support.thread_pools import Site, ThreadPools
from tests.support.waiting import until
from twinpool.config import TwinpoolConfig
from twinpool.control.controller import Controller
from twinpool.control.reconcile.loop import Reconciler
from twinpool.store import StoreServer, connect_store
from twinpool.v1 import control_pb2 as pb

TTL_SECONDS = 2
"""Life of leases."""


class Control:
    """A control process with a way of its own to the store, which can be cut."""

    def __init__(self, server: StoreServer, site: Site, **pools: object) -> None:
        self.proxy = TcpProxy(server.endpoint)
        self.config = TwinpoolConfig.model_validate(
            {
                "cluster": {
                    "name": site.cluster,
                    "etcd_endpoints": [self.proxy.endpoint],
                    "lease_ttl_seconds": TTL_SECONDS,
                },
                "pools": {"start_timeout_seconds": 60} | pools,
            }
        )
        self.store = connect_store(self.config.cluster)
        self.controller = Controller(
            self.config, self.store, Path(), lambda config: ThreadPools(config, site)
        )

    @property
    def reconciler(self) -> Reconciler:
        """That of the default pool."""
        return self.controller.reconcilers["default"]

    async def start(self, *, leads: bool = True) -> Control:
        await self.controller.start()
        if leads:
            await self.controller.wait_leading()
        return self

    async def stop(self) -> None:
        await self.controller.stop()
        await asyncio.to_thread(self.store.close)
        self.proxy.close()

    async def die(self) -> None:
        """Ends without a word to the store."""
        self.proxy.cut()
        await self.stop()

    async def scale(
        self, prefill: int | None, decode: int | None, pool: str = "default", **more: object
    ) -> pb.Operation:
        return await self.controller.scaling.begin(pool, prefill, decode, **more)  # type: ignore[arg-type]

    async def settled(self) -> None:
        every = self.controller.reconcilers.values()
        await until(lambda: all(each.turns and each.settled() for each in every))

    def status(self, pool: str = "default") -> dict[str, int]:
        status = self.controller.reconcilers[pool].status()
        return {replica.worker: replica.phase for replica in status.replicas}

    def reasons(self) -> list[str]:
        return [event.reason for event in self.controller.events.all()]

    async def tells(self, reason: str) -> pb.Event:
        await until(lambda: reason in self.reasons())
        return next(event for event in self.controller.events.all() if event.reason == reason)
