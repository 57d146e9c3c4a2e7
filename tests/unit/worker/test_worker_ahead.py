# SPDX-License-Identifier: Apache-2.0
"""A decode worker that begins steps before the tokens of the ones before are told: the same tokens, and nothing left behind."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from unittest.mock import patch

import pytest
from worker_pair import BLOCK, Pair, cancel_command, decode_command, random_prompt, reference

from twinpool._core import StepPlan
from twinpool.engine.begun import BegunStep
from twinpool.engine.runner import ModelRunner
from twinpool.engine.step import StepResult
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.step_ahead import FOLLOWED_MAX

Follow = Callable[..., BegunStep]


class Collected:
    """What the decode worker has said, by request."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ended: dict[str, int] = {}
        self.failed: dict[str, int] = {}

    def take(self) -> None:
        for message in self.pair.decode.take("prefill_done"):
            done = message.prefill_done
            self.tokens[done.id.request_id] += [first.token_id for first in done.first_tokens]
        for message in self.pair.decode.take("step"):
            for token in message.step.tokens:
                name = message.step.ids[token.slot].request_id
                assert token.offset == len(self.tokens[name]), "a token is missing or came twice"
                assert name not in self.ended, "a token after the end"
                self.tokens[name].append(token.token_id)
                if token.finish:
                    self.ended[name] = token.finish
        for message in self.pair.decode.take("failed"):
            self.failed[message.failed.id.request_id] = message.failed.reason

    def run(self, until: Callable[[], bool]) -> None:
        def reached() -> bool:
            self.take()
            return until()

        self.pair.run(reached)


def start(pair: Pair, prompt: list[int], name: str, **spec: object) -> None:
    pair.decode.do(decode_command(pair, prompt, name, local=True, **spec))  # type: ignore[arg-type]


@pytest.fixture
def pair() -> Pair:
    return Pair(ahead="on", decode_blocks=64)


@pytest.fixture
def followed() -> Iterator[list[int]]:
    """How many sequences each step had that was begun ahead."""
    counts: list[int] = []
    follow = ModelRunner.follow

    def counting(self: ModelRunner, before: BegunStep, plan: StepPlan, draws: list[object]) -> BegunStep:
        counts.append(len(plan.seq))
        return follow(self, before, plan, draws)  # type: ignore[arg-type]

    with patch.object(ModelRunner, "follow", counting):
        yield counts


def test_tokens_are_those_of_steps_one_after_the_other(pair: Pair, followed: list[int]) -> None:
    """Answers of unequal length over several blocks, which end in the midst of others."""
    asked = {
        f"r{number}": (random_prompt(3 + 11 * number, seed=number), 9 + 8 * number) for number in range(5)
    }
    for name, (prompt, count) in asked.items():
        start(pair, prompt, name, max_tokens=count)
    got = Collected(pair)
    got.run(lambda: len(got.ended) == len(asked))
    assert {name: got.tokens[name] for name in asked} == {
        name: reference(prompt, count) for name, (prompt, count) in asked.items()
    }
    assert {len(asked), 1} <= set(followed), "steps of all, and of the last one, were begun ahead"
    pair.assert_quiet()


def test_one_that_stops_ends_where_it_stops(pair: Pair, followed: list[int]) -> None:
    """The step after a stop token has begun with its sequence: nothing of that is told, or kept."""
    prompt, other = random_prompt(2 * BLOCK - 3), random_prompt(20, seed=3)
    whole = reference(prompt, 30)
    place = next(index for index in range(8, 30) if whole[index] not in whole[:index])
    start(pair, prompt, "stops", max_tokens=30, stop=[whole[place]])
    start(pair, other, "goes on", max_tokens=40)
    got = Collected(pair)
    got.run(lambda: len(got.ended) == 2)
    assert got.tokens["stops"] == whole[: place + 1]
    assert got.tokens["goes on"] == reference(other, 40)
    assert 2 in followed
    pair.assert_quiet()
    # What is cached of it is right: the next turn builds on it.
    longer = prompt + whole[: place + 1] + random_prompt(5, seed=4)
    start(pair, longer, "again", max_tokens=8)
    got.run(lambda: "again" in got.ended)
    assert got.tokens["again"] == reference(longer, 8)
    pair.assert_quiet()


def test_one_that_comes_is_served_after_the_step_that_was_begun(pair: Pair, followed: list[int]) -> None:
    start(pair, random_prompt(20), "first", max_tokens=60)
    got = Collected(pair)
    got.run(lambda: len(got.tokens["first"]) >= 10)
    before = len(got.tokens["first"])
    late = random_prompt(20, seed=9)
    start(pair, late, "late", max_tokens=12)
    got.run(lambda: bool(got.tokens["late"]))
    assert len(got.tokens["first"]) - before <= 3
    got.run(lambda: len(got.ended) == 2)
    assert got.tokens["late"] == reference(late, 12)
    assert got.tokens["first"] == reference(random_prompt(20), 60)
    assert {1, 2} <= set(followed)
    pair.assert_quiet()


def test_no_more_steps_than_that_are_begun_ahead_of_the_clock(pair: Pair, followed: list[int]) -> None:
    """What a turn does beside its step has its turn, however long nobody asks for anything."""
    role = pair.decode.assembly.loop.role
    on_clock, at = role.on_clock, list[int]()

    def counted(now: float) -> None:
        at.append(len(followed))
        on_clock(now)

    with patch.object(role, "on_clock", counted):
        start(pair, random_prompt(20), "r", max_tokens=100)
        got = Collected(pair)
        got.run(lambda: bool(got.ended))
    assert max(later - earlier for earlier, later in pairwise(at)) == FOLLOWED_MAX


def test_one_that_is_cancelled_gives_its_blocks_back(pair: Pair, followed: list[int]) -> None:
    start(pair, random_prompt(20), "gone", max_tokens=200)
    start(pair, random_prompt(25, seed=2), "stays", max_tokens=40)
    got = Collected(pair)
    got.run(lambda: len(followed) > 5)
    pair.decode.do(cancel_command("gone"))
    got.run(lambda: bool(got.ended))
    assert got.tokens["stays"] == reference(random_prompt(25, seed=2), 40)
    assert len(got.tokens["gone"]) < 30
    pair.assert_quiet()


def test_an_answer_that_is_drawn_at_random_is_not_begun_ahead(pair: Pair, followed: list[int]) -> None:
    prompt = random_prompt(20)
    start(pair, prompt, "r", max_tokens=20, temperature=1.0, seed=11)
    got = Collected(pair)
    got.run(lambda: bool(got.ended))
    assert got.tokens["r"] == reference(prompt, 20, temperature=1.0)
    assert not followed
    pair.assert_quiet()


@pytest.mark.parametrize("where", ["follow", "finish"])
def test_a_step_that_fails_takes_what_was_begun_with_it(pair: Pair, where: str) -> None:
    """Both are aborted, their attempts fail, and the worker goes on."""
    follow, settle = ModelRunner.follow, ModelRunner.settle
    calls, settled = [0], [0]

    def broken(self: ModelRunner, *given: object) -> BegunStep:
        calls[0] += 1
        if calls[0] != 4:
            return follow(self, *given)  # type: ignore[arg-type]
        if where == "follow":
            raise RuntimeError("the device is gone")
        begun = follow(self, *given)  # type: ignore[arg-type]

        def finish() -> StepResult:
            raise RuntimeError("the device is gone")

        return BegunStep(finish, begun.best, begun.longest)

    def counted(self: ModelRunner) -> None:
        settled[0] += 1
        settle(self)

    for number in range(3):
        start(pair, random_prompt(10 + number, seed=number), f"r{number}", max_tokens=50)
    got = Collected(pair)
    with patch.object(ModelRunner, "follow", broken), patch.object(ModelRunner, "settle", counted):
        got.run(lambda: len(got.failed) == 3)
    assert set(got.failed.values()) == {pb.FAILURE_REASON_INTERNAL}
    assert settled == [1]
    pair.assert_quiet()
    prompt = random_prompt(30, seed=8)
    start(pair, prompt, "after", max_tokens=10)
    got.run(lambda: "after" in got.ended)
    assert got.tokens["after"] == reference(prompt, 10)
    pair.assert_quiet()


def test_a_turn_that_fails_drops_what_was_begun(pair: Pair, followed: list[int]) -> None:
    start(pair, random_prompt(20), "r", max_tokens=100)
    got = Collected(pair)
    got.run(lambda: len(followed) > 3)
    loop = pair.decode.assembly.loop
    loop._recover("a test")
    got.take()
    assert got.failed == {"r": pb.FAILURE_REASON_INTERNAL}
    pair.assert_quiet()


def test_off_and_auto_begin_nothing_ahead_on_a_cpu(followed: list[int]) -> None:
    prompt = random_prompt(20)
    for setting in ("off", "auto"):
        pair = Pair(ahead=setting)
        start(pair, prompt, "r", max_tokens=10)
        got = Collected(pair)
        got.run(lambda got=got: bool(got.ended))  # type: ignore[misc]
        assert got.tokens["r"] == reference(prompt, 10)
    assert not followed
