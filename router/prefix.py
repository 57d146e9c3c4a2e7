# SPDX-License-Identifier: Apache-2.0
"""From whom a placement pulls the beginning of its prompt, and what came of it.

Placement chooses the source by what it believes each worker to hold. A source that turns out to hold less is corrected by
its own KV events; one that does not deliver is left out for a while here, since every prompt that waits for it loses the
time until it gives up.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from twinpool import metrics
from twinpool._core import Action
from twinpool.config import RouterSection
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.router.admission import Admission
from twinpool.router.placement import Fleet
from twinpool.v1 import worker_pb2 as pb

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """A worker that holds the beginning of a prompt, as far as is known; and as it stands in a command."""

    key: WorkerKey
    message: pb.PrefixSource


class PrefixSources:
    """One a router. All methods on the event loop."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        limits: RouterSection,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``limits``: ``fetch_backoff_seconds``: how long a source that did not deliver is not named again."""
        self._fleet = fleet
        self._admission = admission
        self._limits = limits
        self._clock = clock
        self._barred: dict[WorkerKey, float] = {}

    def placed(self, action: Action) -> Source | None:
        """The source of a placement; None: the prompt is computed as far as its worker has not cached it."""
        if action.local:
            metrics.ROUTER_LOCAL_PREFILLS.inc()
        if action.fetch_from is None:
            return None
        key = WorkerKey(*action.fetch_from)
        record = self._fleet.record(key)
        if record is None or self._is_barred(key):
            return None
        message = pb.PrefixSource(owner=record.worker, endpoint=record.endpoint, blocks=action.fetch_blocks)
        return Source(key, message)

    def fetched(self, source: Source | None, reader: WorkerKey, done: pb.PrefillDone) -> None:
        """What the worker that computed the prompt said of the pull, if there was one."""
        if source is None or not done.HasField("fetched"):
            return
        said = done.fetched
        if not said.failure:
            metrics.ROUTER_PREFIX_FETCHES.labels("FETCHED").inc()
            metrics.ROUTER_PREFIX_FETCHED_BYTES.inc(said.stats.bytes)
            self._admission.observe_transfer(reader, said.stats)
            return
        known = said.failure in pb.FailureReason.values()
        reason = pb.FailureReason.Name(said.failure).removeprefix("FAILURE_REASON_") if known else "UNKNOWN"
        metrics.ROUTER_PREFIX_FETCHES.labels(reason).inc()
        log.info("prefix_not_fetched", owner=str(source.key), reason=reason, blocks=source.message.blocks)
        if said.failure != pb.FAILURE_REASON_NOT_CACHED:
            self._barred[source.key] = self._clock() + self._limits.fetch_backoff_seconds

    def _is_barred(self, key: WorkerKey) -> bool:
        now = self._clock()
        for other in [other for other, until in self._barred.items() if until <= now]:
            del self._barred[other]
        return key in self._barred
