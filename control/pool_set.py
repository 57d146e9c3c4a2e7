# SPDX-License-Identifier: Apache-2.0
"""The pools of a control process, for whoever knows a worker by its name alone."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from twinpool.config import TwinpoolConfig, pool_config, pool_names
from twinpool.control.pools import RayPools
from twinpool.control.ray_join import RayJoin
from twinpool.control.reconcile.plan import first_role
from twinpool.errors import TwinpoolError

MakePool = Callable[[TwinpoolConfig], RayPools]


class PoolSet(Mapping[str, RayPools]):
    """By a pool's name, who runs its workers. A worker's name says which pool it is of. Implements ``leaves.Pools``."""

    def __init__(self, config: TwinpoolConfig, log_dir: Path, make: MakePool | None = None) -> None:
        """``make``: who runs the workers of the pool of a configuration, if not Ray."""
        ray = RayJoin(config)
        self.configs = {pool: pool_config(config, pool) for pool in pool_names(config)}
        """The configuration of each pool as its processes see it."""
        self._pools = {
            pool: make(own) if make is not None else RayPools(own, log_dir, ray)
            for pool, own in self.configs.items()
        }

    def __getitem__(self, pool: str) -> RayPools:
        return self._pools[pool]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pools)

    def __len__(self) -> int:
        return len(self._pools)

    @property
    def managed(self) -> frozenset[str]:
        """Pools whose workers are run here."""
        return frozenset(pool for pool, pools in self._pools.items() if pools.managed)

    @property
    def names(self) -> list[str]:
        """Names of all workers that are run here."""
        return sorted(name for pools in self._pools.values() for name in pools.names)

    def of(self, worker: str) -> RayPools | None:
        """Who runs a worker of that name; None: nobody here."""
        for pool, pools in self._pools.items():
            if first_role(pool, worker) is not None:
                return pools
        return None

    # --- leaves.Pools

    def manages(self, name: str) -> bool:
        """Whether a worker's process is run here."""
        pools = self.of(name)
        return pools is not None and pools.manages(name)

    async def retire(self, name: str) -> None:
        """See ``RayPools.retire``."""
        if (pools := self.of(name)) is not None:
            await pools.retire(name)

    async def add(self, role: str, name: str) -> None:
        """See ``RayPools.add``."""
        if (pools := self.of(name)) is not None:
            await pools.add(role, name)

    def check_one(self, name: str) -> None:
        """See ``RayPools.check_one``."""
        if (pools := self.of(name)) is not None:
            pools.check_one(name)

    def log_lines(self, name: str) -> list[str]:
        """See ``RayPools.log_lines``."""
        pools = self.of(name)
        return [] if pools is None else pools.log_lines(name)

    def note_role(self, name: str, role: str) -> None:
        """See ``RayPools.note_role``."""
        if (pools := self.of(name)) is not None:
            pools.note_role(name, role)

    # --- life

    async def start(self) -> None:
        """Joins Ray, for the pools whose workers are run here. Raises what Ray says."""
        for pools in self._pools.values():
            await pools.start()

    async def adopt(self) -> None:
        """See ``RayPools.adopt``."""
        await asyncio.gather(*(pools.adopt() for pools in self._pools.values()))

    async def disown(self) -> None:
        """See ``RayPools.disown``."""
        await asyncio.gather(*(pools.disown() for pools in self._pools.values()))

    async def stop(self) -> None:
        """See ``RayPools.stop``. All pools at the same time."""
        await asyncio.gather(*(pools.stop() for pools in self._pools.values()))

    def check(self, pool: str) -> None:
        """Raises POOL_NOT_MANAGED for a pool whose workers are not run here."""
        if pool not in self.managed:
            raise TwinpoolError("POOL_NOT_MANAGED", f"the workers of {pool} are not run here")
