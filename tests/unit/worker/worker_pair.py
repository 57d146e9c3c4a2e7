# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode worker in one thread, and more on demand: real model, real core, real roles; time and turns by
hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch
from worker_requests import BLOCK, ROOT, cancel_command, decode_command, prefill_command, random_prompt

from twinpool._core import BlockManager, SchedulerConfig, StepScheduler, hash_blocks
from twinpool.config import TwinpoolConfig
from twinpool.engine.kv.host import HostPool
from twinpool.engine.kv.pool import KVPool
from twinpool.engine.loader import load_model
from twinpool.engine.models.base import DecoderModel
from twinpool.engine.runner import ModelRunner, SequenceDraw
from twinpool.engine.sampling import DrawParams
from twinpool.engine.tiny import write_tiny
from twinpool.ids import WorkerKey
from twinpool.transfer.base import AttemptKey, PoolMemory, TransferError
from twinpool.transfer.loopback import Fabric, LoopbackAgent
from twinpool.transfer.pump import TransferPump
from twinpool.v1 import handoff_pb2 as handoff
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.inference_pb2 import FinishReason
from twinpool.worker.assembly import Assembly, Surroundings, assemble
from twinpool.worker.commands import Limits, parse_command, worker_id
from twinpool.worker.observer import WorkerObserver
from twinpool.worker.stack import EngineStack

__all__ = ["BLOCK", "ROOT", "cancel_command", "decode_command", "prefill_command", "random_prompt"]

SESSION = 1


@cache
def tiny_model(family: str = "llama") -> DecoderModel:
    torch.set_num_threads(1)
    path = write_tiny(Path(mkdtemp(prefix="twinpool-tiny-")), family, layers=2, hidden=32, vocab=300)  # type: ignore[arg-type]
    return load_model(path)


def stack(num_blocks: int, *, max_num_seqs: int = 8, host_blocks: int = 0) -> EngineStack:
    """An engine over its own pool and the shared model."""
    model = tiny_model()
    layout = model.kv_layout
    pool = KVPool(num_blocks, layout.layers, BLOCK, layout.width)
    blocks = BlockManager(num_blocks, BLOCK, pool.generations)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_batched_tokens=128, max_chunk_tokens=32, host_blocks=host_blocks
    )
    return EngineStack(
        fingerprint="unit",
        pool=pool,
        memory=PoolMemory.of_tensor(pool.tensor),
        blocks=blocks,
        scheduler=StepScheduler(blocks, config),
        runner=ModelRunner(
            model, pool, host=HostPool(pool, host_blocks) if host_blocks else None, threads=1, validate=True
        ),
        limits=Limits(BLOCK, num_blocks, 1024, max_num_seqs, model.config.vocab_size),
    )


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Worker:
    """One worker; messages to routers gather in ``sent``."""

    pair: "Pair"
    key: WorkerKey
    stack: EngineStack
    pump: TransferPump
    observer: WorkerObserver
    assembly: Assembly = field(init=False)
    sent: list[tuple[int, pb.SessionResponse]] = field(default_factory=list)
    fatal: list[str] = field(default_factory=list)

    def to_session(self, session: int, message: pb.SessionResponse) -> None:
        self.sent.append((session, message))

    def to_reader(self, stream: int, message: handoff.ExchangeResponse) -> None:
        self.pair.from_owner(self, stream, message)

    def to_owner(self, owner: WorkerKey, endpoint: str, message: handoff.ExchangeRequest) -> None:
        self.pair.from_reader(self, owner, endpoint, message)

    def do(self, work: pb.SessionRequest, session: int = SESSION) -> None:
        """A command, as the session hands it over."""
        checked = parse_command(work, self.stack.limits)
        self.assembly.loop.post(lambda: self.assembly.loop.role.on_work(session, checked))

    def take(self, kind: str) -> list[pb.SessionResponse]:
        """Messages of one kind so far; they are taken out."""
        found = [message for _, message in self.sent if message.WhichOneof("message") == kind]
        self.sent = [entry for entry in self.sent if entry[1].WhichOneof("message") != kind]
        return found


@dataclass
class Link:
    """An Exchange stream, and what its reader expects over it. Messages wait until it stands."""

    reader: Worker
    owner: Worker
    stream: int
    expected: set[AttemptKey] = field(default_factory=set)
    connected: bool = False
    early: list[handoff.ExchangeRequest] = field(default_factory=list)

    def send(self, message: handoff.ExchangeRequest) -> None:
        if not self.connected:
            self.early.append(message)
            return
        loop = self.owner.assembly.loop
        loop.post(lambda: loop.role.on_reader_message(self.stream, message))


class Pair:
    """A prefill worker, a decode worker and the wire between them."""

    def __init__(
        self,
        *,
        prefill_blocks: int = 24,
        decode_blocks: int = 24,
        max_num_seqs: int = 8,
        host_blocks: int = 0,
        lease_seconds: float = 30.0,
        read_deadline_seconds: float = 5.0,
        fetch_deadline_seconds: float = 3.0,
        sessions: dict[str, object] | None = None,
        ahead: str = "auto",
    ) -> None:
        self.clock = Clock()
        self.fabric = Fabric()
        self.config = TwinpoolConfig.model_validate(
            {
                "kv": {"num_blocks": prefill_blocks, "block_tokens": BLOCK, "poison_freed": True},
                "transfer": {
                    "backend": "loopback",
                    "lease_seconds": lease_seconds,
                    "read_deadline_seconds": read_deadline_seconds,
                    "fetch_deadline_seconds": fetch_deadline_seconds,
                    "digest": "always",
                },
                "sessions": sessions or {},
                "scheduler": {"ahead": ahead},
            }
        )
        self.links: list[Link] = []
        self.connectable = True
        self.stalled = False
        self.workers: dict[WorkerKey, Worker] = {}
        self.agents: dict[WorkerKey, LoopbackAgent] = {}
        self.prefill = self.add("prefill", "prefill-0", prefill_blocks, max_num_seqs)
        self.decode = self.add("decode", "decode-0", decode_blocks, max_num_seqs, host_blocks=host_blocks)

    def add(self, role: str, name: str, num_blocks: int = 24, max_num_seqs: int = 8, **more: int) -> Worker:
        """One more worker."""
        key = WorkerKey(name, 7 + 2 * len(self.workers))
        engine = stack(num_blocks, max_num_seqs=max_num_seqs, **more)
        agent = LoopbackAgent(key, "unit", engine.memory, engine.pool.generations, fabric=self.fabric)
        observer = WorkerObserver()

        def dispatch(callback: Callable[[], None]) -> None:
            worker.assembly.loop.post(callback)

        worker = Worker(
            self, key, engine, TransferPump(agent, dispatch=dispatch, observer=observer), observer
        )
        self.agents[key], self.workers[key] = agent, worker
        around = Surroundings(
            port=worker.pump,
            receiver=worker,
            post=lambda deliver: deliver(),
            observer=observer,
            on_offers=worker.pump.set_offers,
            on_fatal=worker.fatal.append,
            clock=self.clock,
        )
        worker.assembly = assemble(self.config, role, key, engine, around)
        return worker

    # --- the wire

    @property
    def linked(self) -> bool:
        """Whether the decode worker's stream to the prefill worker stands."""
        return self._link(self.decode, self.prefill) is not None

    def _link(self, reader: Worker, owner: Worker) -> Link | None:
        return next((link for link in self.links if link.reader is reader and link.owner is owner), None)

    def from_reader(
        self, reader: Worker, owner_key: WorkerKey, endpoint: str, message: handoff.ExchangeRequest
    ) -> None:
        owner, kind = self.workers[owner_key], message.WhichOneof("message")
        link = self._link(reader, owner)
        if link is None:
            if not endpoint:
                return
            if not self.connectable:
                expected = [AttemptKey.of(getattr(message, str(kind)).id)]
                lost, reason = reader.assembly.loop.role.on_owner_lost, pb.FAILURE_REASON_PEER_LOST
                reader.assembly.loop.post(lambda: lost(owner_key, expected, reason, "refused"))
                return
            link = self.open(reader, owner)
        if kind in ("expect", "fetch"):
            link.expected.add(AttemptKey.of(getattr(message, kind).id))
        elif kind == "release":
            link.expected.discard(AttemptKey.of(message.release.id))
        link.send(message)

    def open(self, reader: Worker, owner: Worker) -> Link:
        """Dials; messages go through a few turns later."""
        link = Link(reader, owner, 1 + max((link.stream for link in self.links), default=0))
        self.links.append(link)
        descriptor = self.agents[owner.key].descriptor

        def connected(error: TransferError | None) -> None:
            if link not in self.links:
                return
            if error is not None:
                self.cut(reader, owner)
                return
            loop = owner.assembly.loop
            loop.post(lambda: loop.role.on_reader_opened(link.stream, reader.key))
            link.connected = True
            for message in link.early:
                link.send(message)
            reader.assembly.loop.role.on_owner_opened(descriptor)

        reader.pump.connect(descriptor, connected)
        return link

    def from_owner(self, owner: Worker, stream: int, message: handoff.ExchangeResponse) -> None:
        link = next((link for link in self.links if link.owner is owner and link.stream == stream), None)
        if link is not None:
            loop = link.reader.assembly.loop
            loop.post(lambda: loop.role.on_owner_message(owner.key, message))

    def cut(self, reader: Worker | None = None, owner: Worker | None = None) -> None:
        """An Exchange stream breaks, the decode worker's to the prefill worker unless told otherwise; each side learns it."""
        link = self._link(reader or self.decode, owner or self.prefill)
        assert link is not None
        self.links.remove(link)
        p, d = link.owner.assembly.loop, link.reader.assembly.loop
        reason = pb.FAILURE_REASON_PEER_LOST
        d.post(lambda: d.role.on_owner_lost(link.owner.key, list(link.expected), reason, "cut"))
        if link.connected:
            p.post(lambda: p.role.on_reader_closed(link.stream))
        link.reader.pump.disconnect(link.owner.key)

    # --- time

    def turn(self, seconds: float = 0.001) -> bool:
        """One turn of everything; whether a step ran."""
        self.clock.now += seconds
        worked = [worker.assembly.loop.turn() for worker in self.workers.values()]
        if not self.stalled:
            for worker in self.workers.values():
                worker.pump.tick(self.clock.now)
        return any(worked)

    def run(self, until: Callable[[], bool], turns: int = 400) -> None:
        """Turns until ``until``; fails after ``turns``."""
        for _ in range(turns):
            if until():
                return
            self.turn()
        raise AssertionError(f"not reached; {[worker.sent for worker in self.workers.values()]}")

    def settle(self, turns: int = 12) -> None:
        """Lets everything that is on its way arrive."""
        for _ in range(turns):
            self.turn()

    def assert_quiet(self) -> None:
        """No worker holds anything."""
        self.settle()
        for worker in self.workers.values():
            blocks, parts = worker.stack.blocks, worker.assembly.parts
            blocks.check()
            held = (
                blocks.held_blocks,
                blocks.pinned_blocks,
                blocks.quarantined_blocks,
                worker.assembly.loop.role.requests,
                worker.pump.in_flight,
                parts.offers.open,
                parts.pulls.waiting + parts.pulls.draining + parts.pulls.unreleased,
                parts.scheduler.running + parts.scheduler.waiting + parts.scheduler.reserved,
            )
            assert held == (0,) * len(held), f"{worker.key}: {held}"
            assert blocks.free_blocks + blocks.cached_blocks == blocks.num_blocks
            assert worker.fatal == []

    # --- requests

    def start(
        self,
        prompt: Sequence[int],
        request_id: str = "r",
        *,
        prefix: pb.PrefixSource | None = None,
        decode_prefix: pb.PrefixSource | None = None,
        **spec: object,
    ) -> AttemptKey:
        """Decode command, then, once reserved, the prefill command; each with a prefix to fetch, if one is given."""
        self.decode.do(decode_command(self, prompt, request_id, prefix=decode_prefix, **spec))  # type: ignore[arg-type]
        self.run(lambda: bool(self._kinds(self.decode, "reserved")))
        cached = self.decode.take("reserved")[0].reserved.cached_blocks
        self.prefill.do(prefill_command(self, prompt, request_id, cached, prefix=prefix, **spec))  # type: ignore[arg-type]
        return AttemptKey(request_id, 1)

    def generate(self, prompt: Sequence[int], request_id: str = "r", **spec: object) -> list[list[int]]:
        """The tokens of every choice, first tokens included."""
        self.start(prompt, request_id, **spec)
        answer = Answer(int(spec.get("n", 1)))  # type: ignore[call-overload]
        self.run(lambda: answer.take(self) or answer.finished)
        return answer.tokens

    @staticmethod
    def _kinds(worker: Worker, kind: str) -> list[pb.SessionResponse]:
        return [message for _, message in worker.sent if message.WhichOneof("message") == kind]


class Answer:
    """Collects one request's tokens from both legs and checks that each comes once and in order."""

    def __init__(self, n: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.finish: list[int] = [0] * n
        self.handed_off = False

    @property
    def finished(self) -> bool:
        return all(self.finish)

    def take(self, pair: Pair) -> bool:
        for worker in (pair.prefill, pair.decode):
            failed = worker.take("failed")
            assert not failed, failed
            for done in worker.take("prefill_done"):
                for first in done.prefill_done.first_tokens:
                    self._add(first.index, 0, first.token_id, first.finish)
        self.handed_off |= bool(pair.decode.take("handoff_done"))
        for step in pair.decode.take("step"):
            for token in step.step.tokens:
                self._add(token.index, token.offset, token.token_id, token.finish)
        return self.finished

    def _add(self, index: int, offset: int, token: int, finish: int) -> None:
        assert not self.finish[index], "a token after the end"
        assert offset == len(self.tokens[index]), "a token is missing or came twice"
        self.tokens[index].append(token)
        self.finish[index] = finish


def prefix_source(owner: Worker, blocks: int) -> pb.PrefixSource:
    """``owner`` is believed to hold the prompt's first ``blocks`` blocks."""
    return pb.PrefixSource(owner=worker_id(owner.key), endpoint="127.0.0.1:1", blocks=blocks)


def reference(
    prompt: Sequence[int], max_tokens: int, *, choice: int = 0, temperature: float = 0.0
) -> list[int]:
    """What one engine alone generates, without any hand-off."""
    engine = stack(64)
    tokens = np.array(prompt, np.int32)
    hashes = hash_blocks(ROOT, tokens, BLOCK)
    engine.scheduler.add(tokens, hashes, ROOT, max_new_tokens=max_tokens)
    draw = SequenceDraw(
        DrawParams(temperature=temperature, seed=11, max_tokens=max_tokens), tokens, choice=choice
    )
    while len(draw.outputs) < max_tokens:
        plan = engine.scheduler.plan(0.0)
        assert not plan.empty
        engine.scheduler.advance(plan, engine.runner.step(plan, [draw]).tokens)
    return draw.outputs


STOP, LENGTH = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH
