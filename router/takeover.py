# SPDX-License-Identifier: Apache-2.0
"""Resume, Cancel and idempotency keys: finds an answer wherever it is, and brings it here.

Where it may be, in this order: on this router; on another router that lives, which hands it over; on the decode workers, where
its router is lost. What is found goes on here by ``resume.continuation``. Several ask for one answer at once: it is brought
once, and the newest stream reads it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from twinpool import metrics
from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger
from twinpool.router.kept import Kept, KeptBook
from twinpool.router.models import ModelTable
from twinpool.router.others import Found, OtherRouters
from twinpool.router.portable import prepared_of, progress
from twinpool.router.request import Prepared
from twinpool.router.tally import Tally
from twinpool.v1.resume_pb2 import PortableRequest, PortableState

log = get_logger(__name__)

_PENDING_SECONDS: Final = 0.02


class TakeOver:
    """One a router."""

    def __init__(self, book: KeptBook, others: OtherRouters, models: ModelTable) -> None:
        self._book = book
        self._others = others
        self._models = models
        self._taking: dict[str, asyncio.Task[Kept]] = {}
        # Keys of requests that are about to start here.
        self._claims: dict[bytes, asyncio.Event] = {}

    async def resume(self, stream_id: str, next_index: Sequence[int], tally: Callable[[], Tally]) -> Kept:
        """The answer, on this router from now on. ``tally`` counts it if it comes from elsewhere. Raises RESUME_LOST,
        RESUME_UNREACHABLE, and what ended it elsewhere."""
        kept = self._book.find(stream_id)
        if kept is not None and kept.readable:
            metrics.ROUTER_REATTACHED.labels("own").inc()
            return kept
        task = self._taking.get(stream_id)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._bring(stream_id, next_index, tally))
            self._taking[stream_id] = task
            task.add_done_callback(lambda _: self._taking.pop(stream_id, None))
        # A client that leaves meanwhile must not stop it for the one that comes next.
        return await asyncio.shield(task)

    async def cancel(self, stream_id: str, key: bytes) -> bool:
        """Ends the answer wherever it is; whether it was anywhere. ``key`` names it where ``stream_id`` is empty."""
        kept = self._book.find(stream_id) if stream_id else self._book.find_key(key)
        if kept is not None:
            return self._book.cancel(kept)
        routers = await self._others.ask_routers(stream_id, key, forget=True)
        workers = await self._others.ask_workers(stream_id, key, forget=True)
        return bool(routers.states or workers.states)

    # --- idempotency keys -----------------------------------------------------------------

    def claimed(self, key: bytes) -> bool:
        """Whether a request with this key is about to start here."""
        return key in self._claims

    @asynccontextmanager
    async def claim(
        self, key: bytes, digest: bytes, repeated: bool, tally: Callable[[], Tally]
    ) -> AsyncIterator[Kept | None]:
        """The answer of the request with this key, wherever it is; None: the caller starts it, before it leaves the context.
        One that has failed, or cannot be read from its beginning, is no answer. Raises IDEMPOTENCY_MISMATCH."""
        while (claim := self._claims.get(key)) is not None:
            await claim.wait()
        claim = self._claims[key] = asyncio.Event()
        try:
            yield await self._known(key, digest, repeated, tally)
        finally:
            del self._claims[key]
            claim.set()

    async def _known(
        self, key: bytes, digest: bytes, repeated: bool, tally: Callable[[], Tally]
    ) -> Kept | None:
        kept = self._book.find_key(key)
        if kept is not None:
            _check_same(kept.portable, digest)
            if kept.parked is not None:
                kept = await self.resume(kept.portable.stream_id, (), tally)
            else:
                metrics.ROUTER_REATTACHED.labels("own").inc()
        else:
            kept = await self._elsewhere(key, digest, repeated, tally)
        if kept is not None and (kept.journal.error is not None or not kept.journal.whole):
            self._book.remove(kept)
            return None
        return kept

    async def _elsewhere(
        self, key: bytes, digest: bytes, repeated: bool, tally: Callable[[], Tally]
    ) -> Kept | None:
        if not self._others.alive and not repeated:
            return None
        found = await self._others.ask_routers(key=key, digest=digest)
        while any(name < self._others.name for name in found.pending):
            # Two routers were asked at once: the one whose name comes first starts it.
            await asyncio.sleep(_PENDING_SECONDS)
            found = await self._others.ask_routers(key=key, digest=digest)
        if found.error is not None and found.error.reason == "IDEMPOTENCY_MISMATCH":
            raise found.error
        if not found.states and repeated:
            found = await self._others.ask_workers(key=key, digest=digest)
        for state in found.states:
            _check_same(state.request, digest)
        if not found.states:
            return None
        return self.restore(max(found.states, key=progress), (), tally, found.source)

    async def _bring(self, stream_id: str, next_index: Sequence[int], tally: Callable[[], Tally]) -> Kept:
        kept = self._book.find(stream_id)
        own = [kept.parked] if kept is not None and kept.parked is not None else []
        found = await self._others.ask_routers(stream_id)
        if found.error is not None and not found.states:
            raise found.error
        if not found.states:
            found = await self._of_workers(stream_id, found)
        states = [state for state in [*own, *found.states] if state.request.stream_id == stream_id]
        if not states:
            metrics.ROUTER_REATTACHED.labels("lost").inc()
            if not found.answered:
                raise TwinpoolError("RESUME_UNREACHABLE", retry_after=0.5)
            raise TwinpoolError("RESUME_LOST")
        return self.restore(max(states, key=progress), next_index, tally, found.source or "own")

    async def _of_workers(self, stream_id: str, routers: Found) -> Found:
        found = await self._others.ask_workers(stream_id)
        found.answered += routers.answered
        return found

    def restore(
        self, state: PortableState, next_index: Sequence[int], tally: Callable[[], Tally], source: str
    ) -> Kept:
        """Goes on with a state here. Raises NO_WORKERS if nobody could."""
        request = state.request
        counted = tally()
        try:
            kept = self._book.restore(state, self._prepared, next_index, counted)
        except BaseException as error:
            counted.end(error)
            raise
        metrics.ROUTER_REATTACHED.labels(source).inc()
        log.info(
            "answer_taken_over",
            request_id=kept.prepared.request_id,
            source=source,
            moves=request.moves,
            tokens=sum(len(row) for row in kept.journal.outputs),
        )
        return kept

    def _prepared(self, state: PortableState) -> Prepared:
        request = state.request
        # It stays in its pool, whose workers hold what is cached of it.
        target = self._models.resolve(request.model, request.fingerprint, request.pool)
        return prepared_of(state, target.group)


def _check_same(request: PortableRequest, digest: bytes) -> None:
    if request.digest != digest:
        raise TwinpoolError("IDEMPOTENCY_MISMATCH", field="idempotency_key")
