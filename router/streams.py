# SPDX-License-Identifier: Apache-2.0
"""The calls about answers that can be resumed: what they may say, and which stream reads which answer."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import grpc.aio

from twinpool import tracing
from twinpool.config import RouterSection
from twinpool.errors import TwinpoolError
from twinpool.router.hops import Write
from twinpool.router.kept import Kept, KeptBook
from twinpool.router.portable import made_portable
from twinpool.router.request import Prepared
from twinpool.router.resume_token import TokenSeal, key_digest
from twinpool.router.takeover import TakeOver
from twinpool.router.tally import Tally
from twinpool.router.utf8 import refuse_unknown_fields
from twinpool.router.validate import Resumable
from twinpool.rpc import Deadline
from twinpool.v1 import inference_pb2 as pb


class Streams:
    """One a router."""

    def __init__(self, book: KeptBook, takeover: TakeOver, seal: TokenSeal, limits: RouterSection) -> None:
        self._book = book
        self._takeover = takeover
        self._seal = seal
        self._limits = limits

    def begin(self, prepared: Prepared, wanted: Resumable, tally: Tally, on_end: Callable[[], None]) -> Kept:
        """Starts a request that can be resumed. Raises RESUME_FULL."""
        key = key_digest(prepared.tenant, wanted.key)
        portable = made_portable(prepared, wanted.grace_seconds, key, wanted.digest if key else b"")
        return self._book.begin(portable, tally, on_end)

    @asynccontextmanager
    async def claim(
        self, request: pb.GenerateRequest, wanted: Resumable, traceparent: str
    ) -> AsyncIterator[Kept | None]:
        """The answer of an earlier request with the same idempotency key. None: there is none, and the caller starts it within the
        context. Raises IDEMPOTENCY_MISMATCH."""
        key = key_digest(request.tenant, wanted.key)
        tally = partial(_tally, traceparent)
        async with self._takeover.claim(key, wanted.digest, request.repeated, tally) as kept:
            yield kept

    async def follow(self, kept: Kept, next_index: Sequence[int], write: Write) -> None:
        """Serves one stream of an answer. A client that leaves ends the stream alone."""
        try:
            await self._book.follow(kept, next_index, write)
        except grpc.aio.BaseError as error:
            # A write to a client that is gone; its cancel has not reached this task yet.
            raise asyncio.CancelledError from error

    async def resume(
        self,
        request: pb.ResumeRequest,
        write: Write,
        traceparent: str,
        opened: Callable[[Kept], None] = lambda kept: None,
    ) -> None:
        """See the protocol. ``opened`` is told of the answer before its first event."""
        refuse_unknown_fields(request)
        if len(request.next_index) > self._limits.max_choices:
            raise TwinpoolError(
                "INVALID_RESUME",
                f"next_index has {len(request.next_index)} entries; the limit is {self._limits.max_choices}",
                field="next_index",
            )
        ticket = self._seal.open(request.token, request.tenant)
        kept = await self._takeover.resume(ticket.stream_id, request.next_index, partial(_tally, traceparent))
        opened(kept)
        await self.follow(kept, request.next_index, write)

    async def cancel(self, request: pb.CancelRequest) -> pb.CancelResponse:
        """See the protocol."""
        refuse_unknown_fields(request)
        key, stream_id = key_digest(request.tenant, request.idempotency_key), ""
        if request.token or not key:
            stream_id = self._seal.open(request.token, request.tenant).stream_id
        return pb.CancelResponse(found=await self._takeover.cancel(stream_id, key))


def _tally(traceparent: str) -> Tally:
    """Counts an answer that comes here from elsewhere."""
    return Tally(tracing.start("resume", traceparent), Deadline())
