# SPDX-License-Identifier: Apache-2.0
"""``LocalityDegraded``: the index is not to be trusted, and why."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from twinpool import metrics
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.router.index.status import WorkerLocality

log = get_logger(__name__)

RESYNC_GRACE_SECONDS: Final = 5.0
"""A worker may be out of step for so long: a gap is closed within milliseconds, a start within seconds."""

ERROR_LIMIT: Final = 0.1
"""Share of the prompts' tokens by which prediction may be off, on average."""

ERROR_WEIGHT: Final = 0.05
"""Weight of the last request in that average: some twenty requests."""

ERROR_SAMPLES_MIN: Final = 20
FULL_SECONDS: Final = 60.0
"""How long after its last eviction the index counts as full."""

NAMES_SHOWN: Final = 5

CAUSES: Final = (
    "unreachable",
    "resyncing",
    "no_event_stream",
    "prediction_error",
    "index_full",
    "store_lost",
)


@dataclass(frozen=True, slots=True)
class Degradation:
    """One cause, with its particulars in words."""

    cause: str
    detail: str


class LocalityCondition:
    """Causes: "unreachable" (workers do not answer), "resyncing" (workers are out of step for long), "no_event_stream"
    (workers publish none), "prediction_error" (workers find other than what was predicted), "index_full" (the index has
    forgotten blocks for lack of memory), "store_lost" (etcd is gone while a worker can only be known from there)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.error = 0.0
        """Mean absolute error of prediction, as a share of the prompt."""
        self.samples = 0
        self.causes: tuple[Degradation, ...] = ()
        self._out_since: dict[WorkerKey, float] = {}
        self._evicted = 0
        self._evicted_at = float("-inf")
        for cause in CAUSES:
            metrics.ROUTER_LOCALITY_DEGRADED.labels(cause).set(0)

    @property
    def degraded(self) -> bool:
        """Whether it holds."""
        return bool(self.causes)

    def observe(self, error_tokens: int, query_tokens: int) -> None:
        """One request's prediction was off by so much."""
        share = abs(error_tokens) / max(1, query_tokens)
        self.samples += 1
        weight = max(ERROR_WEIGHT, 1.0 / self.samples)
        self.error += weight * (share - self.error)

    def update(self, workers: Sequence[WorkerLocality], *, evicted: int, store_lost: bool) -> None:
        """Looks anew. ``evicted``: blocks that the index has ever forgotten for lack of memory."""
        now = self._clock()
        if evicted > self._evicted:
            self._evicted, self._evicted_at = evicted, now
        found = [*self._of_workers(workers, now, store_lost)]
        if self.samples >= ERROR_SAMPLES_MIN and self.error > ERROR_LIMIT:
            found.append(
                Degradation("prediction_error", f"off by {self.error:.0%} of the prompt's tokens on average")
            )
        if now - self._evicted_at < FULL_SECONDS:
            found.append(Degradation("index_full", f"{self._evicted} blocks were forgotten"))
        self._tell(tuple(found))
        self._count(workers)

    def _of_workers(
        self, workers: Sequence[WorkerLocality], now: float, store_lost: bool
    ) -> list[Degradation]:
        out = {worker.key for worker in workers if worker.state in ("resyncing", "unreachable")}
        self._out_since = {key: self._out_since.get(key, now) for key in out}
        groups: dict[str, list[str]] = {}
        for worker in workers:
            late = now - self._out_since.get(worker.key, now) > RESYNC_GRACE_SECONDS
            if worker.state == "unreachable":
                groups.setdefault("unreachable", []).append(worker.key.name)
            elif worker.state == "resyncing" and late:
                groups.setdefault("resyncing", []).append(f"{worker.key.name} ({worker.cause})")
            elif worker.state == "segments":
                groups.setdefault("no_event_stream", []).append(worker.key.name)
        if store_lost and any(worker.state != "live" for worker in workers):
            groups["store_lost"] = [worker.key.name for worker in workers if worker.state != "live"]
        return [Degradation(cause, _names(names)) for cause, names in groups.items()]

    def _tell(self, causes: tuple[Degradation, ...]) -> None:
        before = {one.cause for one in self.causes}
        after = {one.cause: one.detail for one in causes}
        self.causes = causes
        for cause in after.keys() - before:
            log.warning("locality_degraded", cause=cause, detail=after[cause])
        for cause in before - after.keys():
            log.info("locality_recovered", cause=cause)
        for cause in CAUSES:
            metrics.ROUTER_LOCALITY_DEGRADED.labels(cause).set(int(cause in after))

    @staticmethod
    def _count(workers: Sequence[WorkerLocality]) -> None:
        states = Counter(worker.state for worker in workers)
        for state in ("live", "resyncing", "unreachable", "segments"):
            metrics.ROUTER_LOCALITY_WORKERS.labels(state).set(states[state])


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"
