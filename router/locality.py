# SPDX-License-Identifier: Apache-2.0
"""Which worker holds which prefix, and how true that is.

The index is fed by what the workers say (``index/``), not by what passed through this router: so a router that has just
started knows as much as the others. What placement expected is compared, request by request, with what the prefill worker
found; when the two part, the condition ``LocalityDegraded`` says so, with the cause.
"""

import time
from collections.abc import Callable

from twinpool import metrics
from twinpool._core import Action, RouterCore
from twinpool.config import KvEventsConfig
from twinpool.ids import WorkerKey
from twinpool.kv_events import CacheState
from twinpool.router.index import Follower, SegmentView, WorkerLocality
from twinpool.router.locality_condition import LocalityCondition
from twinpool.router.prediction import Prediction
from twinpool.router.request import Prepared
from twinpool.router.trace import TraceBook
from twinpool.v1.control_pb2 import WorkerRecord


class Locality:
    """One a router. All methods on the event loop."""

    def __init__(
        self,
        core: RouterCore,
        config: KvEventsConfig,
        traces: TraceBook,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._traces = traces
        self._segments: SegmentView | None = None
        self.condition = LocalityCondition(clock)
        self._follower = Follower(core, config, self._state, clock)

    # --- life

    def start(self) -> None:
        """Starts to follow events."""
        self._follower.start()

    def use_segments(self, segments: SegmentView) -> None:
        """Where to begin with a worker. Without, each worker is asked for a snapshot."""
        self._segments = segments

    def close(self) -> None:
        """Follows nothing any more."""
        self._follower.close()

    # --- workers

    def follow(self, key: WorkerKey, record: WorkerRecord) -> None:
        """A worker that the core knows. Idempotent."""
        self._follower.follow(key, record)

    def drop(self, key: WorkerKey) -> None:
        """Forgets an incarnation of a worker; the core has dropped its part of the index already."""
        self._follower.drop(key)

    def segments_changed(self, key: WorkerKey) -> None:
        """A worker's segments in etcd differ. From any thread."""
        self._follower.segments_changed(key)

    def statuses(self) -> list[WorkerLocality]:
        """How well each worker is known."""
        return self._follower.statuses()

    # --- requests

    def placed(self, prepared: Prepared, action: Action) -> Prediction:
        """A pair was chosen: notes what is known at this moment."""
        block_tokens = prepared.group.block_tokens
        hashes = prepared.cacheable_hashes
        usable = min(max(0, prepared.prompt_tokens - 1) // block_tokens, len(hashes))
        holders = self._core.longest_prefix(hashes) if usable else []
        best = max((blocks for _, blocks in holders), default=0)
        prediction = Prediction(
            query=prepared.prompt_tokens,
            best=min(best, usable) * block_tokens,
            selected=min(action.predicted_cached_blocks, usable) * block_tokens,
        )
        self._traces.predicted(prepared.request_id, action.attempt, prediction)
        return prediction

    def prefilled(self, prediction: Prediction, cached_tokens: int) -> None:
        """Prefill is done: the worker said what it had found."""
        prediction.actual = cached_tokens
        error = prediction.selected - cached_tokens
        metrics.ROUTER_QUERY_TOKENS.inc(prediction.query)
        metrics.ROUTER_BEST_CACHED_TOKENS.inc(prediction.best)
        metrics.ROUTER_PREDICTED_CACHED_TOKENS.inc(prediction.selected)
        metrics.ROUTER_CACHED_TOKENS.inc(cached_tokens)
        metrics.ROUTER_KV_HIT_RATE.observe(cached_tokens / prediction.query)
        metrics.ROUTER_PREDICTION_ERROR.labels("over" if error > 0 else "under").observe(abs(error))
        self.condition.observe(error, prediction.query)

    def watch(self) -> None:
        """Looks whether the condition holds. Called every half second or so."""
        store_lost = self._segments is not None and not self._segments.connected
        self.condition.update(
            self.statuses(), evicted=self._core.stats()["index_evicted"], store_lost=store_lost
        )

    def _state(self, key: WorkerKey) -> CacheState | None:
        return self._segments.state(key) if self._segments is not None else None
