# SPDX-License-Identifier: Apache-2.0
"""What a role plugs into a worker.

The worker hosts the engine, the pool, the streams and the threads; a role decides what to do with a
command and with a step's result. All methods of a role run on the step thread, so a role needs no locks,
and none may block: what takes time (dialling, reading blocks) is asked for and reported back by another call.
"""

from typing import Protocol

from twinpool._core import StepPlan
from twinpool.engine.runner import SequenceDraw, StepResult
from twinpool.ids import WorkerKey
from twinpool.transfer.base import AttemptKey, PeerDescriptor
from twinpool.transfer.offer import OfferEnd
from twinpool.v1 import handoff_pb2 as handoff
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.resume_pb2 import PortableState
from twinpool.worker.commands import Reason, Work


class RoleHandler(Protocol):
    """One role of one worker. Owns its attempts: whatever ends one, the role frees all that it holds."""

    @property
    def role(self) -> pb.Role.ValueType:
        """Which role this is."""
        ...

    epoch: int
    """The worker's epoch. It rises with each change of role, also with one that is given up; commands of another one are
    refused."""

    @property
    def requests(self) -> int:
        """Attempts that hold anything on this worker, and readers of its cached prefixes."""
        ...

    @property
    def attempts(self) -> int:
        """Attempts alone: what must have ended before the role can be replaced."""
        ...

    # routers
    def on_work(self, session: int, work: Work) -> None:
        """A checked command. Anything but an answer to the session is a bug of the role."""
        ...

    def on_session_closed(self, session: int) -> None:
        """The router is gone: all that it started ends, and nobody is told."""
        ...

    def take_over(self, stream_id: str, key: bytes, digest: bytes, forget: bool) -> PortableState | None:
        """Another router goes on with an answer: what is known of it. An attempt of it that runs here ends. ``forget``: it is
        over, and nothing of it is kept. By ``key``, where ``stream_id`` is empty: nothing ends and only the request is told if
        its digest is another one."""
        ...

    # steps
    def draws(self, plan: StepPlan) -> list[SequenceDraw]:
        """How to draw for each sequence of the plan, in the plan's order."""
        ...

    def on_step(self, plan: StepPlan, result: StepResult) -> None:
        """The step ran and the scheduler has advanced."""
        ...

    def on_step_failed(self, plan: StepPlan, detail: str) -> None:
        """The step raised and was aborted: every attempt of the plan fails with INTERNAL."""
        ...

    def fail_all(self, reason: Reason, detail: str) -> None:
        """Ends every attempt, told to its router and its peer."""
        ...

    # time
    def on_clock(self, now: float) -> None:
        """Ends what has run out: deadlines, leases. Runs in every turn of the loop, work or no work."""
        ...

    def next_wake(self, now: float) -> float | None:
        """When ``on_clock`` has something to do with no event before; None: never."""
        ...

    # as owner of blocks: other workers read from here
    def on_reader_opened(self, stream: int, reader: WorkerKey) -> None:
        """A reader opened its Exchange stream."""
        ...

    def on_reader_message(self, stream: int, message: handoff.ExchangeRequest) -> None:
        """A reader said something on its stream."""
        ...

    def on_reader_closed(self, stream: int) -> None:
        """The stream ended, which is the reader's death: what it still held is freed."""
        ...

    def on_offer_ended(self, key: AttemptKey, end: OfferEnd) -> None:
        """What was offered for an attempt is held no more, for a reason that the role did not give itself."""
        ...

    # as reader: this worker pulls from others
    def on_owner_opened(self, owner: PeerDescriptor) -> None:
        """The link to an owner is up: its metadata is loaded and the Exchange stream is open."""
        ...

    def on_owner_message(self, owner: WorkerKey, message: handoff.ExchangeResponse) -> None:
        """An owner said something."""
        ...

    def on_owner_lost(
        self, owner: WorkerKey, expected: list[AttemptKey], reason: Reason, detail: str
    ) -> None:
        """A link ended or never came up: the attempts that were expected over it fail with ``reason``."""
        ...
