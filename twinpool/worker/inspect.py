# SPDX-License-Identifier: Apache-2.0
"""A worker's counts, all taken at one moment between two steps."""

from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.transfer.thread import TransferThread
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.commands import worker_id
from twinpool.worker.load import duration
from twinpool.worker.observer import WorkerObserver
from twinpool.worker.parts import WorkerParts
from twinpool.worker.step_loop import LoopEndedError, StepLoop, outcome


class Inspector:
    """Answers Inspect and says whether the worker is at rest."""

    def __init__(
        self,
        *,
        parts: WorkerParts,
        loop: StepLoop,
        transfer: TransferThread,
        observer: WorkerObserver,
        kv_bytes_per_token: int,
    ) -> None:
        self._worker: WorkerKey = parts.worker
        self._parts = parts
        self._loop = loop
        self._transfer = transfer
        self._observer = observer
        self._kv_bytes_per_token = kv_bytes_per_token
        self._started = parts.clock()

    async def inspect(self, sessions: int) -> pb.InspectResponse:
        """Waits for the end of the running step. Raises DRAINING once the step loop has ended."""
        try:
            return await outcome(self._loop.call(lambda: self.counts(sessions)))
        except LoopEndedError:
            raise TwinpoolError("DRAINING", f"worker {self._worker} has stopped") from None

    def counts(self, sessions: int) -> pb.InspectResponse:
        """On the step thread."""
        blocks, pulls = self._parts.blocks, self._parts.pulls
        scheduler, totals = self._parts.scheduler, self._parts.totals
        return pb.InspectResponse(
            worker=worker_id(self._worker),
            role=self._loop.role.role,
            total_blocks=blocks.num_blocks,
            free_blocks=blocks.free_blocks,
            cached_blocks=blocks.cached_blocks,
            held_blocks=blocks.held_blocks,
            pinned_blocks=blocks.pinned_blocks,
            quarantined_blocks=blocks.quarantined_blocks,
            requests=self._loop.role.requests,
            transfers=max(self._transfer.in_flight, pulls.waiting + pulls.draining),
            sessions=sessions,
            bytes_read=self._observer.bytes_read,
            kv_bytes_per_token=self._kv_bytes_per_token,
            fence_failures=self._observer.fence_failures,
            kept_answers=len(self._parts.kept),
            prefix_pinned_blocks=blocks.prefix_pinned_blocks,
            prefix_pins=blocks.prefix_pins,
            epoch=self._loop.role.epoch,
            running=scheduler.running,
            waiting=scheduler.waiting + scheduler.reserved,
            waiting_prefill_tokens=scheduler.waiting_tokens,
            step_time=duration(self._loop.load.step_seconds()),
            busy=duration(totals.busy_seconds),
            uptime=duration(self._parts.clock() - self._started),
            prompt_tokens=totals.prompt_tokens,
            generation_tokens=totals.generation_tokens,
            query_tokens=totals.query_tokens,
            hit_tokens=totals.hit_tokens,
        )
