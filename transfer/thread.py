# SPDX-License-Identifier: Apache-2.0
"""The transfer thread: makes the agent and drives its pump. NIXL is called by this thread, and by no other meanwhile.

It sleeps between polls: ``poll_seconds`` while a pull or an offer is outstanding (an owner that does not poll stalls
its readers), ``idle_seconds`` otherwise, and a command wakes it at once. A read of few blocks takes tens of microseconds, so
after each post the first polls come sooner, each after twice the wait of the one before.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.transfer.base import (
    Blocks,
    PeerDescriptor,
    TransferAgent,
    TransferError,
    TransferObserver,
)
from twinpool.transfer.pull import Pull, PullOutcome
from twinpool.transfer.pump import CONNECT_SECONDS, Dispatch, Pace, TransferPump, run_here

_log = get_logger(__name__)

POLL_SECONDS = 150e-6
IDLE_SECONDS = 2e-3
EAGER_SECONDS = 10e-6
"""The first poll after a post comes so soon."""

_PR_SET_TIMERSLACK = 29


class TransferThread:
    """A pump with a thread. Commands may come from any thread; see :class:`TransferPump` for what they do."""

    def __init__(
        self,
        make_agent: Callable[[], TransferAgent],
        *,
        dispatch: Dispatch = run_here,
        observer: TransferObserver | None = None,
        poll_seconds: float = POLL_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
        max_post_bytes: int | None = None,
        pull_here: bool = False,
        name: str = "transfer",
    ) -> None:
        """``make_agent`` runs on the thread. Its errors come out of :meth:`start`.

        ``pull_here``: a small pull is stepped once by the thread that asks for it, which is called back there instead of
        through ``dispatch`` if that ends it: for a caller whose callbacks belong on the thread of its calls."""
        self._make_agent = make_agent
        self._dispatch = dispatch
        self._observer = observer
        self._delay = {Pace.NOW: 0.0, Pace.BUSY: poll_seconds, Pace.IDLE: idle_seconds}
        self._max_post_bytes = max_post_bytes
        self._clock = time.monotonic if pull_here else None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # A bare lock as a binary semaphore: an Event's wait makes a new lock each time, at 6,000 waits a second.
        self._awake = threading.Lock()
        self._awake.acquire()
        self._ready = threading.Event()
        self._stopping = False
        self._error: BaseException | None = None
        self._pump: TransferPump | None = None
        self._descriptor: PeerDescriptor | None = None
        self.ticks = 0
        """Rounds of the thread so far: a number that stands still tells that the thread does."""

    def start(self, timeout_seconds: float = 60.0) -> PeerDescriptor:
        """Starts the thread and returns what peers need. Raises what ``make_agent`` raised, or TimeoutError."""
        self._thread.start()
        if not self._ready.wait(timeout_seconds):
            raise TimeoutError(f"the transfer agent was not ready after {timeout_seconds:g} s")
        if self._error is not None:
            raise self._error
        return self.descriptor

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """Ends every pull as CLOSED, destroys the agent and joins the thread. Raises TimeoutError. Idempotent."""
        self._stopping = True
        self._wake()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"the transfer thread did not end within {timeout_seconds:g} s")

    @property
    def descriptor(self) -> PeerDescriptor:
        """Raises RuntimeError before :meth:`start` has returned."""
        if self._descriptor is None:
            raise RuntimeError("the transfer thread is not running")
        return self._descriptor

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def probe(
        self, on_result: Callable[[TransferError | None], None], deadline_seconds: float = CONNECT_SECONDS
    ) -> None:
        """Reads a generation of this worker's own table through the agent, as a peer would. ``on_result`` gets None or why
        that failed. Shows that thread, agent and registered memory work; says nothing of the network."""
        self._running.connect(self.descriptor, on_result, deadline_seconds)

    @property
    def in_flight(self) -> int:
        """Pulls that are not fenced."""
        return self._running.in_flight

    def connect(
        self,
        peer: PeerDescriptor,
        on_result: Callable[[TransferError | None], None],
        deadline_seconds: float = CONNECT_SECONDS,
    ) -> None:
        """See :meth:`TransferPump.connect`."""
        self._running.connect(peer, on_result, deadline_seconds)

    def disconnect(self, peer: WorkerKey) -> None:
        """See :meth:`TransferPump.disconnect`."""
        self._running.disconnect(peer)

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
        """See :meth:`TransferPump.pull`."""
        return self._running.pull(
            peer, remote, local, deadline_seconds=deadline_seconds, on_done=on_done, on_fenced=on_fenced
        )

    def cancel(self, pull: Pull) -> None:
        """See :meth:`TransferPump.cancel`."""
        self._running.cancel(pull)

    def set_offers(self, count: int) -> None:
        """See :meth:`TransferPump.set_offers`."""
        self._running.set_offers(count)

    def pool_blocks(self, peer: WorkerKey) -> int | None:
        """See :meth:`TransferPump.pool_blocks`."""
        return self._running.pool_blocks(peer)

    @property
    def _running(self) -> TransferPump:
        if self._pump is None:
            raise RuntimeError("the transfer thread is not running")
        return self._pump

    def _wake(self) -> None:
        with suppress(RuntimeError):  # awake already
            self._awake.release()

    def _run(self) -> None:
        _sharpen_timers()
        try:
            agent = self._make_agent()
            self._pump = TransferPump(
                agent,
                dispatch=self._dispatch,
                observer=self._observer,
                wake=self._wake,
                max_post_bytes=self._max_post_bytes,
                clock=self._clock,
            )
            self._descriptor = agent.descriptor
            # The pump holds the only reference that may remain: an agent ends with its last one.
            del agent
        except BaseException as error:
            self._error = error
            return
        finally:
            self._ready.set()
        self._drive(self._pump)

    def _drive(self, pump: TransferPump) -> None:
        posts, eager = 0, math.inf
        try:
            while not self._stopping:
                delay = self._delay[pump.tick(time.monotonic())]
                self.ticks += 1
                # What was posted and is over needs no poll; one that comes now stands in the way of the next pull.
                eager = EAGER_SECONDS if pump.posts != posts and pump.in_flight else 2 * eager
                posts = pump.posts
                delay = min(delay, eager)
                if delay:
                    self._awake.acquire(timeout=delay)
        except Exception:
            # The worker sees that the thread has ended, and ends too.
            _log.exception("transfer_thread_died")
        finally:
            pump.close()


def _sharpen_timers() -> None:
    """Lets this thread's waits end when they are due. Linux lets a wait of 20 µs last 50 µs longer, to save wake-ups."""
    libc = ctypes.CDLL(None, use_errno=True)
    with suppress(AttributeError):  # another system: its waits stay as they are
        libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
