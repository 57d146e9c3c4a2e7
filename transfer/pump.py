# SPDX-License-Identifier: Apache-2.0
"""Drives one agent: takes commands from any thread, moves pulls forward, reports what ended.

``tick`` runs on the thread that drives the agent and takes the time as an argument, so a test drives it by
hand. :class:`~twinpool.transfer.thread.TransferThread` gives it a thread.

A small pull may be stepped once on the thread that asks for it, where the driving thread sleeps: the change to that thread
and back takes longer than such a read. One lock says who touches the agent; who does not get it leaves the pull to the
driving thread. Nothing else differs: it is the same step, data and then generations, and what is not over after it goes
on in ``tick``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple

import numpy as np

from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.transfer.base import (
    Blocks,
    Fault,
    MemoryType,
    NullObserver,
    PeerDescriptor,
    TransferAgent,
    TransferError,
    TransferObserver,
)
from twinpool.transfer.pull import Pull, PullOutcome
from twinpool.transfer.shard import share_of
from twinpool.transfer.spans import count_runs

_log = get_logger(__name__)

CONNECT_SECONDS = 5.0

MAX_POST_BYTES: Final[dict[MemoryType, int]] = {"DRAM": 32 << 20, "VRAM": 512 << 20}
"""Most bytes of one post, by the memory of the pool. A post over shared memory copies before it returns: 32 MiB take about 5 ms.
One to a GPU only queues copies, so its limit is there for the length of the list."""

MAX_POST_DESCRIPTORS: Final = 1 << 16
"""Most descriptors of one post of parts of blocks, between workers of unequal degree."""

HERE_BYTES: Final[dict[MemoryType, int]] = {"DRAM": 8 << 20, "VRAM": 256 << 20}
"""The largest pull that the asking thread steps itself. Over shared memory that copies for up to a millisecond; to a GPU it
queues copies, some 6 µs for each block."""

Dispatch = Callable[[Callable[[], None]], None]
"""Runs a callback on the thread that wants it, such as ``loop.call_soon_threadsafe``."""


class Pace(Enum):
    """How soon the next tick is wanted."""

    NOW = "now"  # there is more to post
    BUSY = "busy"  # a pull or an offer is outstanding
    IDLE = "idle"  # nothing to wait for, or only for a peer that hangs


def run_here(callback: Callable[[], None]) -> None:
    """The dispatch that runs callbacks on the transfer thread itself."""
    callback()


class _PeerPool(NamedTuple):
    num_blocks: int
    block_bytes: int  # what is read of each block
    piece_blocks: int  # blocks of one post


def _tell_end(pull: Pull, outcome: PullOutcome) -> None:
    """A pull has ended, and nothing of it can land any more."""
    try:
        pull.on_done(outcome)
    finally:
        pull.on_fenced()


class TransferPump:
    """Commands may come from any thread; ``tick`` and ``close`` from one. Callbacks go through ``dispatch``."""

    def __init__(
        self,
        agent: TransferAgent,
        *,
        dispatch: Dispatch = run_here,
        observer: TransferObserver | None = None,
        wake: Callable[[], None] = lambda: None,
        max_post_bytes: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """``clock``: steps small pulls where they are asked for, and calls back there, maybe before ``pull`` returns."""
        self._agent = agent
        self._dispatch = dispatch
        self._observer = observer if observer is not None else NullObserver()
        self._wake = wake
        if max_post_bytes is None:
            max_post_bytes = MAX_POST_BYTES[agent.descriptor.pool.memory_type]
        self._piece_blocks = max(1, max_post_bytes // agent.descriptor.block_bytes)
        self._clock = clock
        self._here_bytes = HERE_BYTES[agent.descriptor.pool.memory_type] if clock is not None else 0
        self._driving = threading.Lock()  # held by whoever calls the agent
        self._held: list[Callable[[], None]] | None = None  # calls back that wait until it is free again
        self._lock = threading.Lock()
        self._commands: deque[Callable[[float], None]] = deque()
        self._closed = False
        self._pulls: list[Pull] = []  # not ended
        self._lingering: list[Pull] = []  # ended, not fenced
        self._unreported: list[tuple[Pull, PullOutcome]] = []
        self._offers = 0
        self._own = agent.descriptor
        self._pools: dict[WorkerKey, _PeerPool] = {}  # of connected peers
        self.posts = 0
        """Reads handed to the agent so far: a number that has grown tells that one may be done in microseconds."""

    # --- from any thread ---

    def connect(
        self,
        peer: PeerDescriptor,
        on_result: Callable[[TransferError | None], None],
        deadline_seconds: float = CONNECT_SECONDS,
    ) -> None:
        """Makes ``peer`` readable and reads one generation from it, so that a peer that cannot be reached is known
        before a prompt waits for it, and the first hand-off does not pay for the connection (20 ms).

        ``on_result`` gets None or why not; after a failure the peer is not connected.
        """
        self._submit(lambda now: self._connect(peer, on_result, deadline_seconds, now))

    def disconnect(self, peer: WorkerKey) -> None:
        """Forgets a peer. Pulls from it go on until they end."""
        self._submit(lambda _now: self._disconnect(peer))

    def pull(
        self,
        peer: WorkerKey,
        remote: Blocks,
        local: Blocks,
        *,
        deadline_seconds: float,
        on_done: Callable[[PullOutcome], None],
        on_fenced: Callable[[], None],
    ) -> Pull:
        """Reads ``remote[i]`` of ``peer`` into ``local[i]``, then the generations of ``remote``; at least one block.

        ``on_done`` is called once, ``on_fenced`` once after it: until then bytes may still land in ``local``.
        """
        pull = Pull(peer, remote, local, deadline_seconds, on_done, on_fenced)
        if self._pull_here(pull):
            return pull
        self._submit(lambda now: self._start(pull, now))
        return pull

    def cancel(self, pull: Pull) -> None:
        """Ends a pull as ABORTED; no effect if it has ended."""
        self._submit(lambda _now: self._cancel(pull))

    def set_offers(self, count: int) -> None:
        """How many offers this worker has outstanding as an owner: above 0 it polls at the busy pace."""
        self._offers = count
        self._wake()

    def pool_blocks(self, peer: WorkerKey) -> int | None:
        """Blocks of a connected peer's pool; None if it is not connected."""
        pool = self._pools.get(peer)
        return pool.num_blocks if pool is not None else None

    @property
    def in_flight(self) -> int:
        """Pulls that are not fenced. Exact on the driving thread, else a moment old."""
        return len(self._pulls) + len(self._lingering) + len(self._commands)

    # --- from the driving thread ---

    def tick(self, now: float) -> Pace:
        """Runs commands, serves this worker's readers and moves every pull forward."""
        with self._driving:
            return self._tick(now)

    def close(self) -> None:
        """Ends every pull as CLOSED, closes the agent, and only then reports them fenced."""
        with self._lock:
            self._closed = True
        with self._driving:
            self._close()

    # --- inside

    def _tick(self, now: float) -> Pace:
        while self._commands:
            self._commands.popleft()(now)
        self._agent.progress()
        if self._unreported:
            self._report_ends()
        for pull in list(self._pulls):
            self._step(pull, now)
        for pull in list(self._lingering):
            self._step(pull, now)
        if any(pull.hungry for pull in self._pulls):
            return Pace.NOW
        return Pace.BUSY if self._pulls or self._offers else Pace.IDLE

    def _close(self) -> None:
        while self._commands:
            self._commands.popleft()(0.0)
        for pull in list(self._pulls):
            self._finish(pull, pull.end(PullOutcome(Fault.CLOSED, "the agent is closed")))
        self._agent.close()
        self._report_ends()
        for pull in self._lingering:
            pull.forget()
            self._call(pull.on_fenced)
        self._lingering.clear()

    def _pull_here(self, pull: Pull) -> bool:
        """Steps a small pull on this thread. False: nothing was done, the driving thread has to do it."""
        clock = self._clock
        if clock is None or not 0 < len(pull.remote) * self._own.block_bytes <= self._here_bytes:
            return False
        if not self._driving.acquire(blocking=False):
            return False
        calls: list[Callable[[], None]] = []
        try:
            # What was asked for before this pull comes first.
            if self._closed or self._commands:
                return False
            self._held = calls
            now = clock()
            self._start(pull, now)
            self._step(pull, now)
        finally:
            self._held = None
            self._driving.release()
        if not pull.fenced:
            self._wake()
        for call in calls:
            self._guarded(call)
        return True

    def _submit(self, command: Callable[[float], None]) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._commands.append(command)
        if closed:
            command(0.0)  # only reports: each command looks at _closed first
        else:
            self._wake()

    def _connect(
        self,
        peer: PeerDescriptor,
        on_result: Callable[[TransferError | None], None],
        deadline_seconds: float,
        now: float,
    ) -> None:
        def on_done(outcome: PullOutcome) -> None:
            if outcome.fault is None:
                self._pools[peer.worker] = self._pool_of(peer)
                on_result(None)
            else:
                self.disconnect(peer.worker)
                on_result(TransferError(outcome.fault, outcome.detail))

        none = np.empty(0, np.int32)
        first = np.zeros(1, np.int32)
        probe = Pull(peer.worker, none, none, deadline_seconds, on_done, lambda: None, probe=first)
        if not self._closed:
            try:
                self._agent.connect(peer)
            except TransferError as error:
                self._finish(probe, probe.end(PullOutcome(error.fault, error.detail)))
                return
            except Exception as error:
                _log.exception("transfer_connect_raised", peer=str(peer.worker))
                self._finish(probe, probe.end(PullOutcome(Fault.UNKNOWN, f"{type(error).__name__}: {error}")))
                return
        self._start(probe, now)

    def _pool_of(self, peer: PeerDescriptor) -> _PeerPool:
        part = share_of(self._own.shard, peer.shard)
        if part is None:
            return _PeerPool(peer.num_blocks, self._own.block_bytes, self._piece_blocks)
        piece = min(self._piece_blocks, MAX_POST_DESCRIPTORS // part.descriptors)
        return _PeerPool(peer.num_blocks, part.block_bytes, max(1, piece))

    def _disconnect(self, peer: WorkerKey) -> None:
        self._pools.pop(peer, None)
        if not self._closed:
            self._agent.disconnect(peer)

    def _start(self, pull: Pull, now: float) -> None:
        if self._closed:
            self._finish(pull, pull.end(PullOutcome(Fault.CLOSED, "the agent is closed")))
            return
        pull.start(now)
        self._pulls.append(pull)

    def _cancel(self, pull: Pull) -> None:
        if not pull.ended:
            self._finish(pull, pull.end(PullOutcome(Fault.ABORTED, "cancelled by the caller")))

    def _step(self, pull: Pull, now: float) -> None:
        was_ended, posts = pull.ended, pull.posts
        try:
            pool = self._pools.get(pull.peer)
            outcome = pull.step(
                self._agent, now, pool.piece_blocks if pool is not None else self._piece_blocks
            )
        except Exception as error:
            # Nothing is known about its reads any more: it fails, and lingers until the agent's end.
            _log.exception("transfer_step_raised", peer=str(pull.peer))
            if was_ended:
                return
            outcome = pull.end(PullOutcome(Fault.UNKNOWN, f"{type(error).__name__}: {error}"))
        self.posts += pull.posts - posts
        if outcome is not None:
            self._finish(pull, outcome)
        elif was_ended and pull.fenced:
            self._lingering.remove(pull)
            self._call(pull.on_fenced)

    def _finish(self, pull: Pull, outcome: PullOutcome) -> None:
        if pull in self._pulls:
            self._pulls.remove(pull)
        if pull.fenced:
            # Both at once: each dispatch may wake a thread.
            self._call(lambda: _tell_end(pull, outcome))
        else:
            self._call(lambda: pull.on_done(outcome))
            self._lingering.append(pull)
        if outcome.fault is None:
            self._unreported.append((pull, outcome))
        else:
            self._report(pull, outcome)

    def _report_ends(self) -> None:
        """Tells the observer what succeeded before. Not at once: whoever was told of an end runs then, and needs the
        interpreter for the proof."""
        ended, self._unreported = self._unreported, []
        for pull, outcome in ended:
            self._report(pull, outcome)

    def _report(self, pull: Pull, outcome: PullOutcome) -> None:
        if len(pull.remote) == 0:
            return  # a probe
        if outcome.fault is not None:
            self._observer.pull_failed(outcome.fault)
            return
        pool = self._pools.get(pull.peer)
        self._observer.pulled(
            blocks=len(pull.remote),
            descriptors=count_runs(pull.remote, pull.local),
            size_bytes=len(pull.remote) * (pool.block_bytes if pool is not None else self._own.block_bytes),
            seconds=outcome.seconds,
            post_seconds=outcome.post_seconds,
        )

    def _call(self, callback: Callable[[], None]) -> None:
        if self._held is not None:
            self._held.append(callback)
        else:
            self._guarded(lambda: self._dispatch(callback))

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            # A callback's fault must not stop the transfers of everyone else.
            _log.exception("transfer_callback_raised")
