# SPDX-License-Identifier: Apache-2.0
"""The owner's side of the hand-off: what this worker has promised to hold for whom.

Pure logic: messages to readers go out through ``send``, time comes in, blocks are held by the block manager. All
methods belong to one thread (the worker's step thread, which also owns the block manager); nothing here is guarded.

A reader's share ends by its release, by the end of its stream, by the lease, or by the owner's own failure, whichever
is first; the offer ends with its last share. Every release is answered, known or not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from google.protobuf.duration_pb2 import Duration

from twinpool.ids import WorkerKey, new_transfer_id
from twinpool.logs import get_logger
from twinpool.transfer.base import AttemptKey, Blocks, Generations, NullObserver, TransferObserver
from twinpool.transfer.descriptor import worker_message
from twinpool.transfer.digest import Digest, DigestPolicy, wanted
from twinpool.transfer.early import EARLY_MAX, EarlyReaders
from twinpool.transfer.offer import Offer, OfferEnd, Part, PinKeeper
from twinpool.v1 import handoff_pb2, worker_pb2
from twinpool.v1.worker_pb2 import FailureReason

_log = get_logger(__name__)

FETCHES_MAX = 1024
"""Most cached prefixes that are held for readers at a time."""

HASH_BYTES = 16

PREFIX_BLOCKS_MAX = 1 << 20
"""Longest prefix that is looked up for a reader, in blocks: 16 million tokens in the smallest blocks."""

ENDED_MAX = 4096
"""Ended attempts that are remembered, so that a late Expect fails at once instead of waiting."""

Send = Callable[[int, handoff_pb2.ExchangeResponse], None]
"""Queues a message to a reader's stream; must not call back."""

_Cause = tuple[FailureReason.ValueType, str]


class OfferBook:
    """All offers of this worker. See the module for its thread."""

    def __init__(
        self,
        worker: WorkerKey,
        pins: PinKeeper,
        generations: Generations,
        send: Send,
        *,
        lease_seconds: float,
        digest: Digest | None = None,
        digest_policy: DigestPolicy = "off",
        on_end: Callable[[AttemptKey, OfferEnd], None] = lambda _attempt, _end: None,
        on_count: Callable[[int], None] = lambda _count: None,
        observer: TransferObserver | None = None,
    ) -> None:
        """``generations`` is the registered table, read when blocks are announced. ``on_end`` is told of every end that
        the caller did not ask for itself; ``on_count`` how many offers are open. Raises ValueError for a digest policy
        without a digest."""
        if digest is None and digest_policy != "off":
            raise ValueError(f"digest policy {digest_policy!r} without a digest")
        self._worker = worker_message(worker)
        self._pins = pins
        self._generations = generations
        self._send = send
        self._lease_seconds = lease_seconds
        self._lease = Duration(nanos=0)
        self._lease.FromNanoseconds(round(lease_seconds * 1e9))
        self._digest = digest
        self._digest_policy: DigestPolicy = digest_policy
        self._on_end = on_end
        self._on_count = on_count
        self._observer = observer if observer is not None else NullObserver()
        self._fetches = 0
        self._offers: dict[AttemptKey, Offer] = {}
        self._by_transfer: dict[int, Offer] = {}
        self._readers: dict[int, WorkerKey] = {}  # by stream
        self._early = EarlyReaders()
        self._ended: OrderedDict[AttemptKey, _Cause] = OrderedDict()

    @property
    def open(self) -> int:
        """Offers that have not ended, fetched prefixes included."""
        return len(self._offers)

    @property
    def fetches(self) -> int:
        """Cached prefixes that are held for readers."""
        return self._fetches

    # --- from the worker ---

    def begin(self, attempt: AttemptKey, readers: Sequence[WorkerKey]) -> int:
        """A prompt will be computed for ``readers``; returns its transfer id. Raises ValueError if the attempt is or
        was here already."""
        if attempt in self._offers or attempt in self._ended:
            raise ValueError(f"attempt {attempt} has been offered already")
        offer = self._open(attempt, readers, prefix=False)
        for stream in self._early.take(attempt):
            self._attach(offer, stream)
        return offer.transfer_id

    def announce(
        self, now: float, attempt: AttemptKey, first_block: int, blocks: Blocks, length_tokens: int
    ) -> bool:
        """Pins final blocks (``blocks[0]`` holds prompt block ``first_block``) and tells the readers. The caller holds
        the blocks until this returns. False: nobody wants them any more."""
        offer = self._offers.get(attempt)
        if offer is None:
            return False
        ticket = self._ticket(now, offer, first_block, blocks, length_tokens)
        self._tell(offer, handoff_pb2.ExchangeResponse(chunk_ready=ticket))
        return True

    def complete(
        self,
        now: float,
        attempt: AttemptKey,
        first_block: int,
        blocks: Blocks,
        length_tokens: int,
        first_tokens: Sequence[worker_pb2.FirstToken],
        traceparent: str = "",
    ) -> bool:
        """As :meth:`announce`, for the last blocks of the prompt, maybe none, with the first token of each choice.
        ``traceparent`` names the span in which the prompt was computed."""
        offer = self._offers.get(attempt)
        if offer is None:
            return False
        ticket = self._ticket(now, offer, first_block, blocks, length_tokens)
        offer.complete = True
        complete = handoff_pb2.PrefillComplete(
            ticket=ticket, first_tokens=first_tokens, traceparent=traceparent
        )
        self._tell(offer, handoff_pb2.ExchangeResponse(complete=complete))
        return True

    def fail(self, attempt: AttemptKey, reason: FailureReason.ValueType, detail: str) -> bool:
        """The attempt failed or was cancelled here: readers are told, pins end. False if it is not open.

        A read that is under way is stopped by nothing but its fence, which is what the generations are for.
        """
        offer = self._offers.get(attempt)
        if offer is None:
            return False
        for part in offer.listening():
            self._refuse(part.stream, attempt, (reason, detail))
        self._close(offer, OfferEnd.FAILED, (reason, detail))
        return True

    def tick(self, now: float) -> None:
        """Ends what nobody has renewed, also with nothing else going on. Call it at the latest at :meth:`next_wake`."""
        unpinned = set(self._pins.expire(now))
        # Besides those: offers with nothing to pin.
        expired = [
            offer
            for offer in self._offers.values()
            if offer.transfer_id in unpinned or (offer.expires_at is not None and offer.expires_at <= now)
        ]
        for offer in expired:
            _log.warning("offer_expired", attempt=str(offer.attempt), transfer=f"{offer.transfer_id:016x}")
            lost = handoff_pb2.LeaseLost(transfer_ids=[offer.transfer_id])
            for part in offer.listening():
                self._message(part.stream, handoff_pb2.ExchangeResponse(lease_lost=lost))
            self._close(
                offer, OfferEnd.EXPIRED, (FailureReason.FAILURE_REASON_FENCED, "the lease had expired")
            )
        if expired:
            self._observer.leases_expired(len(expired))
        for attempt, stream in self._early.expire(now):
            cause = (FailureReason.FAILURE_REASON_TRANSFER, "the prefill command did not come in time")
            self._refuse(stream, attempt, cause)

    def next_wake(self) -> float | None:
        """When :meth:`tick` may have something to do; None if never."""
        times = [offer.expires_at for offer in self._offers.values() if offer.expires_at is not None]
        early = self._early.next_expiry()
        return min(times if early is None else (*times, early), default=None)

    # --- from readers ---

    def reader_opened(self, stream: int, reader: WorkerKey) -> None:
        """A reader's stream stands. An older one of it, if any, is closed by its own call."""
        self._readers[stream] = reader

    def reader_closed(self, stream: int) -> None:
        """A reader's stream ended, which is the reader's death: its shares end."""
        self._readers.pop(stream, None)
        self._early.drop_stream(stream)
        for offer in list(self._offers.values()):
            for part in offer.listening():
                if part.stream == stream:
                    self._part_gone(offer, part, success=False)

    def on_message(self, now: float, stream: int, message: handoff_pb2.ExchangeRequest) -> None:
        """Takes a message from a reader's stream. One of an unknown stream is dropped: the stream has ended."""
        reader = self._readers.get(stream)
        if reader is None:
            return
        kind = message.WhichOneof("message")
        if kind == "expect":
            self._on_expect(now, stream, AttemptKey.of(message.expect.id))
        elif kind == "renew":
            self._on_renew(now, stream, reader, message.renew.transfer_ids)
        elif kind == "release":
            self._on_release(stream, reader, message.release)
        elif kind == "fetch":
            self._on_fetch(now, stream, reader, message.fetch)
        else:
            _log.warning("handoff_message_unexpected", reader=str(reader), kind=str(kind))

    def _on_expect(self, now: float, stream: int, attempt: AttemptKey) -> None:
        offer = self._offers.get(attempt)
        if offer is not None:
            self._attach(offer, stream)
        elif attempt in self._ended:
            self._refuse(stream, attempt, self._ended[attempt])
        elif not self._early.add(attempt, stream, now + self._lease_seconds):
            cause = (FailureReason.FAILURE_REASON_NO_CAPACITY, f"{EARLY_MAX} attempts are waited for already")
            self._refuse(stream, attempt, cause)

    def _on_fetch(self, now: float, stream: int, reader: WorkerKey, fetch: handoff_pb2.Fetch) -> None:
        """Pins what is cached here of the blocks that a reader asks for, and tells it in one ticket."""
        key, raw = AttemptKey.of(fetch.id), fetch.block_hashes
        if key in self._offers:
            cause = (FailureReason.FAILURE_REASON_DUPLICATE, "a fetch of this name is open")
        elif not raw or len(raw) % HASH_BYTES:
            cause = (FailureReason.FAILURE_REASON_INVALID, f"{len(raw)} bytes of block hashes")
        elif fetch.first_block + len(raw) // HASH_BYTES > PREFIX_BLOCKS_MAX:
            detail = f"{len(raw) // HASH_BYTES} blocks from {fetch.first_block} on; the limit is {PREFIX_BLOCKS_MAX}"
            cause = (FailureReason.FAILURE_REASON_INVALID, detail)
        elif self._fetches >= FETCHES_MAX:
            cause = (FailureReason.FAILURE_REASON_NO_CAPACITY, f"{FETCHES_MAX} fetches are open already")
        else:
            hashes = np.frombuffer(raw, np.uint8).reshape(-1, HASH_BYTES)
            # The references bridge the time until the pins hold.
            blocks = self._pins.acquire_prefix(hashes)
            try:
                if len(blocks):
                    self._offer_prefix(now, self._open(key, [reader], prefix=True), stream, fetch, blocks)
                    return
            finally:
                self._pins.release(blocks)
            cause = (FailureReason.FAILURE_REASON_NOT_CACHED, f"block {fetch.first_block} is not cached here")
        self._refuse(stream, key, cause)

    def _offer_prefix(
        self, now: float, offer: Offer, stream: int, fetch: handoff_pb2.Fetch, blocks: Blocks
    ) -> None:
        self._attach(offer, stream)
        length = (fetch.first_block + len(blocks)) * self._pins.block_tokens
        ticket = self._ticket(now, offer, fetch.first_block, blocks, length)
        offer.complete = True
        self._tell(offer, handoff_pb2.ExchangeResponse(chunk_ready=ticket))

    def _on_renew(self, now: float, stream: int, reader: WorkerKey, transfer_ids: Sequence[int]) -> None:
        until = now + self._lease_seconds
        lost = [transfer_id for transfer_id in transfer_ids if not self._renew(reader, transfer_id, until)]
        if lost:
            self._observer.unknown_transfer("renew")
            self._message(
                stream, handoff_pb2.ExchangeResponse(lease_lost=handoff_pb2.LeaseLost(transfer_ids=lost))
            )

    def _renew(self, reader: WorkerKey, transfer_id: int, until: float) -> bool:
        offer = self._by_transfer.get(transfer_id)
        part = offer.part(reader) if offer is not None else None
        if offer is None or part is None or part.gone or offer.expires_at is None:
            return False
        if offer.pinned and not self._pins.renew(transfer_id, until):
            return False
        offer.expires_at = max(offer.expires_at, until)
        return True

    def _on_release(self, stream: int, reader: WorkerKey, release: handoff_pb2.Release) -> None:
        attempt = AttemptKey.of(release.id)
        offer = self._offers.get(attempt)
        part = offer.part(reader) if offer is not None else None
        known = self._early.drop(attempt, stream)
        if offer is not None and part is not None and not part.gone:
            # A reader that gave up before its first ticket does not know the id.
            known = release.transfer_id in (0, offer.transfer_id)
            if known:
                self._part_gone(offer, part, success=release.success)
        if not known:
            self._observer.unknown_transfer("release")
        released = handoff_pb2.Released(id=release.id, transfer_id=release.transfer_id, known=known)
        self._message(stream, handoff_pb2.ExchangeResponse(released=released))

    # --- inside ---

    def _open(self, attempt: AttemptKey, readers: Sequence[WorkerKey], *, prefix: bool) -> Offer:
        transfer_id = new_transfer_id()
        while transfer_id in self._by_transfer:
            transfer_id = new_transfer_id()
        offer = Offer.of(attempt, transfer_id, readers, prefix=prefix)
        self._offers[attempt] = offer
        self._by_transfer[transfer_id] = offer
        self._fetches += prefix
        self._on_count(len(self._offers))
        return offer

    def _ticket(
        self, now: float, offer: Offer, first_block: int, blocks: Blocks, length_tokens: int
    ) -> handoff_pb2.Ticket:
        if offer.complete:
            raise ValueError(f"attempt {offer.attempt} is complete already")
        until = now + self._lease_seconds
        if len(blocks):
            self._pins.pin(offer.transfer_id, blocks, len(offer.parts), until)
            offer.pinned = True
            for part in offer.parts:
                if part.gone:
                    self._pins.unpin(offer.transfer_id, part.index)
        elif offer.pinned:
            # A ticket states a full lease from now, for the blocks before it too.
            self._pins.renew(offer.transfer_id, until)
        offer.expires_at = until
        digests: list[int] = []
        if self._digest is not None and wanted(self._digest_policy, offer.transfer_id):
            digests = self._digest(blocks)
        return handoff_pb2.Ticket(
            transfer_id=offer.transfer_id,
            owner=self._worker,
            id=offer.attempt.message(),
            first_block=first_block,
            blocks=blocks.tolist(),
            generations=self._generations[blocks].tolist(),
            digests=digests,
            length_tokens=length_tokens,
            lease=self._lease,
        )

    def _attach(self, offer: Offer, stream: int) -> None:
        part = offer.part(self._readers[stream])
        if part is None or part.gone:
            cause = (
                FailureReason.FAILURE_REASON_INVALID,
                "this reader is not expected, or has released its share",
            )
            self._refuse(stream, offer.attempt, cause)
        elif part.stream is None:
            part.stream = stream
            self._flush(offer, part)
        elif part.stream != stream:
            cause = (FailureReason.FAILURE_REASON_DUPLICATE, "an older stream of this reader expects it")
            self._refuse(stream, offer.attempt, cause)

    def _tell(self, offer: Offer, message: handoff_pb2.ExchangeResponse) -> None:
        offer.messages.append(message)
        for part in offer.listening():
            self._flush(offer, part)

    def _flush(self, offer: Offer, part: Part) -> None:
        for message in offer.messages[part.sent :]:
            self._message(part.stream, message)
        part.sent = len(offer.messages)

    def _part_gone(self, offer: Offer, part: Part, *, success: bool) -> None:
        part.gone = True
        part.success = success
        if offer.pinned:
            self._pins.unpin(offer.transfer_id, part.index)
        if offer.over:
            cause = (FailureReason.FAILURE_REASON_FENCED, "every reader has released the attempt")
            self._close(offer, offer.end, cause)

    def _close(self, offer: Offer, end: OfferEnd, cause: _Cause) -> None:
        del self._offers[offer.attempt]
        del self._by_transfer[offer.transfer_id]
        for part in offer.parts:
            if offer.pinned and not part.gone:
                self._pins.unpin(offer.transfer_id, part.index)
            part.gone = True
        self._on_count(len(self._offers))
        if offer.prefix:
            # No attempt of this worker stands behind it, and nobody expects it any more.
            self._fetches -= 1
            return
        self._ended[offer.attempt] = cause
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        if end is not OfferEnd.FAILED:
            self._on_end(offer.attempt, end)

    def _refuse(self, stream: int | None, attempt: AttemptKey, cause: _Cause) -> None:
        failed = handoff_pb2.TransferFailed(id=attempt.message(), reason=cause[0], detail=cause[1])
        self._message(stream, handoff_pb2.ExchangeResponse(failed=failed))

    def _message(self, stream: int | None, message: handoff_pb2.ExchangeResponse) -> None:
        if stream in self._readers:
            self._send(stream, message)
