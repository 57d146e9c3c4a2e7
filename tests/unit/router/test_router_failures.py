# SPDX-License-Identifier: Apache-2.0
"""Everything that can end a request early: the client hears the one cause, and nothing is left anywhere."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from tests.support.fake_cluster import DRAINING, Answer, FakeCluster, collect, fake_cluster, generate, prompt
from tests.support.fake_worker import FIRST_TOKEN, FakeWorker, Script
from tests.support.transports import each_transport  # noqa: F401
from tests.support.waiting import until
from twinpool.v1 import inference_pb2
from twinpool.v1 import worker_pb2 as pb

SLOW = 30.0


# --- load -----------------------------------------------------------------------------------


async def test_load_counts_from_the_moment_of_choice(model_path: Path) -> None:
    """32 requests at once over 3 pairs: none of them piles up on the first worker."""
    gate = asyncio.Event()
    async with fake_cluster(
        model_path, prefill=3, decode=3, prefill_script=Script(prefill_gate=gate)
    ) as cluster:
        asks = [
            asyncio.create_task(cluster.ask(generate(prompt(64, seed), max_tokens=1))) for seed in range(32)
        ]
        await until(lambda: sum(len(made.prefills) for made in cluster.workers.values()) == 32)
        for role in ("p", "d"):
            workers = [cluster.workers[f"{role}{at}"] for at in range(3)]
            shares = [len(made.prefills) + len(made.decodes) for made in workers]
            assert all(9 <= share <= 12 for share in shares), shares
        gate.set()
        assert all(answer.error is None for answer in await asyncio.gather(*asks))
        await cluster.assert_quiescent()


async def test_the_same_prompt_goes_where_its_prefix_is(model_path: Path) -> None:
    async with fake_cluster(model_path, prefill=3, decode=3) as cluster:
        first = await cluster.ask(generate(prompt(640), max_tokens=2))
        for _ in range(3):
            again = await cluster.ask(generate(prompt(640), max_tokens=2))
            assert again.finished.prefill_worker == first.finished.prefill_worker
            assert again.finished.decode_worker == first.finished.decode_worker


# --- one leg fails ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (pb.FAILURE_REASON_INVALID, grpc.StatusCode.INVALID_ARGUMENT),
        (pb.FAILURE_REASON_INTERNAL, grpc.StatusCode.INTERNAL),
        (pb.FAILURE_REASON_DEADLINE, grpc.StatusCode.DEADLINE_EXCEEDED),
        (pb.FAILURE_REASON_DUPLICATE, grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_failed_prefill_ends_the_waiting_decode(
    model_path: Path, reason: "pb.FailureReason.ValueType", code: grpc.StatusCode
) -> None:
    script = Script(fail_prefill=reason, detail="the prompt is bad")
    async with fake_cluster(model_path, prefill_script=script) as cluster:
        answer = await cluster.ask(generate())
        assert answer.code is code
        assert answer.error is not None
        assert "the prompt is bad" in answer.error.message, "the worker's own text"
        await cluster.assert_quiescent()
        assert len(cluster.workers["d0"].cancels) == 1


async def test_a_prefill_that_always_fails_is_tried_so_often_and_no_more(model_path: Path) -> None:
    script = Script(fail_prefill=pb.FAILURE_REASON_FENCED)
    async with fake_cluster(model_path, prefill=2, decode=2, prefill_script=script) as cluster:
        answer = await cluster.ask(generate())
        assert answer.code is grpc.StatusCode.UNAVAILABLE
        assert answer.reason == "ATTEMPTS_EXHAUSTED"
        assert answer.error is not None
        assert answer.error.metadata["cause"] == "KV_FENCED"
        assert sum(len(worker.prefills) for worker in cluster.workers.values()) == 3
        await cluster.assert_quiescent()


async def test_the_next_attempt_waits_for_the_acknowledgement_of_the_last(model_path: Path) -> None:
    async with fake_cluster(model_path, decode_script=Script(cancel_seconds=0.2)) as cluster:
        prefill, decode = cluster.workers["p0"], cluster.workers["d0"]
        prefill.script = Script(fail_prefill=pb.FAILURE_REASON_FENCED)
        task = asyncio.create_task(cluster.ask(generate()))
        await until(lambda: decode.cancels)
        prefill.script = Script()
        answer = await task
        assert answer.finished.attempts == 2
        assert len(decode.decodes) == 2
        assert decode.overlaps == []
        assert answer.finished.timings.queue.ToMilliseconds() >= 190
        await cluster.assert_quiescent()


async def test_a_refusal_goes_to_another_worker(model_path: Path) -> None:
    async with fake_cluster(model_path, decode=2) as cluster:
        cluster.workers["d0"].script = Script(refuse=pb.FAILURE_REASON_NO_CAPACITY)
        answers = await asyncio.gather(*(cluster.ask(generate(prompt(40, seed))) for seed in range(6)))
        assert {answer.finished.decode_worker for answer in answers} == {"d1"}
        assert len(cluster.workers["p0"].prefills) == 6, "prefill never starts without a reservation"
        await cluster.assert_quiescent()


async def test_a_draining_worker_gets_no_new_work_and_keeps_its_own(model_path: Path) -> None:
    slow = Script(step_seconds=0.01)
    async with fake_cluster(model_path, decode=2, decode_script=slow) as cluster:
        running = [
            asyncio.create_task(cluster.ask(generate(prompt(40, seed), max_tokens=40))) for seed in range(4)
        ]
        await until(lambda: sum(len(worker.decodes) for worker in cluster.workers.values()) == 4)
        cluster.router.fleet.upsert(cluster.workers["d0"].record(DRAINING))
        before = len(cluster.workers["d0"].decodes)
        for seed in range(10, 14):
            assert (await cluster.ask(generate(prompt(40, seed)))).finished.decode_worker == "d1"
        assert len(cluster.workers["d0"].decodes) == before
        assert all(answer.error is None for answer in await asyncio.gather(*running))


# --- a worker dies ----------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["p", "d"])
async def test_a_worker_that_dies_before_the_first_token_is_replaced(model_path: Path, role: str) -> None:
    async with fake_cluster(
        model_path, prefill=2, decode=2, prefill_script=Script(prefill_seconds=0.2)
    ) as cluster:
        task = asyncio.create_task(cluster.ask(generate()))
        await until(lambda: any(worker.prefills for worker in cluster.workers.values()))
        victim = next(worker for name, worker in cluster.workers.items() if name[0] == role and worker.held)
        await victim.kill()
        answer = await task
        assert answer.finished.attempts == 2
        assert answer.text() == "ABCD"
        assert victim.key.name not in (answer.finished.prefill_worker, answer.finished.decode_worker)
        await cluster.assert_quiescent()


async def test_a_prefill_worker_that_dies_after_the_hand_off_is_not_missed(model_path: Path) -> None:
    async with fake_cluster(model_path, decode_script=Script(step_seconds=0.01)) as cluster:
        task = asyncio.create_task(cluster.ask(generate(max_tokens=30)))
        await until(lambda: any(session.running for session in cluster.workers["d0"].sessions))
        await cluster.workers["p0"].kill()
        assert (await task).finished.usage.completion_tokens == 30


@pytest.mark.parametrize("pulled", [True, False])
async def test_whether_a_dead_prefill_worker_is_missed_is_for_the_decode_worker_to_say(
    model_path: Path, pulled: bool
) -> None:
    """It dies between the first token and the end of the hand-off: the reader holds all by then, or it does not."""
    gate = asyncio.Event()
    script = Script(handoff_gate=gate, fail_handoff=None if pulled else pb.FAILURE_REASON_PEER_LOST)
    settings: dict[str, object] = {"max_resumes": 0}
    async with fake_cluster(model_path, decode_script=script, settings=settings) as cluster:
        task = asyncio.create_task(cluster.ask(generate(max_tokens=5)))
        await until(lambda: handing_off(cluster))
        await cluster.workers["p0"].kill()
        gate.set()
        answer = await task
        if pulled:
            assert answer.text() == "ABCDE"
        else:
            assert (answer.code, answer.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
            assert answer.tokens() == [FIRST_TOKEN]
        await cluster.assert_quiescent()


async def test_a_dead_worker_gets_no_more_requests_and_comes_back(model_path: Path) -> None:
    settings: dict[str, object] = {"quarantine_seconds": 0.3}
    async with fake_cluster(model_path, decode=2, settings=settings) as cluster:
        victim = cluster.workers["d0"]
        session = cluster.router.fleet.session(victim.key)
        assert session is not None
        await victim.kill()
        await until(lambda: not session.up)
        answers = await asyncio.gather(*(cluster.ask(generate(prompt(40, seed))) for seed in range(8)))
        assert all(answer.finished.decode_worker == "d1" for answer in answers)
        assert all(answer.finished.attempts == 1 for answer in answers), "it was not even tried"
        await victim.start()
        await until(lambda: session.up)
        before, seeds = len(victim.decodes), itertools.count(20)
        async with asyncio.timeout(60):
            while len(victim.decodes) == before:
                await asyncio.gather(*(cluster.ask(generate(prompt(40, next(seeds)))) for _ in range(8)))
        await cluster.assert_quiescent()


async def test_another_incarnation_takes_over_the_name(model_path: Path) -> None:
    async with fake_cluster(model_path) as cluster:
        await cluster.ask(generate(prompt(64)))
        worker = cluster.workers["d0"]
        before = worker.key
        await worker.restart()
        cluster.router.fleet.upsert(worker.record())
        await cluster.ready()
        assert (await cluster.ask(generate(prompt(64)))).error is None
        assert cluster.router.fleet.session(before) is None
        names = [(row["name"], row["incarnation"]) for row in cluster.router.core.workers()]
        assert sorted(names) == sorted(
            (made.key.name, made.key.incarnation) for made in cluster.workers.values()
        )
        await cluster.assert_quiescent()


async def test_a_decode_worker_that_does_not_answer_is_given_up(model_path: Path) -> None:
    settings: dict[str, object] = {"reserve_timeout_seconds": 1.0}
    async with fake_cluster(model_path, decode=2, settings=settings) as cluster:
        cluster.workers["d0"].script = Script(silent={"reserved"})
        answers = await asyncio.gather(*(cluster.ask(generate(prompt(40, seed))) for seed in range(4)))
        assert {answer.finished.decode_worker for answer in answers} == {"d1"}
        await cluster.assert_quiescent()


async def test_a_removed_worker_finishes_what_it_has(model_path: Path) -> None:
    async with fake_cluster(model_path, decode_script=Script(step_seconds=0.01)) as cluster:
        task = asyncio.create_task(cluster.ask(generate(max_tokens=30)))
        await until(lambda: any(session.running for session in cluster.workers["d0"].sessions))
        cluster.router.fleet.remove(cluster.workers["d0"].record())
        assert (await task).error is None
        await until(lambda: not cluster.workers["d0"].sessions)
        assert cluster.router.core.stats()["reservations"] == 0


# --- the client ends it -----------------------------------------------------------------------


def queued(cluster: FakeCluster) -> bool:
    return cluster.router.core.stats()["queued"] > 0


def reserving(cluster: FakeCluster) -> bool:
    return bool(cluster.workers["d0"].decodes) and not cluster.workers["p0"].prefills


def prefilling(cluster: FakeCluster) -> bool:
    return bool(cluster.workers["p0"].held)


def handing_off(cluster: FakeCluster) -> bool:
    core = cluster.router.core.stats()
    return core["state_HandingOff"] > 0


def decoding(cluster: FakeCluster) -> bool:
    return cluster.router.core.stats()["state_Decoding"] > 0


PHASES: dict[str, tuple[Callable[[FakeCluster], bool], Script, Script]] = {
    "reserving": (reserving, Script(), Script(reserve_seconds=SLOW)),
    "prefilling": (prefilling, Script(prefill_seconds=SLOW), Script()),
    "handing off": (handing_off, Script(), Script(handoff_seconds=SLOW)),
    "decoding": (decoding, Script(), Script(step_seconds=0.01)),
}


Call = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


async def begun_call(
    cluster: FakeCluster,
    request: inference_pb2.GenerateRequest,
    how: str,
    reached: Callable[[FakeCluster], bool],
) -> tuple[Call, "asyncio.Task[Answer]"]:
    """A call that is in the phase. Its deadline, if that is to end it, is as short as this machine allows."""
    for seconds in (0.4, 4.0, 40.0):
        call = cluster.stub.Generate(request, timeout=seconds if how == "deadline" else None)
        task = asyncio.create_task(collect(call))
        await until(lambda task=task: reached(cluster) or task.done())  # type: ignore[misc]
        if not task.done():
            return call, task
        await cluster.assert_quiescent()
    raise AssertionError("the phase is not reached")


@pytest.mark.parametrize("how", ["cancel", "deadline", "disconnect"])
@pytest.mark.parametrize("phase", PHASES)
async def test_the_end_by_the_client_reaches_both_workers(model_path: Path, phase: str, how: str) -> None:
    reached, prefill_script, decode_script = PHASES[phase]
    async with fake_cluster(
        model_path, prefill_script=prefill_script, decode_script=decode_script
    ) as cluster:
        call, task = await begun_call(cluster, generate(max_tokens=4000), how, reached)
        begun = {name for name, worker in cluster.workers.items() if worker.held}
        if how == "cancel":
            call.cancel()
        elif how == "disconnect":
            await cluster.channel.close(None)
        answer = await task
        expected = grpc.StatusCode.DEADLINE_EXCEEDED if how == "deadline" else grpc.StatusCode.CANCELLED
        assert answer.code is expected
        await cluster.assert_quiescent()
        assert all(cluster.workers[name].cancels for name in begun), (
            "told by a command, not by a broken stream"
        )


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_the_end_by_the_client_while_it_waits(model_path: Path, how: str) -> None:
    async with fake_cluster(model_path, decode=0) as cluster:
        await until(lambda: cluster.router.models.names())
        await cluster.add("d0", pb.ROLE_DECODE, model_path=str(model_path))
        await cluster.ready()
        cluster.router.fleet.upsert(cluster.workers["d0"].record(DRAINING))
        call, task = await begun_call(cluster, generate(), how, queued)
        if how == "cancel":
            call.cancel()
        assert (await task).code is (
            grpc.StatusCode.CANCELLED if how == "cancel" else grpc.StatusCode.DEADLINE_EXCEEDED
        )
        await cluster.assert_quiescent()
        assert not cluster.workers["d0"].decodes


async def test_a_cancel_that_is_not_acknowledged_holds_nothing_up_for_long(model_path: Path) -> None:
    settings: dict[str, object] = {"cancel_timeout_seconds": 0.2}
    script = Script(prefill_seconds=SLOW, silent={"cancelled"})
    async with fake_cluster(model_path, prefill_script=script, settings=settings) as cluster:
        call = cluster.stub.Generate(generate())
        task = asyncio.create_task(collect(call))
        await until(lambda: prefilling(cluster))
        call.cancel()
        await task
        await until(lambda: not len(cluster.router.background))
        await cluster.assert_quiescent()


async def test_a_request_that_waits_too_long_is_told_so(model_path: Path) -> None:
    settings: dict[str, object] = {"queue_ttl_seconds": 0.2}
    async with fake_cluster(model_path, settings=settings) as cluster:
        cluster.router.fleet.upsert(cluster.workers["d0"].record(DRAINING))
        answer = await cluster.ask(generate())
        assert answer.code is grpc.StatusCode.UNAVAILABLE
        assert answer.reason == "NO_WORKERS"
        assert answer.error is not None
        assert answer.error.retry_after is not None
        await cluster.assert_quiescent()


async def test_a_full_queue_refuses_with_the_limit_and_a_delay(model_path: Path) -> None:
    settings: dict[str, object] = {"max_queue_requests": 2}
    async with fake_cluster(model_path, settings=settings) as cluster:
        cluster.router.fleet.upsert(cluster.workers["d0"].record(DRAINING))
        waiting = [cluster.stub.Generate(generate()) for _ in range(2)]
        ends = [asyncio.create_task(collect(call)) for call in waiting]
        await until(lambda: cluster.router.core.stats()["queued"] == 2)
        answer = await cluster.ask(generate())
        assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert answer.reason == "QUEUE_FULL"
        assert answer.error is not None
        assert answer.error.retry_after is not None
        assert answer.error.metadata["limit"] == "max_queue_requests=2"
        assert answer.error.message == "the queue is full; the limit is max_queue_requests=2"
        for call in waiting:
            call.cancel()
        await asyncio.gather(*ends)
        await cluster.assert_quiescent()


async def test_a_stop_waits_for_running_streams(model_path: Path) -> None:
    async with fake_cluster(model_path, decode_script=Script(step_seconds=0.01)) as cluster:
        task = asyncio.create_task(cluster.ask(generate(max_tokens=30)))
        await until(lambda: decoding(cluster))
        await cluster.router.stop(60.0)
        assert (await task).finished.usage.completion_tokens == 30
        refused = await cluster.ask(generate())
        assert refused.code is grpc.StatusCode.UNAVAILABLE


async def test_tokens_that_overtake_the_first_one_wait_for_it(model_path: Path) -> None:
    """Two streams, no order between them: the decode worker may be heard before the prefill worker."""
    async with fake_cluster(model_path) as cluster:
        worker: FakeWorker = cluster.workers["p0"]
        worker.script.report_seconds = 0.1
        answer = await cluster.ask(generate(max_tokens=6))
        assert answer.text() == "ABCDEF"
        assert cluster.workers["d0"].decodes
        await cluster.assert_quiescent()
