# SPDX-License-Identifier: Apache-2.0
"""One hand-off as its reader sees it: tickets in, pulls out, and one end.

::

    WAITING --Complete, all chunks proven--> READY
       \\____ failure, abort ____/-> FAILED --every pull fenced--> drained

Tickets have to come in prompt order without a gap; anything else is a fault of the owner or of the way, and fails
the hand-off. A pending failure beats a success that arrives later.

The fetch of a cached prefix is the same with one ticket, which may hold fewer blocks than were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from twinpool.ids import WorkerKey
from twinpool.transfer.base import AttemptKey, Blocks, Fault
from twinpool.transfer.digest import Digest
from twinpool.transfer.fence import HandoffFailure, HandoffFault, check_digests, check_generations
from twinpool.transfer.pull import Pull, PullOutcome
from twinpool.transfer.ticket import PromptShape, Ticket
from twinpool.v1 import worker_pb2


class ReadPort(Protocol):
    """What pulls need of the transfer thread. Callbacks arrive on the reader's thread, maybe before ``pull`` returns."""

    def pull(
        self,
        peer: WorkerKey,
        remote: Blocks,
        local: Blocks,
        *,
        deadline_seconds: float,
        on_done: Callable[[PullOutcome], None],
        on_fenced: Callable[[], None],
    ) -> Pull: ...

    def cancel(self, pull: Pull) -> None: ...

    def pool_blocks(self, peer: WorkerKey) -> int | None:
        """Blocks of a connected peer's pool; None if it is not connected."""
        ...


class PullState(Enum):
    WAITING = "waiting"  # for tickets or for pulls
    READY = "ready"  # all of the prompt's blocks are here and proven
    FAILED = "failed"  # failed or aborted; blocks may still be written to until drained


@dataclass(slots=True)
class PullStats:
    """What a hand-off moved. ``read_seconds`` sums the time that pulls were in flight."""

    blocks: int = 0
    size_bytes: int = 0
    read_seconds: float = 0.0
    chunks: int = 0


class PullListener(Protocol):
    """Whoever asked for a hand-off. Exactly one of: ``on_ready``; or ``on_drained``, before it maybe ``on_failed``."""

    def on_ready(self, session: PullSession, first_tokens: Sequence[worker_pb2.FirstToken]) -> None:
        """All blocks are here and proven; the owner has been told to let go."""

    def on_failed(self, session: PullSession, failure: HandoffFailure) -> None:
        """The hand-off failed (not called for an abort). Its blocks must not be reused before ``on_drained``."""

    def on_drained(self, session: PullSession) -> None:
        """After a failure or an abort: nothing can be written into the session's blocks any more."""


@dataclass(slots=True, eq=False)
class _Chunk:
    ticket: Ticket
    local: Blocks
    pull: Pull | None = None
    proven: bool = False


class PullSession:
    """One hand-off. Made and fed by :class:`~twinpool.transfer.reader.PullManager`; callers only look at it."""

    def __init__(
        self,
        attempt: AttemptKey,
        owner: WorkerKey,
        shape: PromptShape,
        local: Blocks,
        listener: PullListener,
        *,
        block_bytes: int,
        digest: Digest | None,
        deadline_seconds: float,
        block_seconds: float = 0.0,
        prefix: bool = False,
    ) -> None:
        """A read may take ``deadline_seconds`` and ``block_seconds`` for each of its blocks. ``prefix``: a fetch of cached
        blocks instead of a hand-off."""
        if len(local) != shape.wanted_blocks:
            raise ValueError(f"{len(local)} blocks for {shape.wanted_blocks} to pull")
        self.attempt = attempt
        self.owner = owner
        self.shape = shape
        self.listener = listener
        self.state = PullState.WAITING
        self.stats = PullStats()
        self.transfer_id = 0
        self.prefix = prefix
        self.renew_at: float | None = None
        self.expires_at: float | None = None  # when it has waited too long; None: its attempt knows
        self.lease_seconds = 0.0
        self.traceparent = ""  # of the owner's span, once it is complete
        self.first_tokens: Sequence[worker_pb2.FirstToken] | None = None
        self._local = local
        self._block_bytes = block_bytes
        self._digest = digest
        self._deadline_seconds = deadline_seconds
        self._block_seconds = block_seconds
        self._next_block = shape.first_block
        self._live: list[_Chunk] = []  # pulls that are not fenced

    @property
    def announced_blocks(self) -> int:
        """Blocks that the owner has offered so far; the first so many of the local ones are for them."""
        return self._next_block - self.shape.first_block

    @property
    def unproven(self) -> int:
        """Chunks announced whose bytes are not here or not proven."""
        return sum(1 for chunk in self._live if not chunk.proven)

    @property
    def drained(self) -> bool:
        """Whether nothing can be written into the blocks any more."""
        return not self._live

    @property
    def writable_blocks(self) -> Blocks:
        """Local blocks that a pull may still write to."""
        if not self._live:
            return np.empty(0, dtype=np.int32)
        return np.concatenate([chunk.local for chunk in self._live])

    @property
    def complete(self) -> bool:
        """Whether the owner has announced all and all of it is here and proven."""
        return self.first_tokens is not None and not self.unproven

    def accept(self, ticket: Ticket) -> HandoffFailure | None:
        """Books a ticket, or says why it contradicts what came before."""
        if self.transfer_id not in (0, ticket.transfer_id):
            detail = f"transfer {ticket.transfer_id:016x} after {self.transfer_id:016x}"
            return HandoffFailure.of(HandoffFault.WRONG_TRANSFER, detail)
        if self.first_tokens is not None:
            return HandoffFailure.of(HandoffFault.OUT_OF_ORDER, "a ticket after the last one")
        if ticket.first_block != self._next_block:
            detail = f"ticket starts at block {ticket.first_block}, block {self._next_block} is next"
            return HandoffFailure.of(HandoffFault.OUT_OF_ORDER, detail)
        if self.prefix and not len(ticket.blocks):
            return HandoffFailure.of(HandoffFault.SHORT, "a prefix without a block")
        self.transfer_id = ticket.transfer_id
        self._next_block = ticket.end_block
        if self.prefix:
            self.first_tokens = ()
        return None

    def finish(self, first_tokens: Sequence[worker_pb2.FirstToken]) -> HandoffFailure | None:
        """The last ticket has been accepted."""
        if self._next_block != self.shape.prompt_blocks:
            detail = f"complete after {self._next_block} of {self.shape.prompt_blocks} blocks"
            return HandoffFailure.of(HandoffFault.SHORT, detail)
        if not first_tokens:
            return HandoffFailure.of(HandoffFault.SHORT, "complete without a first token")
        self.first_tokens = first_tokens
        return None

    def pull(
        self, port: ReadPort, ticket: Ticket, on_change: Callable[[HandoffFailure | None], None]
    ) -> None:
        """Pulls a ticket's blocks. ``on_change`` is called when they are proven or not, and when they are fenced."""
        offset = ticket.first_block - self.shape.first_block
        chunk = _Chunk(ticket, self._local[offset : offset + len(ticket.blocks)])
        self._live.append(chunk)

        def on_done(outcome: PullOutcome) -> None:
            on_change(self._prove(chunk, outcome))

        def on_fenced() -> None:
            self._live.remove(chunk)
            on_change(None)

        chunk.pull = port.pull(
            self.owner,
            ticket.blocks,
            chunk.local,
            deadline_seconds=self._deadline_seconds + len(ticket.blocks) * self._block_seconds,
            on_done=on_done,
            on_fenced=on_fenced,
        )

    def cancel(self, port: ReadPort) -> None:
        """Ends the pulls that are running."""
        for chunk in list(self._live):
            if chunk.pull is not None:
                port.cancel(chunk.pull)

    def _prove(self, chunk: _Chunk, outcome: PullOutcome) -> HandoffFailure | None:
        if self.state is not PullState.WAITING:
            return None
        if outcome.fault is not None or outcome.generations is None:
            return HandoffFailure.of_read(outcome.fault or Fault.UNKNOWN, outcome.detail)
        failure = check_generations(chunk.ticket.generations, outcome.generations)
        if failure is None and chunk.ticket.digests and self._digest is not None:
            failure = check_digests(chunk.ticket.digests, self._digest(chunk.local))
        if failure is None:
            chunk.proven = True
            self.stats.chunks += 1
            self.stats.blocks += len(chunk.local)
            self.stats.size_bytes += len(chunk.local) * self._block_bytes
            self.stats.read_seconds += outcome.seconds
        return failure
