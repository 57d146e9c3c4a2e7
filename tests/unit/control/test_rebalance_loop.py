# SPDX-License-Identifier: Apache-2.0
"""The live loop, plans and the operator's desk, with a pool, operations and events of the test's own."""

import asyncio

import pytest

from tests.support.waiting import until
from tests.unit.control.rebalancing import SETTINGS, pool, spec, telemetry
from tests.unit.control.rebalancing_pool import Pool, desk_of, loop_of
from twinpool.control import patience
from twinpool.control.rebalance.history import History
from twinpool.control.rebalance.loop import RebalanceLoop, move_of
from twinpool.control.rebalance.plan import plan_split
from twinpool.control.rebalance.policy import Policy
from twinpool.control.rebalance.split import Split
from twinpool.control.rebalance.window import Sample
from twinpool.errors import TwinpoolError
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2

POLICY = Policy(SETTINGS)


async def turn(loop: RebalanceLoop, around: Pool, times: int = 1) -> None:
    for _ in range(times):
        around.now += SETTINGS.interval_seconds
        await loop.tick(around.spec)


# --- the loop -------------------------------------------------------------------------------------


async def test_flips_what_the_load_needs_and_says_why() -> None:
    around = Pool()
    loop = loop_of(around)
    await turn(loop, around, 12)
    (flip,) = around.operations
    assert flip.worker.name.startswith("decode-")
    assert flip.target_role == worker_pb2.ROLE_PREFILL
    assert "prefill at" in flip.reason
    assert around.told == [("RebalanceMorePrefill", flip.worker.name, False)]
    decision = loop.decision("default")
    assert decision is not None
    assert decision.reason == "UnderWay"
    around.end(flip)
    await turn(loop, around, 12)
    assert len(around.operations) == 2
    assert loop.history("default").moves[0].succeeded


async def test_a_flip_that_fails_leaves_its_worker_alone_for_a_while() -> None:
    around = Pool()
    loop = loop_of(around)
    await turn(loop, around, 12)
    around.end(around.operations[0], "DEADLINE_EXCEEDED: not free")
    await turn(loop, around, 8)
    first, second = around.operations
    assert first.worker.name != second.worker.name
    assert not loop.history("default").moves[0].succeeded


async def test_a_refused_flip_is_told_and_another_worker_is_tried() -> None:
    around = Pool(refusal=TwinpoolError("OPERATION_RUNNING", "a drain runs"))
    loop = loop_of(around)
    await turn(loop, around, 14)
    refused = [
        subject for reason, subject, warning in around.told if reason == "RebalanceRefused" and warning
    ]
    assert len(set(refused)) == len(refused) >= 2
    assert around.operations == []


async def test_a_pool_that_is_not_auto_is_only_watched() -> None:
    around = Pool()
    around.spec.auto = False
    loop = loop_of(around)
    await turn(loop, around, 12)
    assert around.operations == []
    assert around.told == []
    decision = loop.decision("default")
    assert decision is not None
    assert decision.kind == "flip"


async def test_what_an_operator_has_begun_comes_first() -> None:
    around = Pool()
    loop = loop_of(around)
    begun = pb.Operation(
        id="rebalance-1",
        kind=pb.OPERATION_KIND_REBALANCE,
        pool="default",
        state=pb.OPERATION_STATE_RUNNING,
    )
    await around.submit(begun)
    await turn(loop, around, 12)
    assert around.operations == [begun]
    assert around.told == []
    begun.state = pb.OPERATION_STATE_SUCCEEDED
    await turn(loop, around, 1)
    assert [op.kind for op in around.operations[1:]] == [pb.OPERATION_KIND_FLIP]


async def test_a_scale_is_a_change_of_the_pool_for_the_next_leader_too() -> None:
    around = Pool()
    around.end(around._begun(pb.OPERATION_KIND_SCALE, "", ""))
    loop = loop_of(around)
    await turn(loop, around, 1)
    assert loop.history("default").last_change == around.operations[0].created_at.ToNanoseconds() / 1e9


async def test_a_dry_run_tells_once_and_flips_nothing() -> None:
    around = Pool()
    loop = loop_of(around, SETTINGS.model_copy(update={"dry_run": True}))
    await turn(loop, around, 20)
    assert around.operations == []
    assert [reason for reason, _, _ in around.told] == ["RebalanceDryRun"]


async def test_what_holds_a_change_back_is_told_once() -> None:
    around = Pool(prefill=3, decode=1)
    await turn(loop_of(around), around, 30)
    assert [reason for reason, _, _ in around.told] == ["RebalanceHeld"]


async def test_a_loop_that_starts_anew_keeps_the_pace() -> None:
    """The operations' records are what the dwell, the cooldown and the guard against reversals go by."""
    around = Pool()
    await turn(loop_of(around), around, 12)
    around.end(around.operations[0])
    again = loop_of(around)
    await turn(again, around, 1)
    moves = again.history("default").moves
    assert [(move.worker, move.to, move.ended is not None) for move in moves] == [
        (around.operations[0].worker.name, "prefill", True)
    ]


async def test_a_pool_that_does_not_answer_is_left_alone() -> None:
    around = Pool(silent=True)
    loop = loop_of(around)
    assert await loop.tick(around.spec) is None
    assert loop.telemetry("default") is None


async def test_one_failure_does_not_end_the_loop() -> None:
    around = Pool()
    calls = 0

    async def sample(pool: str, at: float) -> Sample | None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("once")
        return None

    around.sample = sample  # type: ignore[method-assign]
    loop = loop_of(around, SETTINGS.model_copy(update={"interval_seconds": 0.01}))
    loop.start()
    await until(lambda: calls > 2)
    await loop.stop()


def test_a_record_of_a_flip_is_a_move() -> None:
    operation = pb.Operation(kind=pb.OPERATION_KIND_FLIP, state=pb.OPERATION_STATE_FAILED)
    operation.worker.name, operation.target_role = "w", worker_pb2.ROLE_DECODE
    operation.created_at.FromNanoseconds(int(50e9))
    operation.ended_at.FromNanoseconds(int(60e9))
    move = move_of(operation)
    assert move is not None
    assert (move.worker, move.to, move.began, move.ended, move.succeeded) == (
        "w",
        "decode",
        50.0,
        60.0,
        False,
    )
    assert move_of(pb.Operation()) is None


# --- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "flips", "added"),
    [
        ((3, 5), ["prefill-0"], 0),
        ((6, 2), ["decode-0", "decode-1"], 0),
        ((4, 4), [], 0),
        ((6, 3), ["decode-0"], 1),
        ((2, 2), [], -4),
        ((6, 1), ["decode-0", "decode-1"], -1),
        ((5, 5), [], 2),
    ],
)
def test_a_plan_flips_first_and_scales_for_the_rest(
    wanted: tuple[int, int], flips: list[str], added: int
) -> None:
    plan = plan_split(POLICY, telemetry(1.0, 1.0, pool(4, 4)), spec(), History(), Split(*wanted))
    assert [flip.worker for flip in plan.flips] == flips
    assert plan.added == added
    assert plan.empty == (wanted == (4, 4))


def test_a_plan_without_numbers_is_what_suits_the_load() -> None:
    plan = plan_split(POLICY, telemetry(4.4, 0.9, pool(4, 4)), spec(), History(), None)
    assert plan.after == Split(6, 2)
    assert plan.effect is not None
    assert plan.effect.served_after == 1.0 > plan.effect.served
    message = plan.message([])
    assert (message.prefill, message.decode, len(message.moves)) == (6, 2, 2)
    assert message.effect.prefill_utilisation == pytest.approx(1.1)
    with pytest.raises(TwinpoolError, match="not known yet"):
        plan_split(POLICY, telemetry(1.0, 1.0, pool(4, 4), seconds=0.0), spec(), History(), None)


def test_a_plan_keeps_the_bounds() -> None:
    with pytest.raises(TwinpoolError, match="outside of the bounds"):
        plan_split(POLICY, telemetry(1.0, 1.0, pool(4, 4)), spec(least=2), History(), Split(7, 1))


# --- the desk -------------------------------------------------------------------------------------


async def test_an_operation_flips_one_after_the_other_then_scales() -> None:
    around = Pool(at_once=True)
    desk = desk_of(around, loop_of(around))
    answer = await desk.rebalance(pb.RebalancePoolRequest(prefill=5, decode=2), None)
    operation = around.operations[0]
    assert answer.operation.id == operation.id
    assert [move.target_role for move in answer.plan.moves] == [worker_pb2.ROLE_PREFILL]
    for step in desk.steps.values():
        await step(operation)
    flip, scale = around.operations[1:]
    assert (flip.kind, flip.parent) == (pb.OPERATION_KIND_FLIP, operation.id)
    assert (scale.kind, scale.plan.prefill, scale.plan.decode) == (pb.OPERATION_KIND_SCALE, 5, 2)
    assert around.count("prefill") == 4
    # Whoever leads after one that died before it could note that the scale is done finds it.
    await desk.steps["scale"](operation)
    assert len(around.operations) == 3


async def test_an_operation_that_is_resumed_goes_on_with_the_flip_that_runs() -> None:
    around = Pool()
    desk = desk_of(around, loop_of(around))
    await desk.rebalance(pb.RebalancePoolRequest(prefill=5), None)
    operation = around.operations[0]
    first = asyncio.create_task(desk.steps["flip"](operation))
    await until(lambda: len(around.operations) == 2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(desk_of(around, loop_of(around)).steps["flip"](operation))
    around.end(around.operations[1])
    await until(lambda: len(around.operations) == 3)
    assert around.operations[2].worker.name != around.operations[1].worker.name
    around.end(around.operations[2])
    await asyncio.wait_for(second, 30)
    assert around.count("prefill") == 5
    assert len(around.operations) == 3


async def test_an_operation_fails_with_what_its_flip_failed_with() -> None:
    around = Pool()
    desk = desk_of(around, loop_of(around))
    await desk.rebalance(pb.RebalancePoolRequest(prefill=4), None)
    task = asyncio.create_task(desk.steps["flip"](around.operations[0]))
    await until(lambda: len(around.operations) == 2)
    around.end(around.operations[1], "DEADLINE_EXCEEDED: w is not free")
    with pytest.raises(TwinpoolError, match="is not free") as caught:
        await asyncio.wait_for(task, 30)
    assert caught.value.reason == "DEADLINE_EXCEEDED"


async def test_workers_that_are_not_fit_for_a_moment_are_waited_for_not_replaced() -> None:
    """A machine that stalls makes a worker unready for a second: that is no reason to start another one and to drain it."""
    around = Pool(at_once=True)
    desk = desk_of(around, loop_of(around))
    around.unready = {name for name, role in around.roles.items() if role == "decode"}
    answer = await desk.rebalance(pb.RebalancePoolRequest(prefill=4, decode=2), None)
    assert (answer.plan.added, len(answer.plan.moves)) == (0, 0)
    operation = around.operations[0]
    operation.steps.add(name="flip")
    task = asyncio.create_task(desk.steps["flip"](operation))
    await until(lambda: "is ready to change" in operation.steps[-1].detail)
    assert len(around.operations) == 1
    around.unready = set()
    await asyncio.wait_for(task, 30)
    await desk.steps["scale"](operation)
    assert [op.kind for op in around.operations[1:]] == [pb.OPERATION_KIND_FLIP]
    assert (around.count("prefill"), around.count("decode")) == (4, 2)


async def test_etcd_away_is_waited_for_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "RETRY_SECONDS", 0.01)
    around = Pool(at_once=True)
    desk = desk_of(around, loop_of(around))
    await desk.rebalance(pb.RebalancePoolRequest(prefill=5, decode=2), None)
    operation = around.operations[0]
    operation.steps.add(name="flip")
    around.refusal = TwinpoolError("STORE_UNAVAILABLE", "planted")
    task = asyncio.create_task(desk.steps["flip"](operation))
    await until(lambda: operation.steps[-1].detail == "etcd cannot be written: STORE_UNAVAILABLE")
    assert not task.done()
    around.refusal = None
    await asyncio.wait_for(task, 30)
    around.refusal = TwinpoolError("STORE_UNAVAILABLE", "planted")
    operation.steps.add(name="scale")
    task = asyncio.create_task(desk.steps["scale"](operation))
    await until(lambda: operation.steps[-1].detail)
    around.refusal = None
    await asyncio.wait_for(task, 30)
    assert [op.kind for op in around.operations[1:]] == [pb.OPERATION_KIND_FLIP, pb.OPERATION_KIND_SCALE]


async def test_a_dry_run_begins_nothing_and_auto_is_kept() -> None:
    around = Pool()
    desk = desk_of(around, loop_of(around))
    answer = await desk.rebalance(pb.RebalancePoolRequest(prefill=4, dry_run=True), None)
    assert len(answer.plan.moves) == 1
    assert not answer.HasField("operation")
    answer = await desk.rebalance(pb.RebalancePoolRequest(auto=False, dry_run=True), None)
    assert around.spec.auto
    answer = await desk.rebalance(pb.RebalancePoolRequest(auto=False), None)
    assert not around.spec.auto
    assert not answer.auto
    assert around.operations == []


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (pb.RebalancePoolRequest(pool="other"), "there are: default"),
        (pb.RebalancePoolRequest(prefill=2, auto=True), "exclude one another"),
        (pb.RebalancePoolRequest(prefill=6), "outside of the bounds"),
        (pb.RebalancePoolRequest(), "not known yet"),
    ],
)
async def test_refuses_what_cannot_be(request_: pb.RebalancePoolRequest, said: str) -> None:
    around = Pool()
    with pytest.raises(TwinpoolError, match=said) as caught:
        await desk_of(around, loop_of(around)).rebalance(request_, None)
    assert caught.value.reason == "INVALID_ARGUMENT"


async def test_one_rebalance_at_a_time() -> None:
    around = Pool()
    desk = desk_of(around, loop_of(around))
    await desk.rebalance(pb.RebalancePoolRequest(prefill=4), None)
    with pytest.raises(TwinpoolError) as caught:
        await desk.rebalance(pb.RebalancePoolRequest(prefill=5), None)
    assert caught.value.reason == "OPERATION_RUNNING"


async def test_the_outlook_of_auto_is_the_next_decision() -> None:
    around = Pool()
    around.spec.auto = False
    loop = loop_of(around)
    await turn(loop, around, 12)
    answer = await desk_of(around, loop).rebalance(pb.RebalancePoolRequest(auto=True), None)
    assert answer.plan.reason.startswith("MorePrefill")
    assert (answer.plan.prefill, answer.plan.decode) == (4, 2)
    assert answer.plan.HasField("effect")
    assert around.spec.auto
