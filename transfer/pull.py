# SPDX-License-Identifier: Apache-2.0
"""One pull: blocks from a peer into this worker, then the owner's generations of those blocks.

The state machine of a pull, driven by :class:`~twinpool.transfer.pump.TransferPump`::

    DATA --all pieces done--> GENERATIONS --done--> ENDED, fenced
      \\___ failure, deadline, cancel ___/-> ENDED --every posted read fenced--> ENDED, fenced

It ends exactly once and is fenced exactly once, in this order. Between the two the caller knows the outcome already
but must not reuse the destination blocks.

Why equal generations prove the bytes. The owner raises a block's generation before the first byte of new content goes
into it, and generations never go down. The read of the generations is posted only when the agent has reported every read
of the data DONE, that is, when every byte has left the owner's memory. Say that one of them was of newer content than the
ticket's. Then the raise came before the write of that byte, the write before its read, its read before DONE, DONE before the
post of the generations' read, and that before the look at the counter: the counter reads other than the ticket says, and the
pull is refused. Nothing in this chain depends on which thread steps the pull (``step`` runs under the pump's lock, so its
two posts have one order on whatever thread), on how often the owner polls, or on the transport; and nothing shorter would
do: transports do not order two reads that are in flight together, so a read of generations that is posted behind the data
before DONE could look first. A pull from several ranks is one such chain for each of them (``ranks``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from twinpool.ids import WorkerKey
from twinpool.transfer.base import (
    AgentBusy,
    Blocks,
    Fault,
    Generations,
    ReadHandle,
    ReadStatus,
    TransferAgent,
    TransferError,
)


@dataclass(frozen=True, slots=True)
class PullOutcome:
    """How a pull ended. ``fault`` None: all bytes arrived, and ``generations`` were read after them."""

    fault: Fault | None
    detail: str = ""
    generations: Generations | None = None
    seconds: float = 0.0
    post_seconds: float = 0.0


class _Phase(Enum):
    DATA = auto()
    GENERATIONS = auto()
    ENDED = auto()


class Pull:
    """A pull in the pump. Opaque to callers, except that ``cancel`` takes it."""

    def __init__(
        self,
        peer: WorkerKey,
        remote: Blocks,
        local: Blocks,
        deadline_seconds: float,
        on_done: Callable[[PullOutcome], None],
        on_fenced: Callable[[], None],
        *,
        probe: Blocks | None = None,
    ) -> None:
        """``probe``: read the generations of these blocks instead of those of ``remote``, which may be empty then."""
        self.peer = peer
        self.remote = remote
        self.local = local
        self._generations_of = remote if probe is None else probe
        self.deadline_seconds = deadline_seconds
        self.on_done = on_done
        self.on_fenced = on_fenced
        self._deadline: float | None = None
        self._phase = _Phase.DATA
        self._posted = 0  # blocks handed to the agent
        self._live: list[ReadHandle] = []
        self._began = 0.0
        self._post_seconds = 0.0
        self.posts = 0
        """Reads handed to the agent so far."""

    @property
    def ended(self) -> bool:
        return self._phase is _Phase.ENDED

    @property
    def fenced(self) -> bool:
        """Whether no byte of this pull can land any more. True only after the end."""
        return self.ended and not self._live

    @property
    def hungry(self) -> bool:
        """Whether there is something left to post: do not sleep."""
        return self._phase is _Phase.DATA and self._posted < len(self.remote)

    def start(self, now: float) -> None:
        """The clock of the deadline starts."""
        self._deadline = now + self.deadline_seconds
        self._began = time.perf_counter()

    def step(self, agent: TransferAgent, now: float, piece_blocks: int) -> PullOutcome | None:
        """Polls, posts what is next and returns the outcome at the moment of the end, else None.

        At most ``piece_blocks`` blocks are posted: a post over shared memory copies before it returns, and this
        worker's own readers wait meanwhile.
        """
        outcome = self._poll(agent)
        if self.ended:
            return outcome
        if self._deadline is not None and now >= self._deadline:
            return self.end(PullOutcome(Fault.DEADLINE, f"not done after {self.deadline_seconds:g} s"))
        try:
            if self.hungry:
                self._post_piece(agent, piece_blocks)
                outcome = self._poll(agent)
            if not self.ended and self._phase is _Phase.DATA and not self.hungry and not self._live:
                self._post_generations(agent)
                outcome = self._poll(agent)
        except AgentBusy:
            return None
        except TransferError as error:
            return self.end(PullOutcome(error.fault, error.detail))
        return outcome

    def end(self, outcome: PullOutcome) -> PullOutcome:
        """Ends the pull; reads that are still posted linger until they are fenced."""
        self._phase = _Phase.ENDED
        return outcome

    def forget(self) -> None:
        """The agent is closed: whatever was posted is fenced."""
        self._live.clear()

    def _post_piece(self, agent: TransferAgent, piece_blocks: int) -> None:
        low, high = self._posted, min(self._posted + piece_blocks, len(self.remote))
        began = time.perf_counter()
        handle = agent.read(self.peer, self.remote[low:high], self.local[low:high])
        self._post_seconds += time.perf_counter() - began
        self._live.append(handle)
        self._posted = high
        self.posts += 1

    def _post_generations(self, agent: TransferAgent) -> None:
        self._live.append(agent.read_generations(self.peer, self._generations_of))
        self.posts += 1
        self._phase = _Phase.GENERATIONS

    def _poll(self, agent: TransferAgent) -> PullOutcome | None:
        outcome: PullOutcome | None = None
        for handle in list(self._live):
            state = agent.poll(handle)
            if state.status is ReadStatus.PENDING:
                continue
            if state.status is ReadStatus.DONE and self._phase is _Phase.GENERATIONS:
                outcome = self.end(self._success(agent.generations(handle)))
            elif state.status is not ReadStatus.DONE and not self.ended:
                outcome = self.end(PullOutcome(state.fault or Fault.UNKNOWN, state.detail))
            if state.fenced:
                self._live.remove(handle)
                agent.release(handle)
        return outcome

    def _success(self, generations: Generations) -> PullOutcome:
        return PullOutcome(None, "", generations, time.perf_counter() - self._began, self._post_seconds)
