# SPDX-License-Identifier: Apache-2.0
"""Pulls cached prefixes from other workers into this worker's own cache.

An attempt that names a source waits for its fetch and then goes on as any other: what arrived is found in the cache,
what did not is computed. So a fetch can make an attempt late, by its deadline at most, and never wrong or failed.

The blocks are held from the start to the end of the fetch and by nobody afterwards: a prompt that waits for its turn
with blocks in its hands could keep the one before it from ever getting any.
"""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np

from twinpool import metrics
from twinpool._core import BlockManager, StepScheduler
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.transfer.base import AttemptKey, Blocks
from twinpool.transfer.fence import HandoffFailure
from twinpool.transfer.reader import PullManager
from twinpool.transfer.session import PullSession
from twinpool.transfer.ticket import PromptShape
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.inference_pb2 import HandoffStats
from twinpool.worker.commands import PrefixSource, Prompt
from twinpool.worker.load import duration
from twinpool.worker.quarantine import PullQuarantine

log = get_logger(__name__)

Done = Callable[[pb.PrefixFetched], None]


@dataclass(slots=True, eq=False)
class PrefixFetch:
    """A fetch that is under way. ``held`` are leading blocks that were here before, ``local`` those that are pulled
    into; both have one reference of this fetch."""

    prompt: Prompt
    source: PrefixSource
    held: Blocks
    local: Blocks
    began: float
    done: Done
    pull: PullSession | None = None


class PrefixFetcher:
    """All fetches of this worker; listens to their pulls. Owned by the step thread."""

    def __init__(
        self,
        worker: WorkerKey,
        scheduler: StepScheduler,
        blocks: BlockManager,
        pulls: PullManager,
        endpoints: MutableMapping[WorkerKey, str],
        clock: Callable[[], float],
        *,
        deadline_seconds: float,
    ) -> None:
        """``endpoints`` is told where a source listens."""
        self._worker = worker
        self._scheduler = scheduler
        self._blocks = blocks
        self._pulls = pulls
        self._endpoints = endpoints
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._fetches: dict[PullSession, PrefixFetch] = {}
        self._quarantine = PullQuarantine(blocks)

    def start(
        self, attempt: AttemptKey, prompt: Prompt, source: PrefixSource, done: Done
    ) -> PrefixFetch | None:
        """Asks the source for what is missing here. ``done`` is called once, later, unless the fetch is aborted.

        None: there is nothing to wait for, since the prefix is here already or no blocks are left for it.
        """
        size = self._blocks.block_tokens
        # The last token is computed whatever is cached, and its block with it.
        wanted = min(source.blocks, (len(prompt) - 1) // size)
        held = self._blocks.acquire_prefix(prompt.hashes[:wanted])
        missing = wanted - len(held)
        local = self._allocate(missing) if missing and source.owner != self._worker else None
        if local is None:
            self._blocks.release(held)
            return None
        fetch = PrefixFetch(prompt, source, held, local, self._clock(), done)
        self._endpoints[source.owner] = source.endpoint
        fetch.pull = self._pulls.fetch(
            fetch.began,
            attempt.fetch_by(self._worker),
            source.owner,
            prompt.hashes[len(held) : wanted],
            PromptShape(wanted * size, size, len(held)),
            local,
            self,
            deadline_seconds=self._deadline_seconds,
        )
        self._fetches[fetch.pull] = fetch
        return fetch

    def abort(self, fetch: PrefixFetch) -> None:
        """The attempt has ended meanwhile."""
        pull = fetch.pull
        if pull is None or self._fetches.pop(pull, None) is None:
            return
        self._pulls.abort(self._clock(), pull.attempt)
        self._give_back(fetch, pull)
        metrics.WORKER_PREFIX_FETCHES.labels("ABORTED").inc()

    # --- from the pulls

    def on_ready(self, session: PullSession, first_tokens: Sequence[pb.FirstToken]) -> None:
        """What the source holds is here and proven: it is published under its hashes."""
        fetch = self._fetches.pop(session, None)
        if fetch is None:
            return
        hashes, first, count = fetch.prompt.hashes, len(fetch.held), session.announced_blocks
        parent = hashes[first - 1].tobytes() if first else fetch.prompt.root
        self._blocks.commit(fetch.local[:count], hashes[first : first + count], parent)
        self._blocks.release(np.concatenate([fetch.held, fetch.local]))
        metrics.WORKER_PREFIX_FETCHES.labels("FETCHED").inc()
        metrics.WORKER_PREFIX_FETCHED_TOKENS.inc(count * self._blocks.block_tokens)
        stats = session.stats
        self._finish(
            fetch,
            pb.PrefixFetched(
                owner_blocks=first + count,
                stats=HandoffStats(
                    bytes=stats.size_bytes, blocks=stats.blocks, read_time=duration(stats.read_seconds)
                ),
            ),
        )

    def on_failed(self, session: PullSession, failure: HandoffFailure) -> None:
        """Nothing of it is used; the attempt computes its prompt."""
        fetch = self._fetches.pop(session, None)
        if fetch is None:
            return
        self._give_back(fetch, session)
        reason = pb.FailureReason.Name(failure.reason)
        log.info(
            "prefix_fetch_failed",
            fetch=str(session.attempt),
            owner=str(session.owner),
            reason=reason,
            detail=failure.detail,
        )
        metrics.WORKER_PREFIX_FETCHES.labels(reason).inc()
        fetched = pb.PrefixFetched(failure=failure.reason)
        if failure.reason == pb.FAILURE_REASON_NOT_CACHED:
            fetched.owner_blocks = len(fetch.held)
        self._finish(fetch, fetched)

    def on_drained(self, session: PullSession) -> None:
        """Nothing can be written into the blocks of a failed fetch any more."""
        self._quarantine.drained(session)

    # --- inside

    def _allocate(self, count: int) -> Blocks | None:
        """Blocks to pull into; None if sequences that run would lose theirs for it."""
        if self._blocks.available_blocks < count + self._scheduler.running:
            metrics.WORKER_PREFIX_FETCHES.labels("NO_ROOM").inc()
            return None
        return self._blocks.allocate(count)

    def _give_back(self, fetch: PrefixFetch, pull: PullSession) -> None:
        writable = self._quarantine.hold(pull)
        self._blocks.release(np.concatenate([fetch.held, np.setdiff1d(fetch.local, writable)]))

    def _finish(self, fetch: PrefixFetch, fetched: pb.PrefixFetched) -> None:
        waited = self._clock() - fetch.began
        metrics.WORKER_PREFIX_FETCH_TIME.observe(waited)
        fetched.wait_time.CopyFrom(duration(waited))
        fetch.done(fetched)
