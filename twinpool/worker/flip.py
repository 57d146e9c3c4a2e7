# SPDX-License-Identifier: Apache-2.0
"""A worker changes its role without a restart: the process, its engine, its KV pool and what is cached there stay.

    DRAINING    it says *flipping*, so that nobody places anything new; what runs ends, or moves to others
    COMMITTING  etcd is told which role it had last: the moment from which on the change counts
    COMMITTED   the role's object is replaced, in the next epoch, and the worker is ready again

What has not come to COMMITTED in its time is rolled back: role as before, in the next epoch all the same, so that whoever asks
under the former one again is told what became of it and begins nothing. Commands carry the epoch in which they were placed, and
those of another one are refused.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from twinpool import metrics
from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.membership import Registration
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.control_pb2 import WorkerState
from twinpool.worker.health import Health
from twinpool.worker.role_book import RETRY_SECONDS, RoleBook
from twinpool.worker.serving import Serving
from twinpool.worker.step_loop import LoopEndedError

NAMES: Final = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode"}

DRAINING: Final = pb.ROLE_CHANGE_PHASE_DRAINING
COMMITTING: Final = pb.ROLE_CHANGE_PHASE_COMMITTING
COMMITTED: Final = pb.ROLE_CHANGE_PHASE_COMMITTED
ROLLED_BACK: Final = pb.ROLE_CHANGE_PHASE_ROLLED_BACK

log = get_logger(__name__)


@dataclass(slots=True)
class _Change:
    """``epoch``: the one in which it was asked for. ``detail``: what it waits for, or why it was given up."""

    role: pb.Role.ValueType
    epoch: int
    phase: pb.RoleChangePhase.ValueType = DRAINING
    detail: str = ""

    @property
    def over(self) -> bool:
        return self.phase in (COMMITTED, ROLLED_BACK)


class RoleFlip:
    """One a worker that has started. On the event loop."""

    def __init__(
        self,
        key: WorkerKey,
        role: pb.Role.ValueType,
        serving: Serving,
        registration: Registration,
        health: Health,
        book: RoleBook,
        on_role: Callable[[pb.Role.ValueType], object],
        default_seconds: float,
    ) -> None:
        """``on_role`` is told of each new role, before the worker is ready in it. ``default_seconds``: how long a change may take
        that names no time."""
        self._key = key
        self._serving = serving
        self._registration = registration
        self._health = health
        self._book = book
        self._on_role = on_role
        self._default_seconds = default_seconds
        self.role = role
        self.epoch = 1
        self._change: _Change | None = None
        self._task: asyncio.Task[None] | None = None
        self._settling: asyncio.Task[None] | None = None
        _show(role)

    def ask(self, role: pb.Role.ValueType, epoch: int, seconds: float | None) -> pb.ChangeRoleResponse:
        """Begins the change to ``role``, or says how far it is. ``epoch``: the worker's, as the caller knows it.

        Raises STALE_EPOCH for another epoch, but for that of the last change; OPERATION_RUNNING if the worker is about to get the
        other role; FLIP_REFUSED if it leaves or is not fit.
        """
        change = self._change
        if change is not None and (change.role, change.epoch) == (role, epoch):
            return self._report(change)
        if epoch != self.epoch:
            detail = f"worker {self._key} is in epoch {self.epoch}, not {epoch}"
            raise TwinpoolError("STALE_EPOCH", detail, metadata={"epoch": self.epoch})
        if change is not None and not change.over:
            raise TwinpoolError(
                "OPERATION_RUNNING", f"worker {self._key} becomes a {NAMES[change.role]} worker"
            )
        if role == self.role:
            return self._report(_Change(role, epoch, COMMITTED))
        if self._health.draining or self._health.unfit:
            why = "it leaves" if self._health.draining else f"not fit: {', '.join(self._health.unfit)}"
            raise TwinpoolError("FLIP_REFUSED", f"worker {self._key} cannot change its role: {why}")
        wait = self._default_seconds if seconds is None else seconds
        change = self._change = _Change(role, epoch)
        log.info("flip_begun", worker=str(self._key), role=NAMES[role], epoch=epoch, seconds=wait)
        self._serving.hold_off(True)
        self._task = asyncio.create_task(self._run(change, wait), name="flip")
        return self._report(change)

    async def follow_last(self) -> None:
        """For a worker that could not read its last role when it started: changes to it once it can."""
        while True:
            try:
                last = await self._book.last()
                if last is not None and last != self.role and (self._change is None or self._change.over):
                    self.ask(last, self.epoch, None)
                return
            except TwinpoolError as error:
                log.warning("role_not_read", reason=error.reason, detail=error.message)
            await asyncio.sleep(RETRY_SECONDS)

    async def stop(self) -> None:
        """The worker leaves: a change that is under way stays as it is. Idempotent."""
        for task in (self._task, self._settling):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    # --- the steps

    async def _run(self, change: _Change, seconds: float) -> None:
        began = time.monotonic()
        await self._end_settling()
        self._health.begin_flip()
        self._registration.update_state(WorkerState.WORKER_STATE_FLIPPING)
        try:
            async with asyncio.timeout(seconds):
                await self._prepare(change)
        except TimeoutError:
            if not await self._counts(change):
                await self._roll_back(change, f"after {seconds:g} s: {change.detail}")
        except LoopEndedError:
            return  # the worker ends
        if change.phase != ROLLED_BACK:
            with contextlib.suppress(LoopEndedError):
                await self._commit(change)
        metrics.WORKER_FLIP_TIME.observe(time.monotonic() - began)
        outcome = "committed" if change.phase == COMMITTED else "rolled_back"
        metrics.WORKER_FLIPS.labels(outcome).inc()

    async def _prepare(self, change: _Change) -> None:
        change.detail = "etcd has not been told that the worker is flipping"
        await self._registration.written()
        change.detail = "what runs has not ended"
        await self._serving.free()
        change.phase, change.detail = COMMITTING, "etcd has not been told of the new role"
        await self._book.write(change.role, change.epoch + 1)

    async def _counts(self, change: _Change) -> bool:
        """Whether a change whose time is over was made all the same: its last write may have had no answer."""
        if not self._book.unsure:
            return False
        with contextlib.suppress(TwinpoolError):
            return await self._book.holds(change.role, change.epoch + 1)
        return False

    async def _commit(self, change: _Change) -> None:
        epoch = change.epoch + 1
        await self._serving.change_role(NAMES[change.role], epoch)
        self.role, self.epoch = change.role, epoch
        _show(change.role)
        self._on_role(change.role)
        self._reopen()
        change.phase, change.detail = COMMITTED, ""
        log.info("flip_committed", worker=str(self._key), role=NAMES[change.role], epoch=epoch)

    async def _roll_back(self, change: _Change, why: str) -> None:
        self.epoch = change.epoch + 1
        self._serving.raise_epoch(self.epoch)
        if self._book.unsure:
            # It may come late: what etcd says has to be the role that the worker has.
            self._settling = asyncio.create_task(self._book.write(self.role, self.epoch), name="flip-undo")
        self._reopen()
        change.phase, change.detail = ROLLED_BACK, why
        log.warning("flip_rolled_back", worker=str(self._key), role=NAMES[self.role], detail=why)

    def _reopen(self) -> None:
        self._registration.update_state(self._health.end_flip(), self.role, self.epoch)
        self._serving.hold_off(False)

    async def _end_settling(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.gather(self._settling, return_exceptions=True)
            self._settling = None

    def _report(self, change: _Change) -> pb.ChangeRoleResponse:
        return pb.ChangeRoleResponse(
            phase=change.phase, role=self.role, epoch=self.epoch, detail=change.detail
        )


def _show(role: pb.Role.ValueType) -> None:
    for each, name in NAMES.items():
        metrics.WORKER_ROLE.labels(name).set(int(each == role))
