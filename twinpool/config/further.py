# SPDX-License-Identifier: Apache-2.0
"""Several pools of one cluster: which there are, and the configuration as the processes of one of them see it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from twinpool.config.pools import PoolKeys

if TYPE_CHECKING:
    from twinpool.config.model import TwinpoolConfig

OVERLAID: Final = ("model", "kv", "scheduler", "transfer", "worker")
"""Sections of which a further pool may have keys of its own."""

_NOT_OVERLAID: Final = frozenset({"name", "pool"})


def pool_names(config: TwinpoolConfig) -> list[str]:
    """The pools of a control process, that of ``worker.pool`` first. That one is left out if it wants no worker while there are
    others."""
    further = sorted(config.pools.further)
    return [config.worker.pool, *further] if config.pools.managed or not further else further


def pool_keys(config: TwinpoolConfig, pool: str) -> PoolKeys | None:
    """What is configured of a pool; None: nothing."""
    return config.pools if pool == config.worker.pool else config.pools.further.get(pool)


def pool_config(config: TwinpoolConfig, pool: str) -> TwinpoolConfig:
    """The configuration as the processes of one pool see it: a cluster with no other pool. Raises KeyError for an unknown one, and
    ValidationError where its own keys do not fit the shared ones."""
    if pool == config.worker.pool:
        return config.model_copy(update={"pools": config.pools.model_copy(update={"further": {}})})
    own = config.pools.further[pool]
    data: dict[str, Any] = config.model_dump()
    for section in OVERLAID:
        data[section] |= getattr(own, section)
    if "path" in own.model and "name" not in own.model:
        # The shared name is that of the shared path.
        data["model"]["name"] = ""
    data["worker"]["pool"] = pool
    data["pools"] |= {name: getattr(own, name) for name in PoolKeys.model_fields} | {"further": {}}
    # ``config`` may be one that follows what is applied; and its class is made with this module's help.
    from twinpool.config.model import TwinpoolConfig

    return TwinpoolConfig.model_validate(data)


def served_pools(config: TwinpoolConfig) -> list[str]:
    """The pools whose workers answer a router's clients."""
    router = config.router
    return list(router.pools) or [router.pool, *sorted(set(config.pools.further) - {router.pool})]


def served_name(config: TwinpoolConfig) -> str:
    """How clients call the model of a pool's configuration; "": it is not known here."""
    return config.model.name or Path(config.model.path).name


def further_rules(config: TwinpoolConfig) -> Iterator[str]:
    """What is wrong with the further pools; each message starts with the key at fault."""
    for pool, own in config.pools.further.items():
        key = f"pools.further.{pool}"
        if pool == config.worker.pool:
            yield f"{key}: is the pool of worker.pool, whose keys are those of pools itself"
            continue
        if found := _NOT_OVERLAID & set(own.worker):
            yield f"{key}.worker.{min(found)}: cannot be set for a pool"
            continue
        try:
            pool_config(config, pool)
        except ValidationError as error:
            for fault in error.errors(include_url=False):
                text = fault["msg"].removeprefix("Value error, ")
                if fault["loc"]:
                    text = f"{'.'.join(str(part) for part in fault['loc'])}: {text}"
                yield f"{key}.{text.removeprefix('pools.')}"
