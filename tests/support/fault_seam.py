# SPDX-License-Identifier: Apache-2.0
"""Inside a worker process: the shim around its agent and its messages, and a socket by which a test commands both.

The worker loads it through ``TWINPOOL_TEST_SEAM`` (see ``twinpool.worker.seam``). ``TWINPOOL_TEST_FAULTS`` holds a JSON
object: ``directory``, where the socket ``<worker>.sock`` is made, and maybe ``random``, a plan drawn from a seed. Faults
are counted, not timed: a held read or message stays where it is until the test frees it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.hangs import BreakableAgent, GatedRunner
from tests.support.transfer_shim import ReadFaults, ShimAgent
from twinpool.ids import WorkerKey
from twinpool.transfer.base import Fault, TransferAgent, failed
from twinpool.v1 import handoff_pb2 as handoff
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.outbox import Receiver
from twinpool.worker.step_loop import Runner

PLAN_VARIABLE = "TWINPOOL_TEST_FAULTS"
ENTRY = "tests.support.fault_seam:make_seam"
RANDOM_READS = 20_000
"""Reads of one process that a random plan covers."""

# What a stream that is neither broken nor slow can still lose is a side's reaction to it.
_LOSABLE = {"to_owner": {"renew", "release"}, "to_reader": {"released", "failed", "lease_lost"}}


@dataclass
class NoteRule:
    """What happens to the next ``times`` messages of one kind."""

    way: str
    kind: str
    fault: str  # drop, duplicate, hold, alter
    times: int


class FaultSeam:
    """Implements ``twinpool.worker.seam.Seam``."""

    def __init__(self, worker: WorkerKey, plan: dict[str, Any]) -> None:
        self.data, self.generation = ReadFaults(), ReadFaults()
        self.sent: Counter[str] = Counter()
        self._worker = worker
        self._lock = threading.Lock()
        self._rules: list[NoteRule] = []
        self._held: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shim: ShimAgent | None = None
        self._breakable: BreakableAgent | None = None
        self._runner: GatedRunner | None = None
        self._chances: dict[str, float] = plan.get("random") or {}
        self._random = random.Random(f"{self._chances.get('seed')}-{worker.name}")
        if self._chances:
            self._plan_reads()
        self._path = Path(plan["directory"]) / f"{worker.name}.sock"

    def agent(self, real: TransferAgent) -> TransferAgent:
        self._breakable = BreakableAgent(real)
        shim = ShimAgent(self._breakable, time.monotonic)
        shim.data, shim.generation = self.data, self.generation
        self._shim = shim
        threading.Thread(target=self._serve, name="test-faults", daemon=True).start()
        return shim

    def receiver(self, real: Receiver) -> Receiver:
        return ShimReceiver(self, real)

    def runner(self, real: Runner) -> Runner:
        self._runner = GatedRunner(real)
        return self._runner

    # --- messages, on the asyncio thread

    def pass_on(self, way: str, message: Any, deliver: Callable[[Any], None]) -> None:
        """Gives ``message`` to ``deliver`` as often, and when, the plan says."""
        kind = message.WhichOneof("message") or ""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            self.sent[f"{way}:{kind}"] += 1
            rule = next((r for r in self._rules if (r.way, r.kind) == (way, kind) and r.times), None)
            if rule is not None:
                rule.times -= 1
        fault = rule.fault if rule is not None else self._draw(way, kind)
        if fault == "hold":
            with self._lock:
                self._held.append(lambda: deliver(message))
        elif fault == "alter":
            altered = type(message)()
            altered.CopyFrom(message)
            altered.release.transfer_id ^= 1
            deliver(altered)
        elif fault != "drop":
            deliver(message)
            if fault == "duplicate":
                deliver(message)

    def _draw(self, way: str, kind: str) -> str:
        if not self._chances:
            return ""
        chance = self._random.random()
        if kind in _LOSABLE[way]:
            lost = self._chances.get("drop", 0.0)
            if chance < lost:
                return "drop"
            return "duplicate" if chance < lost + self._chances.get("duplicate", 0.0) else ""
        # A ticket that comes twice contradicts the first.
        return "duplicate" if kind != "expect" and chance < self._chances.get("twice", 0.0) else ""

    def _plan_reads(self) -> None:
        chances, pick = self._chances, self._random
        for faults in (self.data, self.generation):
            # The first reads prove connections; those of a start-up are not what is tried here.
            for number in range(8, RANDOM_READS):
                chance = pick.random()
                if chance < chances["refuse"]:
                    faults.refuse[number] = pick.choice(list(Fault))
                elif chance < chances["refuse"] + chances["report"]:
                    faults.report[number] = failed(pick.choice(list(Fault)), "injected")
                elif chance < chances["refuse"] + chances["report"] + chances["delay"]:
                    faults.delay_seconds[number] = pick.uniform(0.0, chances["delay_seconds"])
                elif chance > 1 - chances["late"]:
                    faults.delay_seconds[number] = chances["late_seconds"]

    # --- commands of the test, on a thread of their own

    def _serve(self) -> None:
        self._path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(self._path))
            server.listen()
            while True:
                client, _ = server.accept()
                with client, client.makefile("rw") as stream:
                    for line in stream:
                        stream.write(json.dumps(self._obey(**json.loads(line))) + "\n")
                        stream.flush()

    def _obey(self, do: str, **arguments: Any) -> Any:
        return getattr(self, f"_do_{do}")(**arguments)

    def _do_counts(self) -> dict[str, int]:
        shim = self._shim
        assert shim is not None
        with self._lock:
            return dict(self.sent) | {
                "data": shim.data_reads,
                "generation": shim.generation_reads,
                "held": len(self._held),
                "late": shim.delayed,
            }

    def _do_read(self, kind: str, fault: str, value: str = "", skip: int = 0) -> int:
        """``fault`` happens to the next read of the kind, or to the one ``skip`` reads later; returns its number."""
        shim = self._shim
        assert shim is not None
        faults, done = (
            (self.data, shim.data_reads) if kind == "data" else (self.generation, shim.generation_reads)
        )
        number = done + 1 + skip
        if fault == "hold":
            faults.hold.add(number)
        elif fault == "refuse":
            faults.refuse[number] = Fault(value)
        else:
            faults.report[number] = failed(Fault(value), "reported by the shim")
        return number

    def _do_note(self, way: str, kind: str, fault: str, times: int = 1) -> None:
        with self._lock:
            self._rules.append(NoteRule(way, kind, fault, times))

    def _do_steps(self, run: bool) -> bool:
        """Steps stand still from the next one on, or run again; whether one stands."""
        assert self._runner is not None
        (self._runner.gate.set if run else self._runner.gate.clear)()
        return self._runner.standing

    def _do_standing(self) -> bool:
        assert self._runner is not None
        return self._runner.standing

    def _do_agent(self, mode: str) -> None:
        """See ``BreakableAgent``; "" mends it."""
        assert self._breakable is not None
        (self._breakable.gate.clear if mode == "hang" else self._breakable.gate.set)()
        self._breakable.mode = mode

    def _do_free(self) -> None:
        """What is held goes on; rules stay."""
        self.data.hold.clear()
        self.generation.hold.clear()
        with self._lock:
            held, self._held = self._held, []
        for deliver in held:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(deliver)

    def _do_clear(self) -> None:
        """No fault is left, and what was held goes on."""
        with self._lock:
            self._rules.clear()
        for faults in (self.data, self.generation):
            faults.refuse.clear()
            faults.report.clear()
            faults.delay_seconds.clear()
        self._do_free()


class ShimReceiver:
    """Messages to peers through the seam; those to routers go on unchanged."""

    def __init__(self, seam: FaultSeam, real: Receiver) -> None:
        self._seam = seam
        self._real = real

    def to_session(self, session: int, message: pb.SessionResponse) -> None:
        self._real.to_session(session, message)

    def to_reader(self, stream: int, message: handoff.ExchangeResponse) -> None:
        self._seam.pass_on("to_reader", message, lambda sent: self._real.to_reader(stream, sent))

    def to_owner(self, owner: WorkerKey, endpoint: str, message: handoff.ExchangeRequest) -> None:
        self._seam.pass_on("to_owner", message, lambda sent: self._real.to_owner(owner, endpoint, sent))


def make_seam(worker: WorkerKey) -> FaultSeam:
    """The factory that the environment names."""
    return FaultSeam(worker, json.loads(os.environ[PLAN_VARIABLE]))
