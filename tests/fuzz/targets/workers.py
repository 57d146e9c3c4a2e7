# SPDX-License-Identifier: Apache-2.0
"""What a hostile worker says in a router's session, over real streams: anything, at Hello and while it serves an attempt.

The request that it was for ends in whatever way; nothing of it is left, and the next one, which the same workers serve as they
should, gets its answer.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any

from tests.fuzz.shake import frames, frames_mutator, message_mutator, packed
from tests.fuzz.target import Target
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.fake_cluster import FakeCluster, collect, fake_cluster, generate, prompt
from tests.support.fake_job import FIRST_TOKEN, fake_logprobs
from tests.support.fake_worker import FakeWorker, _Session
from tests.support.waiting import until
from twinpool.v1 import inference_pb2
from twinpool.v1 import worker_pb2 as pb

KINDS = [pb.SessionResponse]
PROMPT = prompt(40)
REQUEST = "r"
BLOCKS = 64
SETTINGS: dict[str, object] = {"quarantine_seconds": 0.01}
SIDES = 3
"""The second byte of a frame, modulo this: said by the decode worker to its command, by the prefill worker to its own, or by the
decode worker instead of a welcome."""


class Hostile(FakeWorker):
    """Says what it is given instead of what it should; honest otherwise."""

    welcomes: list[pb.SessionResponse]
    lines: list[pb.SessionResponse] | None = None
    told = 0

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        for said in self.take_welcomes():
            await anext(request_iterator)
            yield said
            return
        async for message in super().Session(request_iterator, context):
            yield message

    def take_welcomes(self) -> list[pb.SessionResponse]:
        """One at most: the next stream hears the next one."""
        found, self.welcomes = self.welcomes[:1], self.welcomes[1:]
        return found

    def _start(self, session: _Session, command: Any, run: Any) -> None:
        if self.lines is None:
            super()._start(session, command, run)
            return
        for line in self.lines:
            session.outbox.put_nowait(addressed(line, command.id.request_id))
        self.told += 1


def addressed(line: pb.SessionResponse, request: str) -> pb.SessionResponse:
    """With the router's own name of the request where REQUEST stands for it."""
    found = pb.SessionResponse()
    found.CopyFrom(line)
    said = getattr(found, str(found.WhichOneof("message")), None)
    for attempt in getattr(said, "ids", [getattr(said, "id", None)]):
        if attempt is not None and attempt.request_id == REQUEST:
            attempt.request_id = request
    return found


class World:
    """A router with a worker of each role, for the life of the process."""

    def __init__(self) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="twinpool-fuzz-")
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        self.marks = 0
        self.cluster: FakeCluster = self.loop.run_until_complete(self._start())

    async def _start(self) -> FakeCluster:
        path = write_byte_tokenizer(Path(self.directory.name))
        cluster = await self.stack.enter_async_context(
            fake_cluster(path, prefill=0, decode=0, settings=SETTINGS)
        )
        for name, role in (("p0", pb.ROLE_PREFILL), ("d0", pb.ROLE_DECODE)):
            made = cluster.workers[name] = Hostile(
                name, role, cluster.fabric, num_blocks=BLOCKS, model_path=str(path)
            )
            made.welcomes = []
            await made.start()
            cluster.router.fleet.upsert(made.record())
        await cluster.ready()
        return cluster

    def hostile(self, name: str) -> Hostile:
        found = self.cluster.workers[name]
        assert isinstance(found, Hostile)
        return found

    async def run(self, lines: list[list[pb.SessionResponse]], fields: dict[str, Any]) -> None:
        """``fields``: what the request asks for besides its prompt."""
        decode, prefill = self.hostile("d0"), self.hostile("p0")
        if lines[2]:
            await self._greet(decode, lines[2])
        decode.lines, prefill.lines = lines[0], lines[1]
        before = decode.told
        call = self.cluster.stub.Generate(generate(PROMPT, max_tokens=6, **fields))
        reading = asyncio.ensure_future(collect(call))
        await until(lambda: decode.told > before or reading.done())
        await self._heard()
        decode.lines = prefill.lines = None
        call.cancel()
        answer = await reading
        for event in answer.events:
            check_event(event)
        await self._quiet()
        await self._serves()

    async def _greet(self, worker: Hostile, said: list[pb.SessionResponse]) -> None:
        """Its stream ends, and so do as many as it does not begin well."""
        worker.welcomes = list(said)
        for session in worker.sessions:
            session.outbox.put_nowait(None)
        await until(lambda: not worker.welcomes)
        await self.cluster.ready()
        await until(lambda: worker.sessions)

    async def _heard(self) -> None:
        """The router has taken all that was said: last of all, how much room there is. What comes of it may be another
        command, so it is asked for twice."""
        for _ in range(2):
            self.marks += 1
            for name in ("d0", "p0"):
                made = self.hostile(name)
                await self._marked(made, self.marks)

    async def _marked(self, made: Hostile, mark: int) -> None:
        fleet = self.cluster.router.fleet
        made.report(available_blocks=BLOCKS, total_blocks=BLOCKS, waiting_prefill_tokens=mark)
        await until(
            lambda: (
                (known := fleet._workers[made.key].report) is not None
                and known.waiting_prefill_tokens == mark
                and known.total_blocks == BLOCKS
            )
        )

    async def _quiet(self) -> None:
        router = self.cluster.router
        # What workers have not acknowledged is waited for in the background, from the end of the request on.
        await until(lambda: router.admission.active == 0)
        await self.cluster.assert_quiescent()
        for made in self.cluster.workers.values():
            made.report(available_blocks=BLOCKS, total_blocks=BLOCKS)

    async def _serves(self) -> None:
        answer = await self.cluster.ask(generate(prompt(40), max_tokens=3))
        assert answer.error is None, answer.error
        assert answer.tokens() == [FIRST_TOKEN, FIRST_TOKEN + 1, FIRST_TOKEN + 2]
        assert answer.finished.choices[0].reason == inference_pb2.FINISH_REASON_LENGTH
        await self.cluster.assert_quiescent()
        for made in self.cluster.workers.values():
            made.prefills.clear()
            made.decodes.clear()
            made.cancels.clear()
            made.overlaps.clear()


def check_event(event: inference_pb2.GenerateResponse) -> None:
    """A client hears nothing that it could not hear of good workers."""
    if event.WhichOneof("event") == "tokens":
        assert event.tokens.index == 0
        assert all(token < 258 for token in event.tokens.token_ids)
    if event.WhichOneof("event") == "prompt_logprobs":
        part = event.prompt_logprobs
        told = [position.chosen.token_id for position in part.positions]
        assert told == PROMPT[part.offset : part.offset + len(told)]
    if event.WhichOneof("event") == "finished":
        for choice in event.finished.choices:
            assert choice.reason in inference_pb2.FinishReason.values()
            assert choice.reason != inference_pb2.FINISH_REASON_UNSPECIFIED


@cache
def world() -> World:
    return World()


def close() -> None:
    """Ends the router and its workers, with their threads."""
    if world.cache_info().currsize:
        made = world()
        world.cache_clear()
        made.loop.run_until_complete(made.stack.aclose())
        made.loop.run_until_complete(made.loop.shutdown_asyncgens())
        made.loop.close()
        made.directory.cleanup()


def run(data: bytes) -> None:
    lines: list[list[pb.SessionResponse]] = [[] for _ in range(SIDES)]
    for frame in frames(data):
        try:
            message = pb.SessionResponse.FromString(frame[2:])
        except Exception:
            continue  # gRPC ends the stream
        lines[frame[1] % SIDES if len(frame) > 1 else 0].append(message)
    del lines[2][2:]  # each is a stream, and a wait before the next
    made = world()
    fields: dict[str, Any] = {"logprobs": 1} if len(data) % 3 == 0 else {}
    if len(data) % 2 == 0:
        fields["prompt_logprobs"] = 1
    made.loop.run_until_complete(made.run(lines, fields))


def mutate_line(data: bytes, source: Any) -> bytes:
    """``message_mutator`` for a frame whose second byte says whose it is."""
    side, rest = data[1:2] or b"\0", data[:1] + data[2:]
    changed = message_mutator(KINDS)(rest, source)
    if source.random() < 0.1:
        side = bytes([source.randrange(SIDES)])
    return changed[:1] + side + changed[1:]


def seeds() -> list[bytes]:
    attempt = pb.AttemptId(request_id=REQUEST, attempt=1)
    stats = inference_pb2.HandoffStats(blocks=3, bytes=300)
    stats.read_time.FromMilliseconds(1)
    first = pb.FirstToken(index=0, token_id=65, logprobs=fake_logprobs(65, 1))
    done = pb.PrefillDone(id=attempt, first_tokens=[first], cached_tokens=16)
    done.compute_time.FromMilliseconds(1)
    done.queue_time.FromMilliseconds(1)
    fetched = pb.PrefixFetched(owner_blocks=1, failure=pb.FAILURE_REASON_NOT_CACHED, stats=stats)
    tokens = [
        pb.StepToken(slot=0, index=0, offset=at, token_id=65 + at, logprobs=fake_logprobs(65, 1))
        for at in (1, 2)
    ]
    last = pb.StepToken(
        slot=0, index=0, offset=3, token_id=70, finish=inference_pb2.FINISH_REASON_LENGTH,
        logprobs=fake_logprobs(70, 1),
    )  # fmt: skip
    load = pb.LoadReport(running_requests=1, available_blocks=7, total_blocks=9)
    load.step_time.FromMilliseconds(2)
    reserved = pb.SessionResponse(reserved=pb.Reserved(id=attempt, cached_blocks=1))
    prefilled = pb.SessionResponse(prefill_done=done)
    handed = pb.SessionResponse(handoff_done=pb.HandoffDone(id=attempt, stats=stats))
    step = pb.SessionResponse(step=pb.StepTokens(ids=[attempt], tokens=tokens))
    ended = pb.SessionResponse(step=pb.StepTokens(ids=[attempt], tokens=[last]))
    failed = pb.SessionResponse(
        failed=pb.AttemptFailed(id=attempt, reason=pb.FAILURE_REASON_INTERNAL, detail="x")
    )
    cancelled = pb.SessionResponse(cancelled=pb.Cancelled(id=attempt))
    reported = pb.SessionResponse(load=load)
    welcome = pb.SessionResponse(
        welcome=pb.Welcome(worker=pb.WorkerId(name="d0", incarnation=7), role=pb.ROLE_DECODE)
    )
    scored = pb.SessionResponse(prompt_scored=pb.PromptScored(id=attempt))
    scored.prompt_scored.logprobs.offset = 1
    scored.prompt_scored.logprobs.positions.extend([fake_logprobs(token, 1) for token in PROMPT[1:]])
    pulled = pb.SessionResponse()
    pulled.prefill_done.CopyFrom(done)
    pulled.prefill_done.fetched.CopyFrom(fetched)
    talks = [
        [(0, reserved), (1, prefilled), (0, handed), (0, step), (0, ended)],
        [(0, reserved), (1, scored), (1, prefilled), (0, handed), (0, step), (0, ended)],
        [(0, reserved), (0, scored), (1, prefilled), (0, handed), (0, step), (0, ended)],
        [(0, reserved), (0, reported), (1, pulled), (1, reported), (0, handed), (0, step), (0, step)],
        [(0, reserved), (0, prefilled), (0, handed), (0, step), (0, welcome)],
        [(0, handed), (0, step), (0, ended), (0, reserved), (1, prefilled)],
        [(0, reserved), (1, failed), (0, failed)],
        [(0, cancelled), (0, reserved)],
        [(2, welcome), (2, reported), (0, failed)],
    ]
    return [
        packed([bytes([0, side]) + message.SerializeToString() for side, message in talk]) for talk in talks
    ]


TARGETS = {"worker": Target("worker", run, seeds, frames_mutator(mutate_line), close)}
