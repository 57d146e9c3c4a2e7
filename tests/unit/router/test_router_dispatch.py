# SPDX-License-Identifier: Apache-2.0
"""Sessions with workers over real gRPC: routing, cancel with acknowledgement, loss, reconnect."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from tests.support.fake_cluster import fake_cluster
from tests.support.fake_worker import Fabric, FakeWorker, Script
from tests.support.waiting import until
from twinpool.ids import WorkerKey
from twinpool.router.dispatch import Leg, LegState, WorkerSession
from twinpool.v1 import control_pb2
from twinpool.v1 import worker_pb2 as pb


class Owner:
    """Notes what sessions say."""

    def __init__(self) -> None:
        self.ups = 0
        self.downs: list[str] = []
        self.loads: list[pb.LoadReport] = []

    def session_up(self, session: WorkerSession, role: "pb.Role.ValueType") -> None:
        self.ups += 1

    def session_down(self, session: WorkerSession, cause: str) -> None:
        self.downs.append(cause)

    def load_reported(self, session: WorkerSession, report: pb.LoadReport) -> None:
        self.loads.append(report)


class Events:
    """Notes what a leg hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.tokens: list[tuple[int, int]] = []
        self.lost: str | None = None
        self.fault: Exception | None = None

    def on_reserved(self, leg: Leg, message: pb.Reserved) -> None:
        self.heard.append("reserved")

    def on_prefill_done(self, leg: Leg, message: pb.PrefillDone) -> None:
        self.heard.append("prefill_done")

    def on_handoff_done(self, leg: Leg, message: pb.HandoffDone) -> None:
        self.heard.append("handoff_done")

    def on_token(self, leg: Leg, token: pb.StepToken) -> None:
        self.tokens.append((token.index, token.offset))

    def on_step_end(self, leg: Leg) -> None:
        self.heard.append("step")

    def on_failed(self, leg: Leg, message: pb.AttemptFailed) -> None:
        self.heard.append(pb.FailureReason.Name(message.reason))

    def on_lost(self, leg: Leg, cause: str) -> None:
        self.lost = cause

    def on_fault(self, error: Exception) -> None:
        self.fault = error


def open_session(
    worker: FakeWorker, owner: Owner, key: WorkerKey | None = None, connect_timeout: float = 60.0
) -> WorkerSession:
    session = WorkerSession(
        key or worker.key,
        worker.endpoint,
        pb.Hello(
            router="r",
            incarnation=1,
            worker=pb.WorkerId(name=(key or worker.key).name, incarnation=(key or worker.key).incarnation),
        ),
        owner,
        lambda target: grpc.aio.insecure_channel(
            target,
            [
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 50),
                ("grpc.min_reconnect_backoff_ms", 50),
            ],
        ),
        connect_timeout=connect_timeout,
    )
    session.start()
    return session


@pytest.fixture
async def pair() -> AsyncIterator[tuple[FakeWorker, FakeWorker]]:
    fabric = Fabric()
    workers = (FakeWorker("p0", pb.ROLE_PREFILL, fabric), FakeWorker("d0", pb.ROLE_DECODE, fabric))
    for worker in workers:
        await worker.start()
    yield workers
    for worker in workers:
        await worker.kill()


def decode(attempt: int = 1, request: str = "q", max_tokens: int = 4, n: int = 1) -> pb.SessionRequest:
    command = pb.DecodeCommand(
        id=pb.AttemptId(request_id=request, attempt=attempt),
        owner=pb.WorkerId(name="p", incarnation=1),
        owner_endpoint="127.0.0.1:1",
    )
    command.prompt.token_ids = b"\x41\0\0\0"
    command.draw.n, command.draw.stop.max_tokens = n, max_tokens
    return pb.SessionRequest(decode=command)


def prefill(attempt: int = 1, request: str = "q", max_tokens: int = 4, n: int = 1) -> pb.SessionRequest:
    other = decode(attempt, request, max_tokens, n).decode
    return pb.SessionRequest(prefill=pb.PrefillCommand(id=other.id, prompt=other.prompt, draw=other.draw))


async def test_messages_reach_their_legs_in_order(pair: tuple[FakeWorker, FakeWorker]) -> None:
    owner = Owner()
    p, d = (open_session(worker, owner) for worker in pair)
    await until(lambda: owner.ups == 2)
    heard = [Events() for _ in range(3)]
    for number, events in enumerate(heard):
        d.start_leg((f"q{number}", 1), decode(request=f"q{number}", n=2), events)
        p.start_leg((f"q{number}", 1), prefill(request=f"q{number}", n=2), events)
    await until(lambda: all(len(events.tokens) == 6 and "prefill_done" in events.heard for events in heard))
    for events in heard:
        # One stream keeps its order; the other one may be ahead or behind.
        decode_side = [name for name in events.heard if name not in ("step", "prefill_done")]
        assert decode_side == ["reserved", "handoff_done"]
        assert events.heard.count("prefill_done") == 1
        for choice in (0, 1):
            assert [offset for index, offset in events.tokens if index == choice] == [1, 2, 3]
    pair[1].report(running_requests=3, available_blocks=9)
    await until(lambda: owner.loads)
    assert owner.loads[0].available_blocks == 9
    await p.close()
    await d.close()
    assert owner.downs == [], "a session that is closed on purpose is not lost"


async def test_a_fault_in_one_leg_does_not_end_the_stream_of_the_others(
    pair: tuple[FakeWorker, FakeWorker],
) -> None:
    class Faulty(Events):
        def on_reserved(self, leg: Leg, message: pb.Reserved) -> None:
            raise RuntimeError("bug")

    owner = Owner()
    session = open_session(pair[1], owner)
    await until(lambda: owner.ups)
    faulty, sound = Faulty(), Events()
    session.start_leg(("faulty", 1), decode(request="faulty"), faulty)
    session.start_leg(("sound", 1), decode(request="sound"), sound)
    await until(lambda: "reserved" in sound.heard)
    assert isinstance(faulty.fault, RuntimeError)
    assert owner.downs == []
    await session.close()


async def test_a_cancel_is_acknowledged(pair: tuple[FakeWorker, FakeWorker]) -> None:
    owner = Owner()
    pair[1].script.cancel_seconds = 0.05
    session = open_session(pair[1], owner)
    await until(lambda: owner.ups)
    events = Events()
    leg = session.start_leg(("q", 1), decode(), events)
    await until(lambda: "reserved" in events.heard)
    leg.cancel()
    leg.cancel()
    assert leg.state is LegState.CANCELLING
    await asyncio.wait_for(leg.wait_ended(), 60)
    assert pair[1].cancels == [("q", 1)], "sent once"
    assert not pair[1].held
    assert session.legs == 0
    assert events.lost is None
    await session.close()


async def test_a_leg_that_was_not_sent_is_dropped_without_a_message(
    pair: tuple[FakeWorker, FakeWorker],
) -> None:
    owner = Owner()
    session = open_session(pair[1], owner)
    await until(lambda: owner.ups)
    leg = session.start_leg(("q", 1), decode(), Events())
    leg.cancel()  # before the writer had its turn
    assert leg.ended
    marker = Events()
    session.start_leg(("next", 1), decode(request="next"), marker)
    await until(lambda: "reserved" in marker.heard)
    assert [command.id.request_id for command in pair[1].decodes] == ["next"]
    assert pair[1].cancels == []
    await session.close()


async def test_a_failure_ends_the_leg(pair: tuple[FakeWorker, FakeWorker]) -> None:
    owner = Owner()
    pair[1].script.refuse = pb.FAILURE_REASON_NO_CAPACITY
    session = open_session(pair[1], owner)
    await until(lambda: owner.ups)
    events = Events()
    leg = session.start_leg(("q", 1), decode(), events)
    await until(lambda: leg.ended)
    assert events.heard == ["FAILURE_REASON_NO_CAPACITY"]
    await session.close()


async def test_a_broken_stream_loses_its_legs_and_is_dialled_again(
    pair: tuple[FakeWorker, FakeWorker],
) -> None:
    owner = Owner()
    session = open_session(pair[1], owner)
    await until(lambda: owner.ups)
    running, cancelling = Events(), Events()
    leg = session.start_leg(("q", 1), decode(), running)
    pair[1].script.silent.add("cancelled")
    other = session.start_leg(("c", 1), decode(request="c"), cancelling)
    await until(lambda: "reserved" in cancelling.heard)
    other.cancel()
    await pair[1].kill()
    await until(lambda: owner.downs)
    assert leg.ended
    assert running.lost is not None
    assert other.ended, "what a dead stream held is gone, so the cancel is answered"
    assert cancelling.lost is None
    late = Events()
    session.start_leg(("late", 1), decode(request="late"), late)
    await until(lambda: late.lost is not None)
    await pair[1].start()
    await until(lambda: owner.ups == 2)
    again = Events()
    session.start_leg(("q", 2), decode(attempt=2), again)
    await until(lambda: "reserved" in again.heard)
    await session.close()


async def test_another_incarnation_is_not_taken_for_the_worker(pair: tuple[FakeWorker, FakeWorker]) -> None:
    owner = Owner()
    session = open_session(pair[1], owner, WorkerKey("d0", pair[1].key.incarnation ^ 1))
    await until(lambda: pair[1].calls >= 3)
    assert owner.ups == 0
    assert owner.downs == [], "what never was up does not go down"
    await session.close()


async def test_a_worker_that_does_not_answer_hello_is_not_up(pair: tuple[FakeWorker, FakeWorker]) -> None:
    owner = Owner()
    pair[1].script = Script(silent={"welcome"})
    session = open_session(pair[1], owner, connect_timeout=0.1)
    await until(lambda: pair[1].calls >= 3)
    assert owner.ups == 0
    await session.close()
    await until(lambda: not pair[1].sessions)


async def test_a_worker_that_can_be_reached_again_is_not_waited_for(
    pair: tuple[FakeWorker, FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda _low, _high: 3600.0)
    decoder = pair[1]
    owner = Owner()
    session = open_session(decoder, owner)
    await until(lambda: session.up)
    await decoder.kill()
    await until(lambda: not session.up and owner.downs != [])
    await decoder.start()
    calls = decoder.calls
    session.retry_now()
    await until(lambda: session.up)
    assert (decoder.calls, owner.ups) == (calls + 1, 2)
    await session.close()


async def test_one_that_is_ready_again_is_reached_at_once(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda _low, _high: 3600.0)
    async with fake_cluster(model_path) as cluster:
        worker = cluster.workers["d0"]
        session = cluster.router.fleet.session(worker.key)
        assert session is not None
        await worker.kill()
        await until(lambda: not session.up)
        cluster.router.fleet.upsert(worker.record(control_pb2.WORKER_STATE_UNREADY))
        await worker.start()
        cluster.router.fleet.upsert(worker.record())
        await until(lambda: session.up)
