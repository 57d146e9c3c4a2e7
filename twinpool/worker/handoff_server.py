# SPDX-License-Identifier: Apache-2.0
"""HandoffService: what readers of this worker's blocks say to it. Bytes move elsewhere.

A reader connects once, which checks that both sides agree on model and layout, then keeps one stream. The end of
the stream is the reader's death: whatever it still held here is freed.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from twinpool import errors
from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.rpc.roles import check_process
from twinpool.transfer.base import PeerDescriptor
from twinpool.transfer.descriptor import DescriptorError, from_message, to_message, worker_key
from twinpool.v1 import handoff_pb2, handoff_pb2_grpc
from twinpool.worker.step_loop import StepLoop
from twinpool.worker.streams import Context, MessageQueue

READERS_MAX: Final = 4096
"""Most readers that are known, and most streams of them."""

INTRODUCTION_SECONDS: Final = 10.0
"""A stream that does not say who reads within so long is closed."""

log = get_logger(__name__)


def descriptor_error(error: DescriptorError) -> TwinpoolError:
    """The row of the error table for a refused descriptor."""
    if error.field in ("fingerprint", "shard"):
        return TwinpoolError("FINGERPRINT_MISMATCH", error.detail)
    if error.field == "worker":
        return TwinpoolError("INCARNATION_MISMATCH", error.detail)
    return TwinpoolError("DESCRIPTOR_INVALID", error.detail)


@dataclass(frozen=True, slots=True)
class ReaderStream:
    """One reader's stream."""

    number: int
    reader: WorkerKey
    out: MessageQueue[handoff_pb2.ExchangeResponse] = field(default_factory=MessageQueue)


class HandoffService(handoff_pb2_grpc.HandoffServiceServicer):
    """The owner's side. Used on the asyncio thread alone; what readers say goes to the step thread."""

    def __init__(self, *, own: PeerDescriptor, loop: StepLoop, role_domain: str = "") -> None:
        """``role_domain``: see ``TlsConfig``; a reader must be whom its certificate names."""
        self._role_domain = role_domain
        self._own = own
        self._answer = handoff_pb2.ConnectResponse(owner=to_message(own))
        self._loop = loop
        self._numbers = itertools.count(1)
        # Incarnation of each reader whose descriptor was checked, by its name: bounded by names, not by restarts.
        self._checked: dict[str, int] = {}
        self._streams: dict[int, ReaderStream] = {}

    @property
    def streams(self) -> int:
        """Open Exchange streams."""
        return len(self._streams)

    def deliver(self, number: int, message: handoff_pb2.ExchangeResponse) -> None:
        """Queues a message for a reader's stream; dropped if it is gone."""
        stream = self._streams.get(number)
        if stream is not None:
            stream.out.send(message)

    def close(self) -> None:
        """Ends every stream."""
        for stream in list(self._streams.values()):
            stream.out.close(TwinpoolError("DRAINING", f"worker {self._own.worker} stops"))

    async def Connect(
        self, request: handoff_pb2.ConnectRequest, context: Context
    ) -> handoff_pb2.ConnectResponse:
        """Raises FINGERPRINT_MISMATCH, INCARNATION_MISMATCH, DESCRIPTOR_INVALID or PERMISSION_DENIED."""
        try:
            meant = worker_key(request.owner)
            if meant != self._own.worker:
                detail = f"this is worker {self._own.worker}, not {meant}"
                raise TwinpoolError("INCARNATION_MISMATCH", detail)
            reader = from_message(request.reader, own=self._own).worker
        except DescriptorError as error:
            log.warning("reader_refused", field=error.field, detail=error.detail)
            raise descriptor_error(error) from None
        check_process(context, self._role_domain, "worker", reader.name)
        self._checked.pop(reader.name, None)
        if len(self._checked) >= READERS_MAX:
            # The one that came first: it connects anew if it still reads.
            del self._checked[next(iter(self._checked))]
        self._checked[reader.name] = reader.incarnation
        return self._answer

    async def Exchange(
        self,
        request_iterator: AsyncIterator[handoff_pb2.ExchangeRequest],
        context: Context,
    ) -> AsyncIterator[handoff_pb2.ExchangeResponse]:
        """See the protocol."""
        reader = await self._introduction(request_iterator)
        check_process(context, self._role_domain, "worker", reader.name)
        if len(self._streams) >= READERS_MAX:
            raise TwinpoolError("QUEUE_FULL", f"{READERS_MAX} readers are served; the limit is so many")
        stream = self._open(reader)
        listener = asyncio.create_task(self._listen(stream, request_iterator), name=f"reader-{stream.number}")
        try:
            # Tells the reader that its stream stands, before there is anything else to say.
            await context.send_initial_metadata(())
            async for message in stream.out.messages():
                yield message
            if stream.out.error is not None:
                raise stream.out.error
        finally:
            listener.cancel()
            self._close(stream)

    async def _introduction(self, requests: AsyncIterator[handoff_pb2.ExchangeRequest]) -> WorkerKey:
        try:
            first = await asyncio.wait_for(anext(requests), INTRODUCTION_SECONDS)
            if first.WhichOneof("message") != "reader":
                raise TwinpoolError("INVALID_ARGUMENT", "the first message does not say who reads")
            reader = worker_key(first.reader)
        except StopAsyncIteration:
            raise TwinpoolError("INVALID_ARGUMENT", "the stream ended before it said who reads") from None
        except TimeoutError:
            detail = f"no reader named within {INTRODUCTION_SECONDS:g} s"
            raise TwinpoolError("INVALID_ARGUMENT", detail) from None
        except DescriptorError as error:
            raise descriptor_error(error) from None
        if self._checked.get(reader.name) != reader.incarnation:
            raise TwinpoolError(
                "INCARNATION_MISMATCH", f"reader {reader} has not connected to {self._own.worker}"
            )
        return reader

    def _open(self, reader: WorkerKey) -> ReaderStream:
        for other in list(self._streams.values()):
            # One stream a pair, and one incarnation of a worker alive: the older stream is a dead one's.
            if other.reader.name == reader.name:
                other.out.close(TwinpoolError("CANCELLED", f"{reader} opened another stream"))
        stream = ReaderStream(next(self._numbers), reader)
        self._streams[stream.number] = stream
        self._loop.post(lambda: self._loop.role.on_reader_opened(stream.number, reader))
        log.info("reader_opened", stream=stream.number, reader=str(reader))
        return stream

    def _close(self, stream: ReaderStream) -> None:
        stream.out.close()
        if self._streams.pop(stream.number, None) is None:
            return
        self._loop.post(lambda: self._loop.role.on_reader_closed(stream.number))
        log.info("reader_closed", stream=stream.number, reader=str(stream.reader))

    def _heard(self, stream: int, message: handoff_pb2.ExchangeRequest) -> None:
        """On the step thread: the role is the one that the worker has by now."""
        self._loop.role.on_reader_message(stream, message)

    async def _listen(
        self, stream: ReaderStream, requests: AsyncIterator[handoff_pb2.ExchangeRequest]
    ) -> None:
        error: TwinpoolError | None = None
        try:
            async for message in requests:
                self._loop.post(partial(self._heard, stream.number, message))
        except Exception as caught:
            log.warning("reader_stream_failed", stream=stream.number, type=type(caught).__name__)
            error = errors.as_twinpool_error(caught)
        stream.out.close(error)
