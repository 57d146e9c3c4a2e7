# SPDX-License-Identifier: Apache-2.0
"""Threads and streams over a loaded engine: everything of a worker but its process and its record."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from twinpool import launch, rpc
from twinpool.config import TwinpoolConfig
from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.transfer.base import TransferError
from twinpool.transfer.thread import TransferThread
from twinpool.v1 import handoff_pb2, handoff_pb2_grpc, worker_pb2_grpc
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.agents import TransferPeers, agent_factory
from twinpool.worker.assembly import Surroundings, assemble
from twinpool.worker.handoff_client import OwnerLinks
from twinpool.worker.handoff_server import HandoffService
from twinpool.worker.heat import Chain, PromptHeat, hottest
from twinpool.worker.inspect import Inspector
from twinpool.worker.kv_events.shadow import RawEvent
from twinpool.worker.observer import WorkerObserver
from twinpool.worker.prefix_take import PrefixTaker
from twinpool.worker.role import RoleHandler
from twinpool.worker.seam import seam_of
from twinpool.worker.session import ChangeRole, WorkerService
from twinpool.worker.stack import EngineStack
from twinpool.worker.step_loop import LoopEndedError, StepLoop, outcome

STEP_STOP_SECONDS: Final = 30.0
"""Longest wait for the step that runs when the worker stops."""

STALLED_STOP_SECONDS: Final = 1.0
"""The same for a worker one of whose loops stands still: it is most likely this one."""

log = get_logger(__name__)


class Serving:
    """Made and used on one event loop. ``failed`` is set to the reason if it can't go on by itself."""

    def __init__(
        self,
        config: TwinpoolConfig,
        role_name: str,
        worker: WorkerKey,
        stack: EngineStack,
        on_cache_events: Callable[[list[RawEvent]], None] | None = None,
        on_cordon: Callable[[bool], object] = lambda _cordoned: None,
    ) -> None:
        """``on_cache_events``: see ``Surroundings``; ``on_cordon``: see ``WorkerService``."""
        self._config = config
        self._role_name = role_name
        self._worker = worker
        self._on_cordon = on_cordon
        self._aio = asyncio.get_running_loop()
        self.failed: asyncio.Future[str] = self._aio.create_future()
        self._observer = WorkerObserver()
        transfer, seam = config.transfer, seam_of(worker)
        stack = self._stack = replace(stack, runner=seam.runner(stack.runner))
        make_agent = agent_factory(transfer, worker, stack)
        self._transfer = TransferThread(
            lambda: seam.agent(make_agent()),
            dispatch=lambda callback: self._loop.post(callback),
            observer=self._observer,
            poll_seconds=transfer.poll_microseconds / 1e6,
            idle_seconds=transfer.idle_poll_microseconds / 1e6,
            pull_here=True,
            name="twinpool-transfer",
        )
        around = Surroundings(
            port=self._transfer,
            receiver=seam.receiver(self),
            post=self._aio.call_soon_threadsafe,
            observer=self._observer,
            on_offers=self._transfer.set_offers,
            on_fatal=self._on_fatal,
            on_cache_events=on_cache_events,
        )
        self._assembly = assemble(config, role_name, worker, stack, around)
        self._loop: StepLoop = self._assembly.loop
        self._transfer_started = self._stalled = False
        self._heat = PromptHeat()
        self.drain_asked: asyncio.Future[float | None] = self._aio.create_future()
        """Done when somebody has asked the worker to leave, with how long its requests may take (None: as configured)."""
        self.flip: ChangeRole | None = None
        """Who changes the worker's role; None: the worker has not started."""
        self._sessions: WorkerService | None = None
        self._readers: HandoffService | None = None
        self._owners: OwnerLinks | None = None

    # --- Receiver: messages of the step thread

    def to_session(self, session: int, message: pb.SessionResponse) -> None:
        """See Receiver."""
        if self._sessions is not None:
            self._sessions.deliver(session, message)

    def to_reader(self, stream: int, message: handoff_pb2.ExchangeResponse) -> None:
        """See Receiver."""
        if self._readers is not None:
            self._readers.deliver(stream, message)

    def to_owner(self, owner: WorkerKey, endpoint: str, message: handoff_pb2.ExchangeRequest) -> None:
        """See Receiver."""
        if self._owners is not None:
            self._owners.deliver(owner, endpoint, message)

    # --- life

    @property
    def seconds_since_turn(self) -> float:
        """Age of the step loop's last turn. Beyond the length of a step, the thread is stuck."""
        return self._loop.seconds_since_turn

    @property
    def step_progress(self) -> int:
        """See ``StepLoop.progress``."""
        return self._loop.progress

    @property
    def transfer_ticks(self) -> int:
        """See ``TransferThread.ticks``."""
        return self._transfer.ticks

    @property
    def transfer_alive(self) -> bool:
        """Whether the transfer thread runs."""
        return self._transfer.alive

    def probe_transfer(self, on_result: Callable[[TransferError | None], None]) -> None:
        """See ``TransferThread.probe``. ``on_result`` is called on the step thread."""
        self._transfer.probe(on_result)

    def stall(self, why: str) -> None:
        """Ends every session and takes none until it is called with "": see ``WorkerService.stall``."""
        self._stalled = bool(why)
        if self._sessions is not None:
            self._sessions.stall(why)

    def refuse(self, why: str) -> None:
        """Refuses new work until it is called with ""; what runs goes on."""
        if self._sessions is not None:
            self._sessions.refuse(why)

    # --- a change of role; see ``RoleFlip``

    def hold_off(self, flipping: bool) -> None:
        """Refuses new work while the worker changes its role; what runs goes on."""
        if self._sessions is not None:
            self._sessions.hold_off(flipping)

    async def free(self) -> None:
        """Waits until no attempt is left. Others may read cached prefixes meanwhile and afterwards. Raises LoopEndedError."""
        await outcome(self._loop.when_quiet(readers=False))

    async def change_role(self, role_name: str, epoch: int) -> None:
        """Gives the worker another role, with all that it has. Raises LoopEndedError."""
        role: RoleHandler = launch.role_factory(role_name)(self._assembly.parts)
        role.epoch = epoch
        await outcome(self._loop.call(partial(self._loop.replace_role, role)))

    def raise_epoch(self, epoch: int) -> None:
        """The worker keeps its role; commands of earlier epochs are refused from now on."""

        def rise() -> None:
            self._loop.role.epoch = epoch

        self._loop.post(rise)

    def _change_asked(
        self, role: pb.Role.ValueType, epoch: int, seconds: float | None
    ) -> pb.ChangeRoleResponse:
        if self.flip is None:
            raise TwinpoolError("FLIP_REFUSED", f"worker {self._worker} is starting")
        return self.flip(role, epoch, seconds)

    async def start(self, server: rpc.Server) -> None:
        """Registers the pool with the transfer layer, starts the threads and adds the services to ``server``.

        Raises what the agent raises: TransferError, ImportError.
        """
        self._transfer_started = True
        own = await asyncio.to_thread(self._transfer.start)
        parts, config = self._assembly.parts, self._config
        inspector = Inspector(
            parts=parts,
            loop=self._loop,
            transfer=self._transfer,
            observer=self._observer,
            kv_bytes_per_token=self._stack.pool.kv_bytes_per_token,
        )
        self._sessions = WorkerService(
            worker=self._worker,
            limits=parts.limits,
            loop=self._loop,
            inspector=inspector,
            heat=self._heat,
            taker=PrefixTaker(self._loop, parts.fetcher, parts.limits),
            pins=parts.pins,
            on_drain=self._drain_asked,
            on_change_role=self._change_asked,
            on_cordon=self._on_cordon,
            grammars=self._stack.grammars,
        )
        self._readers = HandoffService(own=own, loop=self._loop, role_domain=config.tls.role_domain)
        self._owners = OwnerLinks(
            own=own, peers=TransferPeers(self._transfer), loop=self._loop, config=config.rpc, tls=config.tls
        )
        server.add(
            "twinpool.v1.WorkerService", worker_pb2_grpc.add_WorkerServiceServicer_to_server, self._sessions
        )
        server.add(
            "twinpool.v1.HandoffService", handoff_pb2_grpc.add_HandoffServiceServicer_to_server, self._readers
        )
        self._loop.start()

    async def drain(self, seconds: float, linger_seconds: float) -> bool:
        """Refuses new work and waits until nothing runs, at most ``seconds``; what is left then fails with
        NOT_SERVING, which routers place anew. Whether all of it had ended by itself.

        ``linger_seconds``: answers that went on elsewhere pull what is cached here, if anything ran."""
        if self._sessions is not None:
            self._sessions.drain()
        try:
            async with asyncio.timeout(seconds):
                await self._quiet_and_left(linger_seconds)
            return True
        except TimeoutError:
            log.warning("drain_timeout", seconds=seconds)
        except LoopEndedError:
            return False
        with contextlib.suppress(LoopEndedError, TimeoutError):
            async with asyncio.timeout(STEP_STOP_SECONDS):
                await outcome(self._loop.call(self._fail_rest))
        return False

    async def hot_prefixes(self, bytes_max: int) -> list[Chain]:
        """The most used prefixes that are cached here, of at most so many bytes; the most used first."""
        memory = self._stack.memory
        blocks_max = bytes_max // memory.block_bytes
        if blocks_max == 0:
            return []
        cached = await outcome(self._loop.call(self._cached_prompts))
        return await asyncio.to_thread(hottest, cached, blocks_max)

    def _cached_prompts(self) -> list[Chain]:
        """On the step thread: prompts of late, as far as they are cached."""
        blocks = self._stack.blocks
        found = ((chain, blocks.lookup(chain.hashes)) for chain in self._heat.newest())
        return [Chain(chain.root, chain.hashes[:length]) for chain, length in found if length]

    def _drain_asked(self, seconds: float | None) -> None:
        if not self.drain_asked.done():
            self.drain_asked.set_result(seconds)

    async def _quiet_and_left(self, linger_seconds: float) -> None:
        busy = self._loop.role.requests > 0
        await outcome(self._loop.when_quiet())
        if busy:
            await asyncio.sleep(linger_seconds)

    async def close_streams(self) -> None:
        """Ends every stream, after what is queued for it."""
        if self._sessions is not None:
            self._sessions.close()
        if self._readers is not None:
            self._readers.close()
        if self._owners is not None:
            await self._owners.close()

    async def stop(self) -> None:
        """Ends the threads. Reads in flight end as failed, and are fenced by the end of the agent."""
        seconds = STALLED_STOP_SECONDS if self._stalled else STEP_STOP_SECONDS
        if not await asyncio.to_thread(self._loop.stop, seconds):
            log.error("step_thread_stuck", seconds=seconds)
        if self._transfer_started:
            await asyncio.to_thread(self._transfer.stop)

    def _fail_rest(self) -> None:
        self._loop.role.fail_all(pb.FAILURE_REASON_NOT_SERVING, f"worker {self._worker} stops")
        self._assembly.parts.outbox.flush()

    def _on_fatal(self, detail: str) -> None:
        self._aio.call_soon_threadsafe(self._fail, detail)

    def _fail(self, detail: str) -> None:
        if not self.failed.done():
            self.failed.set_result(detail)
