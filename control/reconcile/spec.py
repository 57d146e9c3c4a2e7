# SPDX-License-Identifier: Apache-2.0
"""What pools shall be: one record a pool in etcd.

The configuration gives the bounds at every start, and the wanted numbers at the first one. Afterwards the record rules, until
the configuration says another number than it said when the record took it: that is a new wish, as is ``twinpool scale``.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from twinpool.config import TwinpoolConfig, pool_config, pool_names
from twinpool.control.reconcile.plan import ROLES
from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger
from twinpool.store import Keys, Store
from twinpool.v1 import control_pb2 as pb

TRIES: Final = 16
"""How often a change is tried that others come before."""

log = get_logger(__name__)


def role_spec(spec: pb.PoolSpec, role: str) -> pb.RoleSpec:
    """The part of a role, of which changes are changes of ``spec``."""
    return spec.prefill if role == "prefill" else spec.decode


def desired(spec: pb.PoolSpec) -> dict[str, int]:
    """Wanted workers a role."""
    return {role: role_spec(spec, role).desired for role in ROLES}


def configured(config: TwinpoolConfig) -> pb.PoolSpec:
    """What the configuration of a pool says of it."""
    spec = pb.PoolSpec(pool=config.worker.pool, auto=config.rebalance.auto, generation=1)
    for role in ROLES:
        least, most = config.pools.bounds(role)
        wanted = config.pools.workers(role)
        role_spec(spec, role).CopyFrom(pb.RoleSpec(desired=wanted, least=least, most=most, configured=wanted))
    return spec


def merged(record: pb.PoolSpec, config: TwinpoolConfig) -> pb.PoolSpec:
    """The record after a start with ``config``. Equal to ``record`` if nothing is new."""
    said, spec = configured(config), pb.PoolSpec()
    spec.CopyFrom(record)
    for role in ROLES:
        new, old = role_spec(said, role), role_spec(spec, role)
        wanted = new.desired if new.configured != old.configured else old.desired
        within = min(max(wanted, new.least), new.most)
        old.CopyFrom(pb.RoleSpec(desired=within, least=new.least, most=new.most, configured=new.configured))
    if spec != record:
        spec.generation += 1
    return spec


def resized(record: pb.PoolSpec, prefill: int, decode: int, key: str = "pools") -> pb.PoolSpec:
    """The record with other numbers. Equal to ``record`` if they are the same. ``key``: where the bounds are configured. Raises
    POOL_BOUNDS."""
    spec = pb.PoolSpec()
    spec.CopyFrom(record)
    for role, wanted in zip(ROLES, (prefill, decode), strict=True):
        part = role_spec(spec, role)
        if not part.least <= wanted <= part.most:
            raise TwinpoolError(
                "POOL_BOUNDS",
                f"{wanted} {role} workers of {record.pool} are not within {part.least} and {part.most} "
                f"({key}.{role}_least, {key}.{role}_most)",
            )
        part.desired = wanted
    if spec != record:
        spec.generation += 1
    return spec


class PoolSpecs:
    """The records, as the control process has read them last. On its event loop."""

    def __init__(self, store: Store, config: TwinpoolConfig) -> None:
        self._store = store
        self._config = config
        self._keys = Keys(config.cluster.name)
        self._known: dict[str, pb.PoolSpec] = {}

    def get(self, pool: str) -> pb.PoolSpec:
        """Raises POOL_NOT_FOUND."""
        if pool not in self._known:
            raise TwinpoolError("POOL_NOT_FOUND", f"there is no pool {pool[:64]!r}")
        return self._known[pool]

    def all(self) -> list[pb.PoolSpec]:
        """Ordered by name."""
        return [self._known[pool] for pool in sorted(self._known)]

    def resized(self, pool: str, prefill: int, decode: int) -> pb.PoolSpec:
        """The record of a pool with other numbers, not written yet. Raises POOL_NOT_FOUND, POOL_BOUNDS."""
        return resized(self.get(pool), prefill, decode, self.key(pool))

    async def load(self) -> list[str]:
        """Reads the records of the configured pools and takes what is new in the configuration into them. Those that were changed.
        Raises STORE_UNAVAILABLE."""
        pools = pool_names(self._config)
        return [pool for pool in pools if await self._load(pool, pool_config(self._config, pool))]

    async def _load(self, pool: str, config: TwinpoolConfig) -> bool:
        before = None
        for _ in range(TRIES):
            item = await asyncio.to_thread(self._store.get, self._keys.pool(pool))
            before = None if item is None else _parsed(item.value, pool)
            spec = configured(config) if before is None else merged(before, config)
            if before is not None and spec == before:
                self._known[pool] = spec
                return False
            if await self._write(spec, None if item is None else item.mod_revision):
                log.info("pool_spec_written", pool=pool, **desired(spec), generation=spec.generation)
                return True
        raise TwinpoolError("STORE_UNAVAILABLE", f"the record of {pool} changes all the time")

    async def refresh(self, pool: str) -> pb.PoolSpec:
        """Reads the record of a pool, and puts it again if etcd has lost it. Raises POOL_NOT_FOUND, STORE_UNAVAILABLE."""
        item = await asyncio.to_thread(self._store.get, self._keys.pool(pool))
        spec, known = None if item is None else _parsed(item.value, pool), self.get(pool)
        if spec is None:
            await self._write(known, None if item is None else item.mod_revision)
        # While it was read, a newer one may have been written here.
        elif spec.generation >= known.generation:
            self._known[pool] = spec
        return self.get(pool)

    async def resize(self, pool: str, prefill: int, decode: int) -> pb.PoolSpec:
        """Writes other numbers of workers. The same again changes nothing, so a step that was interrupted may do it again.

        Raises POOL_NOT_FOUND, POOL_BOUNDS, STORE_UNAVAILABLE."""
        key = self.key(pool)
        return await self.change(pool, lambda record: resized(record, prefill, decode, key))

    async def set_auto(self, pool: str, auto: bool) -> pb.PoolSpec:
        """Writes whether the split between the roles is changed without being asked for. Raises as ``resize``."""

        def change(record: pb.PoolSpec) -> pb.PoolSpec:
            spec = pb.PoolSpec()
            spec.CopyFrom(record)
            if spec.auto != auto:
                spec.auto = auto
                spec.generation += 1
            return spec

        return await self.change(pool, change)

    def key(self, pool: str) -> str:
        """Where a pool is configured."""
        return "pools" if pool == self._config.worker.pool else f"pools.further.{pool}"

    async def change(self, pool: str, change: Callable[[pb.PoolSpec], pb.PoolSpec]) -> pb.PoolSpec:
        """Writes what ``change`` makes of the record, which it must not touch; unless it is the same. ``change`` is called again if
        somebody else has written meanwhile.

        Raises POOL_NOT_FOUND, STORE_UNAVAILABLE, and what ``change`` raises."""
        for _ in range(TRIES):
            item = await asyncio.to_thread(self._store.get, self._keys.pool(pool))
            record = None if item is None else _parsed(item.value, pool)
            spec = change(record or self.get(pool))
            if spec == record:
                self._known[pool] = spec
                return spec
            if await self._write(spec, None if item is None else item.mod_revision):
                return spec
        raise TwinpoolError("STORE_UNAVAILABLE", f"the record of {pool} changes all the time")

    async def _write(self, spec: pb.PoolSpec, revision: int | None) -> bool:
        """Unless somebody has written since."""
        key, value = self._keys.pool(spec.pool), spec.SerializeToString(deterministic=True)
        if revision is None:
            done = await asyncio.to_thread(self._store.create, key, value)
        else:
            done = await asyncio.to_thread(self._store.replace, key, value, revision)
        if done:
            self._known[spec.pool] = spec
        return done


def _parsed(value: bytes, pool: str) -> pb.PoolSpec | None:
    """A record that makes sense; another one counts as none."""
    try:
        spec = pb.PoolSpec.FromString(value)
    except Exception:
        spec = pb.PoolSpec()
    if spec.pool != pool or spec.generation == 0:
        log.warning("invalid_pool_spec", pool=pool)
        return None
    return spec
