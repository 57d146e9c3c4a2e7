# SPDX-License-Identifier: Apache-2.0
"""A worker without a model: it speaks WorkerService over real gRPC and does what its script says.

It keeps the rules of a real worker (one token a choice from prefill, one message a decode step, every cancel
acknowledged, the end of a stream cancels what ran on it), so a router that satisfies it satisfies the protocol. What it
saw and what it still holds can be asked at any time.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine

import grpc
import grpc.aio
import numpy as np

from tests.support.fake_cache import FakeCache
from tests.support.fake_job import FIRST_TOKEN, AttemptKey, Job, Script, counting_token, fake_logprobs
from tests.support.fake_kept import FakeKept
from tests.support.fake_pins import PinningWorker
from twinpool.ids import WorkerKey, new_incarnation
from twinpool.v1 import control_pb2, worker_pb2_grpc
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.resume_pb2 import PortableState

__all__ = ["FIRST_TOKEN", "AttemptKey", "Fabric", "FakeWorker", "Job", "Script", "counting_token"]


class Fabric:
    """Stands for the hand-off between fake workers: what prefill has drawn reaches the reader."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self._done: dict[AttemptKey, asyncio.Future[list[pb.FirstToken]]] = {}

    def of(self, key: AttemptKey) -> asyncio.Future[list[pb.FirstToken]]:
        """The attempt's first tokens, once prefill is done."""
        if key not in self._done:
            self._done[key] = asyncio.get_running_loop().create_future()
        return self._done[key]

    def lose(self, key: AttemptKey) -> None:
        """The owner died: the reader finds out."""
        if not self.of(key).done():
            self.of(key).set_exception(ConnectionError("owner lost"))
            self.of(key).exception()  # seen, even if nobody reads


class _Session:
    """One router's stream."""

    def __init__(self) -> None:
        self.outbox: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()
        self.jobs: dict[AttemptKey, Job] = {}
        self.running: dict[AttemptKey, Job] = {}

    def send(self, **message: object) -> None:
        self.outbox.put_nowait(pb.SessionResponse(**message))  # type: ignore[arg-type]


class FakeWorker(PinningWorker):
    """``await start()``, then give ``record()`` to a router.

    ``overlaps``: attempts that came while an older attempt of the same request was still held here. ``calls``: streams so far.
    """

    def __init__(
        self,
        name: str,
        role: "pb.Role.ValueType",
        fabric: Fabric,
        script: Script | None = None,
        **record: object,
    ) -> None:
        self.key = WorkerKey(name, new_incarnation())
        self.role, self.epoch = role, 1
        self.script = script or Script()
        self.fabric = fabric
        self.prefills: list[pb.PrefillCommand] = []
        self.decodes: list[pb.DecodeCommand] = []
        self.cancels: list[AttemptKey] = []
        self.overlaps: list[AttemptKey] = []
        self.kept = FakeKept(name)
        self.calls = 0
        self.sessions: list[_Session] = []
        self.port = 0
        # With one, prefills report what they really found in it, and it publishes its KV events.
        self.cache: FakeCache | None = None
        self._fields: dict[str, object] = record
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None
        fabric.workers.append(self)

    # --- life -----------------------------------------------------------------------------

    async def start(self) -> None:
        """Listens, on the port it had before if it was started before."""
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", 64 << 20),
                ("grpc.so_reuseport", 0),
                # As a real one: a router that pings on a silent stream is not told to go away.
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            ]
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def kill(self) -> None:
        """Ends like a process that was killed: streams break, nothing is acknowledged."""
        if self.role == pb.ROLE_PREFILL:
            for key in self.held:
                self.fabric.lose(key)
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    async def restart(self) -> None:
        """Another incarnation on the same port."""
        await self.kill()
        self.key = WorkerKey(self.key.name, new_incarnation())
        await self.start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def held(self) -> set[AttemptKey]:
        """Attempts for which something is held."""
        return {key for session in self.sessions for key in session.jobs}

    def record(self, state: "control_pb2.WorkerState.ValueType" = control_pb2.WORKER_STATE_READY):  # type: ignore[no-untyped-def]
        """What it would register."""
        values: dict[str, object] = {
            "pool": "default",
            "fingerprint": "fake-v1",
            "model": "fake",
            "family": "llama",
            "num_blocks": 4096,
            "block_tokens": 16,
            "kv_bytes_per_token": 128,
            "max_num_seqs": 64,
            "max_context_tokens": 4096,
            "vocab_size": 258,
            "eos_token_ids": [257],
        } | self._fields
        if self.cache is not None:
            values |= self.cache.endpoints()
        values |= {"role": self.role, "state": state, "endpoint": self.endpoint, "epoch": self.epoch}
        record = control_pb2.WorkerRecord(**values)  # type: ignore[arg-type]
        record.worker.name, record.worker.incarnation = self.key.name, self.key.incarnation
        return record

    def report(self, **values: int) -> None:
        """Sends a load report to every router."""
        for session in self.sessions:
            session.send(load=pb.LoadReport(**values))

    # --- the service ----------------------------------------------------------------------

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.SessionResponse]:
        self.calls += 1
        first = await anext(request_iterator)
        hello = first.hello
        if (hello.worker.name, hello.worker.incarnation) != (self.key.name, self.key.incarnation):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another incarnation")
        session = _Session()
        self.sessions.append(session)
        reader = asyncio.create_task(self._read(session, request_iterator))
        try:
            if "welcome" not in self.script.silent:
                welcome = pb.Welcome(role=self.role, epoch=self.epoch)
                welcome.worker.name, welcome.worker.incarnation = self.key.name, self.key.incarnation
                session.send(welcome=welcome)
            while (message := await session.outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()
            self.sessions.remove(session)
            session.running.clear()
            for job in list(session.jobs.values()):
                self.kept.keep(job)
                if job.task is not None:
                    job.task.cancel()

    async def TakeOver(
        self, request: pb.TakeOverRequest, context: grpc.aio.ServicerContext
    ) -> pb.TakeOverResponse:
        for session in self.sessions:
            for job in [job for job in session.jobs.values() if self.kept.means(request, job)]:
                if self.kept.differs(request, job):
                    return pb.TakeOverResponse(state=PortableState(request=job.portable))
                self.kept.keep(job)
                self._fail(session, job, pb.FAILURE_REASON_TAKEN_OVER)
        return self.kept.answer(request)

    async def _read(self, session: _Session, requests: AsyncIterator[pb.SessionRequest]) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "prefill":
                self.prefills.append(request.prefill)
                self._start(session, request.prefill, self._prefill)
            elif kind == "decode":
                self.decodes.append(request.decode)
                self._start(session, request.decode, self._decode)
            elif kind == "cancel":
                key = (request.cancel.id.request_id, request.cancel.id.attempt)
                self.cancels.append(key)
                self._background(self._cancel(session, key, request.cancel.keep))
        session.outbox.put_nowait(None)

    def _background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start(self, session: _Session, command, run) -> None:  # type: ignore[no-untyped-def]
        key = (command.id.request_id, command.id.attempt)
        stale = pb.FAILURE_REASON_STALE_EPOCH if command.epoch not in (0, self.epoch) else None
        if reason := self.script.refuse or stale:
            session.send(failed=pb.AttemptFailed(id=command.id, reason=reason, detail=self.script.detail))
            return
        if any(held[0] == key[0] for held in self.held):
            self.overlaps.append(key)
        job = Job(key, np.frombuffer(command.prompt.token_ids, "<i4"), command.draw)
        if isinstance(command, pb.DecodeCommand) and command.HasField("portable"):
            job.portable = command.portable
        session.jobs[key] = job
        job.task = asyncio.create_task(run(session, job, command))

    async def _cancel(self, session: _Session, key: AttemptKey, keep: bool) -> None:
        await asyncio.sleep(self.script.cancel_seconds)
        job = session.jobs.pop(key, None)
        if job is not None:
            self.kept.keep(job, forget=not keep)
        session.running.pop(key, None)
        if job is not None and job.task is not None:
            job.task.cancel()
        if "cancelled" not in self.script.silent:
            session.send(cancelled=pb.Cancelled(id=_id(key)))

    def _fail(self, session: _Session, job: Job, reason: "pb.FailureReason.ValueType") -> None:
        session.jobs.pop(job.key, None)
        session.running.pop(job.key, None)
        session.send(failed=pb.AttemptFailed(id=_id(job.key), reason=reason, detail=self.script.detail))

    # --- prefill --------------------------------------------------------------------------

    async def _prefill(self, session: _Session, job: Job, command: pb.PrefillCommand) -> None:
        script = self.script
        if not await self._computed(session, job, script):
            return
        tokens = [job.first_token(script, choice) for choice in range(job.draw.n)]
        if script.extra_first_token:
            tokens.append(tokens[0])
        handed = self.fabric.of(job.key)
        if script.report_seconds and not handed.done():
            handed.set_result(tokens)
        await asyncio.sleep(script.report_seconds)
        self._say_prefilled(session, command, tokens)
        if not handed.done():
            handed.set_result(tokens)

    async def _computed(self, session: _Session, job: Job, script: Script) -> bool:
        await asyncio.sleep(script.prefill_seconds)
        if script.prefill_gate is not None:
            await script.prefill_gate.wait()
        failed = script.fail_prefill is not None
        for scored in job.scored(script)[: script.scored_before_failure if failed else None]:
            if "prompt_scored" not in script.silent:
                session.send(prompt_scored=scored)
        if script.fail_prefill is not None:
            self._fail(session, job, script.fail_prefill)
        return script.fail_prefill is None

    def _say_prefilled(
        self, session: _Session, command: pb.PrefillCommand | pb.DecodeCommand, tokens: list[pb.FirstToken]
    ) -> None:
        script = self.script
        done = pb.PrefillDone(id=command.id, first_tokens=tokens, cached_tokens=script.prefill_cached_tokens)
        if self.cache is not None:
            if command.HasField("prefix"):
                done.fetched.CopyFrom(self._fetch(self.cache, command))
            found = self.cache.use_prompt(command.prompt)
            done.cached_tokens = 0 if command.draw.HasField("prompt_logprobs") else found
        if "prefill_done" not in script.silent:
            session.send(prefill_done=done)

    def _fetch(self, cache: FakeCache, command: pb.PrefillCommand | pb.DecodeCommand) -> pb.PrefixFetched:
        source = command.prefix
        if self.script.fail_fetch is not None:
            return pb.PrefixFetched(failure=self.script.fail_fetch)
        for other in self.fabric.workers:
            if (other.key.name, other.key.incarnation) == (source.owner.name, source.owner.incarnation):
                assert other.cache is not None
                return cache.pull(other.cache, command.prompt, source.blocks)
        return pb.PrefixFetched(failure=pb.FAILURE_REASON_PEER_LOST)

    # --- decode ---------------------------------------------------------------------------

    async def _decode(self, session: _Session, job: Job, command: pb.DecodeCommand) -> None:
        script = self.script
        await asyncio.sleep(script.reserve_seconds)
        if "reserved" not in script.silent:
            session.send(reserved=pb.Reserved(id=command.id, cached_blocks=script.reserved_cached_blocks))
        first = await self._received(session, job, command, script)
        for token in first or ():
            job.drew(token.index, token.token_id)
            if not token.finish:
                job.offsets[token.index] = job.draw.drawn + 1
        if first is None:
            return
        if not job.offsets:
            session.jobs.pop(job.key, None)
            self.kept.keep(job)
            return
        session.running[job.key] = job
        if len(session.running) == 1:
            self._background(self._steps(session))

    async def _received(
        self, session: _Session, job: Job, command: pb.DecodeCommand, script: Script
    ) -> list[pb.FirstToken] | None:
        """The first tokens, once the KV is here; None if the attempt has failed."""
        if not command.HasField("owner"):
            if not await self._computed(session, job, script):
                return None
            first = [job.first_token(script, choice) for choice in range(job.draw.n)]
            self._say_prefilled(session, command, first)
            session.send(handoff_done=pb.HandoffDone(id=command.id))
            return first
        try:
            first = await asyncio.shield(self.fabric.of(job.key))
        except ConnectionError:
            self._fail(session, job, pb.FAILURE_REASON_PEER_LOST)
            return None
        await asyncio.sleep(script.handoff_seconds)
        if script.handoff_gate is not None:
            await script.handoff_gate.wait()
        if script.fail_handoff is not None:
            self._fail(session, job, script.fail_handoff)
            return None
        self._released(job.key)
        if "handoff_done" not in script.silent:
            done = pb.HandoffDone(id=command.id)
            done.stats.bytes, done.stats.blocks = 128 * len(job.prompt), -(-len(job.prompt) // 16)
            done.stats.read_time.FromMilliseconds(1)
            session.send(handoff_done=done)
        return first

    def _released(self, key: AttemptKey) -> None:
        """The reader has all: the owner's part of the attempt ends."""
        for worker in self.fabric.workers:
            if worker.role == pb.ROLE_PREFILL:
                for session in worker.sessions:
                    session.jobs.pop(key, None)

    async def _steps(self, session: _Session) -> None:
        while session.running:
            await asyncio.sleep(self.script.step_seconds)
            step = pb.StepTokens()
            failed: list[Job] = []
            for job in list(session.running.values()):
                drawn = max(job.offsets.values()) - job.draw.drawn
                limit, hold = self.script.fail_after_tokens, self.script.hold_after_tokens
                if limit is not None and drawn >= limit:
                    failed.append(job)
                    continue
                if hold is not None and drawn >= hold:
                    continue
                self._step_job(session, job, step)
            if step.tokens:
                session.send(step=step)
            for job in failed:
                self._fail(session, job, self.script.fail_reason)

    def _step_job(self, session: _Session, job: Job, step: pb.StepTokens) -> None:
        slot = len(step.ids)
        step.ids.append(_id(job.key))
        for choice, offset in list(job.offsets.items()):
            token_id = self.script.token(job, choice, offset)
            finish = job.finish_of(token_id, offset)
            token = step.tokens.add(slot=slot, index=choice, offset=offset, token_id=token_id, finish=finish)
            if job.draw.HasField("logprobs"):
                token.logprobs.CopyFrom(fake_logprobs(token_id, job.draw.logprobs))
            job.offsets[choice] = offset + 1
            job.drew(choice, token_id)
            if finish:
                del job.offsets[choice]
        if not job.offsets:
            session.running.pop(job.key)
            session.jobs.pop(job.key, None)
            self.kept.keep(job)


def _id(key: AttemptKey) -> pb.AttemptId:
    return pb.AttemptId(request_id=key[0], attempt=key[1])
