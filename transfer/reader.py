# SPDX-License-Identifier: Apache-2.0
"""The reader's side of the hand-off: every prompt that this worker waits for, over all owners.

Pure logic: messages to owners go out through ``send``, bytes through a :class:`~twinpool.transfer.session.ReadPort`,
time comes in. All methods and all of the port's callbacks belong to one thread (the worker's step thread), which also
is where listeners are called; nothing here is guarded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.transfer.base import AttemptKey, Blocks, NullObserver, TransferObserver
from twinpool.transfer.digest import Digest
from twinpool.transfer.fence import HandoffFailure, HandoffFault
from twinpool.transfer.session import PullListener, PullSession, PullState, ReadPort
from twinpool.transfer.ticket import PromptShape, Ticket, parse_ticket
from twinpool.v1 import handoff_pb2, worker_pb2

_log = get_logger(__name__)

RELEASE_RETRY_SECONDS = 1.0
"""A release that is not acknowledged is repeated so often ..."""

RELEASE_TRIES = 5
"""... and so many times; after that the owner's lease ends the pins."""

FLOOR_BYTES_PER_SECOND = 100e6
"""The slowest rate of a healthy pull: a network of 1 Gbit/s."""

RENEWALS_PER_LEASE = 3
"""A lease survives two lost renewals."""

Send = Callable[[WorkerKey, handoff_pb2.ExchangeRequest], None]
"""Queues a message to an owner; must not call back."""


@dataclass(slots=True)
class _Release:
    message: handoff_pb2.ExchangeRequest
    again_at: float
    tries: int = 1


class PullManager:
    """Feeds pull sessions. See the module for its thread."""

    def __init__(
        self,
        port: ReadPort,
        send: Send,
        *,
        block_bytes: int,
        read_deadline_seconds: float,
        floor_bytes_per_second: float = FLOOR_BYTES_PER_SECOND,
        digest: Digest | None = None,
        observer: TransferObserver | None = None,
    ) -> None:
        """A read may take ``read_deadline_seconds`` and the time of its bytes at ``floor_bytes_per_second``. ``digest`` None:
        digests in tickets are not checked."""
        self._port = port
        self._send = send
        self._block_bytes = block_bytes
        self._deadline_seconds = read_deadline_seconds
        self._block_seconds = block_bytes / floor_bytes_per_second
        self._digest = digest
        self._observer = observer if observer is not None else NullObserver()
        self._sessions: dict[AttemptKey, PullSession] = {}
        self._draining: set[PullSession] = set()
        self._releases: dict[tuple[WorkerKey, AttemptKey], _Release] = {}
        self._now = 0.0

    # --- counts ---

    @property
    def waiting(self) -> int:
        """Hand-offs that are not ready."""
        return len(self._sessions)

    @property
    def draining(self) -> int:
        """Hand-offs that failed and whose blocks may still be written to."""
        return len(self._draining)

    @property
    def quarantined_blocks(self) -> int:
        """Blocks of failed hand-offs that a pull may still write to."""
        return sum(len(session.writable_blocks) for session in self._draining)

    @property
    def unreleased(self) -> int:
        """Releases that their owner has not acknowledged."""
        return len(self._releases)

    # --- from the worker ---

    def expect(
        self,
        now: float,
        attempt: AttemptKey,
        owner: WorkerKey,
        shape: PromptShape,
        local: Blocks,
        listener: PullListener,
    ) -> PullSession:
        """Waits for an attempt's chunks, to be pulled into ``local`` (``int32[shape.wanted_blocks]``).

        Nothing to pull is legal: the hand-off is ready when the owner says Complete. Raises ValueError if the attempt
        is known or ``local`` has another length.
        """
        self._now = now
        session = self._add(attempt, owner, shape, local, listener, self._deadline_seconds, prefix=False)
        self._send(owner, handoff_pb2.ExchangeRequest(expect=handoff_pb2.Expect(id=attempt.message())))
        return session

    def fetch(
        self,
        now: float,
        key: AttemptKey,
        owner: WorkerKey,
        hashes: NDArray[np.uint8],
        shape: PromptShape,
        local: Blocks,
        listener: PullListener,
        *,
        deadline_seconds: float,
    ) -> PullSession:
        """Asks for cached blocks, ``hashes`` uint8[shape.wanted_blocks, 16], to be pulled into ``local``.

        ``shape`` is that of the prefix, ``key`` a name that no attempt has. The owner may hold fewer: see
        :attr:`PullSession.announced_blocks`. What is not here after ``deadline_seconds`` and the time of its bytes fails.
        Raises ValueError as :meth:`expect`.
        """
        self._now = now
        session = self._add(key, owner, shape, local, listener, deadline_seconds, prefix=True)
        session.expires_at = now + deadline_seconds + shape.wanted_blocks * self._block_seconds
        fetch = handoff_pb2.Fetch(
            id=key.message(), block_hashes=hashes.tobytes(), first_block=shape.first_block
        )
        self._send(owner, handoff_pb2.ExchangeRequest(fetch=fetch))
        return session

    def abort(self, now: float, attempt: AttemptKey) -> bool:
        """Gives up an attempt: the owner is told, ``on_drained`` follows. False if it is not waiting (any more)."""
        self._now = now
        session = self._sessions.get(attempt)
        if session is None:
            return False
        self._end(session, HandoffFailure.of(HandoffFault.ABORTED, "aborted"), report=False)
        return True

    def owner_lost(
        self,
        now: float,
        owner: WorkerKey,
        failure: HandoffFailure,
        attempts: Collection[AttemptKey] | None = None,
    ) -> None:
        """The link to an owner ended or never came up: what is not ready fails with ``failure``.

        ``attempts`` None: all that wait for this owner. The end of the link tells the owner, so nothing is released.
        """
        self._now = now
        for session in [s for s in self._sessions.values() if s.owner == owner]:
            if attempts is None or session.attempt in attempts:
                self._end(session, failure, release=False)
        for key in [key for key in self._releases if key[0] == owner]:
            del self._releases[key]

    def tick(self, now: float) -> None:
        """Renews leases and repeats releases that are due. Call it on a timer, at the latest at :meth:`next_wake`."""
        self._now = now
        due: dict[WorkerKey, list[int]] = {}
        for session in self._sessions.values():
            if session.renew_at is not None and session.renew_at <= now:
                session.renew_at = now + session.lease_seconds / RENEWALS_PER_LEASE
                due.setdefault(session.owner, []).append(session.transfer_id)
        for session in [
            s for s in self._sessions.values() if s.expires_at is not None and s.expires_at <= now
        ]:
            self._end(session, HandoffFailure.of(HandoffFault.DEADLINE, "the owner did not deliver in time"))
        for owner, ids in due.items():
            self._send(owner, handoff_pb2.ExchangeRequest(renew=handoff_pb2.Renew(transfer_ids=ids)))
        for key, release in list(self._releases.items()):
            if release.again_at <= now:
                self._repeat(key, release)

    def next_wake(self) -> float | None:
        """When :meth:`tick` has something to do; None if never."""
        times = [s.renew_at for s in self._sessions.values() if s.renew_at is not None]
        times += [s.expires_at for s in self._sessions.values() if s.expires_at is not None]
        times += [release.again_at for release in self._releases.values()]
        return min(times, default=None)

    # --- from owners ---

    def on_message(self, now: float, owner: WorkerKey, message: handoff_pb2.ExchangeResponse) -> None:
        """Takes a message that came over the stream to ``owner``."""
        self._now = now
        kind = message.WhichOneof("message")
        if kind == "chunk_ready":
            self._on_ticket(owner, message.chunk_ready, None)
        elif kind == "complete":
            session = self._sessions.get(AttemptKey.of(message.complete.ticket.id))
            if session is not None and session.owner == owner:
                session.traceparent = message.complete.traceparent
            self._on_ticket(owner, message.complete.ticket, message.complete.first_tokens)
        elif kind == "failed":
            self._on_failed(owner, message.failed)
        elif kind == "released":
            self._releases.pop((owner, AttemptKey.of(message.released.id)), None)
        elif kind == "lease_lost":
            self._on_lease_lost(owner, message.lease_lost.transfer_ids)
        else:
            _log.warning("handoff_message_unknown", owner=str(owner))

    def _on_ticket(
        self,
        owner: WorkerKey,
        message: handoff_pb2.Ticket,
        first_tokens: Sequence[worker_pb2.FirstToken] | None,
    ) -> None:
        attempt = AttemptKey.of(message.id)
        session = self._sessions.get(attempt)
        if session is None or session.owner != owner:
            # It was aborted here, or never asked for: either way the owner must not hold blocks for it.
            if (owner, attempt) not in self._releases:
                _log.info("ticket_of_unknown_attempt", owner=str(owner), attempt=str(attempt))
                self._observer.unknown_transfer("ticket")
                self._release(owner, attempt, message.transfer_id, success=False)
            return
        ticket = self._parse(session, message)
        failure = ticket if isinstance(ticket, HandoffFailure) else self._book(session, ticket, first_tokens)
        if failure is not None:
            self._end(session, failure)
        else:
            self._settle(session)

    def _add(
        self,
        key: AttemptKey,
        owner: WorkerKey,
        shape: PromptShape,
        local: Blocks,
        listener: PullListener,
        deadline_seconds: float,
        *,
        prefix: bool,
    ) -> PullSession:
        if key in self._sessions:
            raise ValueError(f"attempt {key} is expected already")
        session = PullSession(
            key,
            owner,
            shape,
            local,
            listener,
            block_bytes=self._block_bytes,
            digest=self._digest,
            deadline_seconds=deadline_seconds,
            block_seconds=self._block_seconds,
            prefix=prefix,
        )
        self._sessions[key] = session
        return session

    def _parse(self, session: PullSession, message: handoff_pb2.Ticket) -> Ticket | HandoffFailure:
        named = message.owner
        if named.name != session.owner.name or named.incarnation != session.owner.incarnation:
            detail = f"a ticket of {message.owner.name}@{message.owner.incarnation:016x} from {session.owner}"
            return HandoffFailure.of(HandoffFault.OWNER_CHANGED, detail)
        pool_blocks = self._port.pool_blocks(session.owner)
        if pool_blocks is None:
            return HandoffFailure.of(HandoffFault.PEER_LOST, f"the pool of {session.owner} is not connected")
        return parse_ticket(message, pool_blocks=pool_blocks, shape=session.shape)

    def _book(
        self, session: PullSession, ticket: Ticket, first_tokens: Sequence[worker_pb2.FirstToken] | None
    ) -> HandoffFailure | None:
        failure = session.accept(ticket)
        if failure is None and first_tokens is not None:
            failure = session.finish(list(first_tokens))
        if failure is not None:
            return failure
        session.lease_seconds = ticket.lease_seconds
        session.renew_at = self._now + ticket.lease_seconds / RENEWALS_PER_LEASE
        if len(ticket.blocks):
            session.pull(self._port, ticket, lambda failed: self._on_change(session, failed))
        return None

    def _on_failed(self, owner: WorkerKey, message: handoff_pb2.TransferFailed) -> None:
        session = self._sessions.get(AttemptKey.of(message.id))
        if session is not None and session.owner == owner:
            # An owner that refuses a fetch holds nothing for it.
            failure = HandoffFailure.of_owner(message.reason, message.detail)
            self._end(session, failure, release=not session.prefix)

    def _on_lease_lost(self, owner: WorkerKey, transfer_ids: Sequence[int]) -> None:
        lost = set(transfer_ids)
        for session in [s for s in self._sessions.values() if s.owner == owner and s.transfer_id in lost]:
            detail = f"the owner no longer holds transfer {session.transfer_id:016x}"
            self._end(session, HandoffFailure.of(HandoffFault.LEASE_LOST, detail))

    # --- ends ---

    def _on_change(self, session: PullSession, failure: HandoffFailure | None) -> None:
        if failure is not None:
            self._end(session, failure)
        else:
            self._settle(session)

    def _settle(self, session: PullSession) -> None:
        if session.state is PullState.WAITING and session.complete:
            session.state = PullState.READY
            del self._sessions[session.attempt]
            try:
                session.listener.on_ready(session, session.first_tokens or [])
            finally:
                # After it: the prompt waits, the owner does not.
                self._release(session.owner, session.attempt, session.transfer_id, success=True)
        elif session.state is PullState.FAILED and session.drained and session in self._draining:
            self._draining.discard(session)
            session.listener.on_drained(session)

    def _end(
        self, session: PullSession, failure: HandoffFailure, *, report: bool = True, release: bool = True
    ) -> None:
        if session.state is not PullState.WAITING:
            return
        session.state = PullState.FAILED
        del self._sessions[session.attempt]
        self._draining.add(session)
        if failure.fenced:
            self._observer.fence_failed(failure.fault)
        _log.info(
            "handoff_failed",
            attempt=str(session.attempt),
            owner=str(session.owner),
            fault=failure.fault,
            detail=failure.detail,
            draining_blocks=len(session.writable_blocks),
        )
        session.cancel(self._port)
        if release:
            self._release(session.owner, session.attempt, session.transfer_id, success=False)
        if report:
            session.listener.on_failed(session, failure)
        self._settle(session)

    def _release(self, owner: WorkerKey, attempt: AttemptKey, transfer_id: int, *, success: bool) -> None:
        release = handoff_pb2.Release(id=attempt.message(), transfer_id=transfer_id, success=success)
        message = handoff_pb2.ExchangeRequest(release=release)
        self._releases[owner, attempt] = _Release(message, self._now + RELEASE_RETRY_SECONDS)
        self._send(owner, message)

    def _repeat(self, key: tuple[WorkerKey, AttemptKey], release: _Release) -> None:
        if release.tries >= RELEASE_TRIES:
            self._observer.release_unanswered()
            _log.warning("release_not_acknowledged", owner=str(key[0]), attempt=str(key[1]))
            del self._releases[key]
            return
        release.tries += 1
        release.again_at = self._now + RELEASE_RETRY_SECONDS
        self._send(key[0], release.message)
