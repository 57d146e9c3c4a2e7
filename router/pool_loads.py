# SPDX-License-Identifier: Apache-2.0
"""How many requests of each pool wait and run on this router."""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Final

import prometheus_client

from twinpool import metrics
from twinpool._core import RouterCore
from twinpool.router.recent import PoolModel
from twinpool.router.request import Prepared

POOLS_MAX: Final = 1024
"""Most pairs of pool and model that are remembered; those without a request go first."""


@cache
def _accepted(pool: str, model: str) -> prometheus_client.Counter:
    """The counter of a pool's and model's requests. Looking it up by its labels costs more than counting does."""
    return metrics.ROUTER_POOL_REQUESTS.labels(pool, model)


@dataclass(slots=True)
class PoolLoad:
    """Of one pool and model. ``queued_tokens``: prompt tokens of the requests that wait."""

    queued: int = 0
    queued_tokens: int = 0
    running: int = 0


class PoolLoads:
    """One a router. On its event loop."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._labels: dict[int, str] = {}
        self._active: Counter[str] = Counter()
        # What the core calls a pool says more than pool and model.
        self._known: dict[str, PoolModel] = {}
        self._shown: set[PoolModel] = set()

    def began(self, request: int, prepared: Prepared) -> None:
        """The core has accepted a request."""
        group = prepared.group
        self._labels[request] = group.label
        self._active[group.label] += 1
        self._known[group.label] = (group.pool, group.model)
        _accepted(group.pool, group.model).inc()

    def ended(self, request: int) -> None:
        """The core forgets a request."""
        label = self._labels.pop(request, None)
        if label is not None:
            self._active[label] -= 1

    def loads(self) -> dict[PoolModel, PoolLoad]:
        """By pool and model, those that had a request since the start."""
        queues = self._core.queues()
        found: dict[PoolModel, PoolLoad] = {}
        for label, key in self._known.items():
            load = found.setdefault(key, PoolLoad())
            queued, tokens = queues.get(label, (0, 0))
            load.queued += queued
            load.queued_tokens += tokens
            load.running += max(0, self._active[label] - queued)
        if len(self._known) > POOLS_MAX:
            self._known = {label: key for label, key in self._known.items() if self._active[label]}
        return dict(sorted(found.items()))

    def show(self) -> None:
        """Sets the gauges."""
        loads = self.loads()
        for key in self._shown - set(loads):
            for gauge in (
                metrics.ROUTER_POOL_RUNNING,
                metrics.ROUTER_POOL_WAITING,
                metrics.ROUTER_POOL_QUEUE_TOKENS,
            ):
                gauge.remove(*key)
        self._shown = set(loads)
        for key, load in loads.items():
            metrics.ROUTER_POOL_RUNNING.labels(*key).set(load.running)
            metrics.ROUTER_POOL_WAITING.labels(*key).set(load.queued)
            metrics.ROUTER_POOL_QUEUE_TOKENS.labels(*key).set(load.queued_tokens)
