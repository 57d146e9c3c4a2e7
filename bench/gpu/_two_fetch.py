# SPDX-License-Identifier: Apache-2.0
"""A cached prefix pulled from the other device against computing it again, and what placement would have chosen.

The bench plays the router for one worker, so that either can be had at any length: the decode worker of the second device computes a
prompt whose beginning a worker of the first one holds, after pulling it or without. The prediction comes from the router's own
core, seeded with what that worker measured of itself at its start and then told of the pulls, as a router is.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bench._split import Prompts
from twinpool import rpc
from twinpool._core import RouterCore, hash_blocks, root_hash
from twinpool.config import RpcConfig, load_config
from twinpool.ids import WorkerKey, new_incarnation
from twinpool.router.admission import core_config
from twinpool.router.dispatch import Leg, WorkerSession
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.control_pb2 import WorkerRecord
from twinpool.v1.inference_pb2 import SamplingParams, StopConditions

SUFFIX_TOKENS = 32
"""What of a prompt nobody holds."""

_names = itertools.count()


class Computed:
    """A prompt that one worker computes for itself: what it said, and when."""

    def __init__(self) -> None:
        self._done: asyncio.Future[pb.PrefillDone] = asyncio.get_running_loop().create_future()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.seconds = 0.0
        self._began = time.perf_counter()

    async def wait(self) -> pb.PrefillDone:
        """Once the first token is there and the worker has let go of the attempt."""
        done = await self._done
        await self._over
        return done

    def _fail(self, cause: str) -> None:
        for future in (self._done, self._over):
            if not future.done():
                future.set_exception(RuntimeError(cause))

    # --- LegEvents

    def on_reserved(self, leg: Leg, message: pb.Reserved) -> None:
        pass

    def on_prompt_scored(self, leg: Leg, message: pb.PromptScored) -> None:
        pass

    def on_prefill_done(self, leg: Leg, message: pb.PrefillDone) -> None:
        self.seconds = time.perf_counter() - self._began
        self._done.set_result(message)

    def on_handoff_done(self, leg: Leg, message: pb.HandoffDone) -> None:
        pass

    def on_token(self, leg: Leg, token: pb.StepToken) -> None:
        if token.finish and not self._over.done():
            leg.end()
            self._over.set_result(None)

    def on_step_end(self, leg: Leg) -> None:
        pass

    def on_failed(self, leg: Leg, message: pb.AttemptFailed) -> None:
        self._fail(f"{pb.FailureReason.Name(message.reason)}: {message.detail}")

    def on_lost(self, leg: Leg, cause: str) -> None:
        self._fail(cause)

    def on_fault(self, error: Exception) -> None:
        self._fail(repr(error))


class Computer:
    """The stream to a worker that computes prompts by itself."""

    def __init__(self, record: WorkerRecord) -> None:
        self.record = record
        self._up = asyncio.Event()
        hello = pb.Hello(router="bench", incarnation=new_incarnation(), worker=record.worker)
        key = WorkerKey(record.worker.name, record.worker.incarnation)
        self._session = WorkerSession(
            key, record.endpoint, hello, self, lambda endpoint: rpc.channel(endpoint, RpcConfig()), 10.0
        )

    async def open(self) -> None:
        """Returns once the worker has answered."""
        self._session.start()
        await self._up.wait()

    async def close(self) -> None:
        """Ends the stream."""
        await self._session.close()

    async def compute(
        self, tokens: Sequence[int], prefix: pb.PrefixSource | None
    ) -> tuple[float, pb.PrefillDone]:
        """Seconds from the command to the first token, as the router would see them."""
        root = root_hash(self.record.fingerprint.encode(), b"", b"")
        held = np.array(tokens, np.int32)
        command = pb.DecodeCommand(
            id=pb.AttemptId(request_id=f"bench-{next(_names)}", attempt=1),
            prompt=pb.PromptSpec(
                token_ids=held.astype("<i4").tobytes(),
                block_hashes=hash_blocks(root, held, self.record.block_tokens).tobytes(),
                root_hash=root,
            ),
            draw=pb.DrawSpec(
                sampling=SamplingParams(
                    temperature=0.0,
                    top_k=0,
                    top_p=1,
                    min_p=0,
                    presence_penalty=0,
                    frequency_penalty=0,
                    repetition_penalty=1,
                    seed=1,
                ),
                stop=StopConditions(max_tokens=2, min_tokens=0),
                n=1,
            ),
        )
        if prefix is not None:
            command.prefix.CopyFrom(prefix)
        events = Computed()
        self._session.start_leg((command.id.request_id, 1), pb.SessionRequest(decode=command), events)
        done = await events.wait()
        return events.seconds, done

    # --- SessionOwner

    def session_up(self, session: WorkerSession, role: pb.Role.ValueType) -> None:
        self._up.set()

    def session_down(self, session: WorkerSession, cause: str) -> None:
        self._up.clear()

    def load_reported(self, session: WorkerSession, report: pb.LoadReport) -> None:
        pass


@dataclass
class Pulls:
    """What fetches took: (blocks, seconds of the reads, seconds that the prompt waited)."""

    all: list[tuple[int, float, float]] = field(default_factory=list)


async def compare(
    owner: Computer, reader: Computer, prompts: Prompts, lengths: Sequence[int], rounds: int
) -> tuple[dict[int, tuple[float, float]], Pulls, dict[str, object]]:
    """By length of the prefix in tokens: median seconds with the pull and without, in turn; the first round is not counted."""
    size = owner.record.block_tokens
    pulls, times, figures = Pulls(), dict[int, tuple[float, float]](), dict[str, object]()
    for length in lengths:
        assert length % size == 0, f"{length} tokens are not whole blocks of {size}"
        source = pb.PrefixSource(
            owner=owner.record.worker, endpoint=owner.record.endpoint, blocks=length // size
        )
        found: dict[bool, list[float]] = {True: [], False: []}
        waits: list[float] = []
        for turn in range(rounds + 1):
            for pulled in found:
                tokens = prompts(length + SUFFIX_TOKENS)
                await owner.compute(tokens, None)
                seconds, done = await reader.compute(tokens, source if pulled else None)
                assert done.cached_tokens == (length if pulled else 0), done
                if not turn:
                    continue
                found[pulled].append(seconds)
                if pulled:
                    said = done.fetched
                    waits.append(said.wait_time.ToTimedelta().total_seconds())
                    read = said.stats.read_time.ToTimedelta().total_seconds()
                    pulls.all.append((said.stats.blocks, read, waits[-1]))
        times[length] = statistics.median(found[True]), statistics.median(found[False])
        label = f"prefix of {length} tokens"
        figures[f"{label} pulled ms"], figures[f"{label} computed ms"] = (x * 1e3 for x in times[length])
        figures[f"{label} waited for ms"] = statistics.median(waits) * 1e3
        reads = [read for blocks, read, _ in pulls.all if blocks == length // size]
        figures[f"{label} reads ms"] = statistics.median(reads) * 1e3
    return times, pulls, figures


def break_even(times: dict[int, tuple[float, float]]) -> tuple[float, bool]:
    """Prefix tokens from which pulling is faster for good, between the measured lengths by a straight line; and whether it lies among
    them. Outside: the shortest length if pulling always wins, infinity if it never does."""
    lengths = sorted(times)
    gain = [times[length][1] - times[length][0] for length in lengths]
    if gain[-1] <= 0:
        return float("inf"), False
    for number in range(len(lengths) - 1, 0, -1):
        before, after = gain[number - 1], gain[number]
        if before <= 0:
            share = -before / (after - before)
            return lengths[number - 1] + share * (lengths[number] - lengths[number - 1]), True
    return float(lengths[0]), False


def predicted(
    owner: WorkerRecord, reader: WorkerRecord, pulls: Sequence[tuple[int, float]], most: int
) -> float:
    """Prefix tokens from which the router's core lets an idle worker like ``reader`` pull from ``owner``: it is seeded with the
    reader's calibration and told of ``pulls`` (blocks, seconds). Infinity if it does not at ``most`` tokens."""
    size = owner.block_tokens

    def fetches(blocks: int) -> bool:
        config = load_config(None, {"router.local_prefill": False}, env={})
        core = RouterCore(core_config(config.router))
        for name, role, record in (("reader", "prefill", reader), ("owner", "decode", owner)):
            core.upsert_worker(
                0.0, name, 1, "p", role, "ready", "f", record.num_blocks, size, record.max_num_seqs
            )
            core.report_load(0.0, name, 1, 0, 0, 0, record.num_blocks, 0.0)
            cost = record.prefill_cost
            learned = cost.base_seconds, cost.unit_seconds, cost.context_seconds
            if any(learned):
                core.set_cost_model(name, 1, "prefill", *learned)
        for count, seconds in pulls:
            core.observe_transfer("reader", 1, count, seconds)
        tokens = np.arange(blocks * size + SUFFIX_TOKENS, dtype=np.int32)
        hashes = hash_blocks(root_hash(b"f", b"", b""), tokens, size)
        core.index_stored("owner", 1, hashes)
        core.submit(0.0, "r", "p", len(tokens), 2, hashes)
        placed = [action for action in core.plan(0.0) if action.kind == "place"]
        assert len(placed) == 1
        return placed[0].fetch_from is not None

    low, high = 0, most // size
    if not fetches(high):
        return float("inf")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fetches(middle) else (middle, high)
    return float(high * size)
