# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of the prompt, from the workers to the client: each position once, whatever happens on the way."""

import asyncio
from collections.abc import Callable
from math import nan
from pathlib import Path

import grpc
import numpy as np
import pytest
from test_router_answers import slow_reader
from test_router_prefix import FETCH, LOCAL, cached_cluster, learn
from test_router_resume import expected, kill_under

from tests.support.fake_cluster import Answer, FakeCluster, fake_cluster, generate, prompt
from tests.support.fake_pair import fake_pair
from tests.support.fake_worker import Script
from tests.support.waiting import until
from twinpool.client import Completion
from twinpool.cluster_client import ClusterClient
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import worker_pb2 as worker

PROMPT = prompt(40)
SLOW = Script(step_seconds=0.01)


def scored(answer: Answer) -> list[pb.PositionLogprobs]:
    """All positions; fails for one that was skipped, came twice, or came behind a token."""
    found: list[pb.PositionLogprobs] = []
    kinds = [event.WhichOneof("event") for event in answer.events]
    for event in answer.events:
        if event.HasField("prompt_logprobs"):
            part = event.prompt_logprobs
            assert part.offset == len(found) + 1
            assert part.HasField("first_token_id") == (part.offset == 1)
            found += part.positions
    if "tokens" in kinds and "prompt_logprobs" in kinds:
        assert kinds.index("tokens") > max(at for at, kind in enumerate(kinds) if kind == "prompt_logprobs")
    return found


def check(answer: Answer, tokens: list[int] = PROMPT, alternatives: int = 2) -> None:
    """All positions of the prompt as the fake workers score them."""
    found = scored(answer)
    assert [one.chosen.token_id for one in found] == tokens[1:]
    assert [one.chosen.logprob for one in found] == [-float(at) for at in range(1, len(tokens))]
    assert {len(one.top) for one in found} <= {alternatives}
    first = next(event.prompt_logprobs for event in answer.events if event.HasField("prompt_logprobs"))
    assert first.first_token_id == tokens[0]


def asked(tokens: list[int] | None = None, **fields: object) -> pb.GenerateRequest:
    return generate(PROMPT if tokens is None else tokens, prompt_logprobs=2, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_all_of_them_come_before_the_first_token(model_path: Path, local: bool, n: int) -> None:
    tokens = prompt(20)
    async with fake_cluster(model_path, settings=LOCAL if local else None) as cluster:
        answer = await cluster.ask(asked(tokens, n=n, max_tokens=5))
        check(answer, tokens)
        assert answer.finished.prefill_worker == ("d0" if local else "p0")
        assert answer.tokens() == expected(5)
        assert not any(event.tokens.logprobs for event in answer.events)
        plain = await cluster.ask(generate(PROMPT))
        assert scored(plain) == []
        await cluster.assert_quiescent()


async def test_a_prompt_of_one_token_has_no_position(model_path: Path) -> None:
    async with fake_cluster(model_path) as cluster:
        answer = await cluster.ask(asked([7]))
        check(answer, [7])
        assert len([event for event in answer.events if event.HasField("prompt_logprobs")]) == 1


async def failing_once(cluster: FakeCluster, request: pb.GenerateRequest, messages: int) -> Answer:
    """The first worker that computes the prompt fails, after so many messages about it."""
    gate = asyncio.Event()
    for name, size in (("p0", 8), ("p1", 5)):
        cluster.workers[name].script = Script(
            prefill_gate=gate, scored_before_failure=messages, scored_a_message=size
        )
    task = asyncio.create_task(cluster.ask(request))
    await until(lambda: any(cluster.workers[name].prefills for name in ("p0", "p1")))
    (first,) = (made for made in cluster.workers.values() if made.prefills)
    first.script.fail_prefill = worker.FAILURE_REASON_INTERNAL
    gate.set()
    return await task


@pytest.mark.parametrize("messages", [0, 1, 3, 5])
async def test_an_attempt_that_fails_tells_nothing_twice(model_path: Path, messages: int) -> None:
    async with fake_cluster(model_path, prefill=2) as cluster:
        answer = await failing_once(cluster, asked(), messages)
        assert answer.finished.attempts == 2
        check(answer)
        await cluster.assert_quiescent()


async def test_a_retry_of_a_prompt_of_one_token(model_path: Path) -> None:
    async with fake_cluster(model_path, prefill=2) as cluster:
        answer = await failing_once(cluster, asked([7]), 0)
        assert answer.finished.attempts == 2
        assert len([event for event in answer.events if event.HasField("prompt_logprobs")]) == 1


@pytest.mark.parametrize("n", [1, 2])
async def test_an_answer_that_goes_on_does_not_score_its_prompt_again(model_path: Path, n: int) -> None:
    async with fake_cluster(model_path, decode=2, decode_script=SLOW) as cluster:
        answer = await kill_under(cluster, asked(n=n, max_tokens=60))
        assert answer.finished.attempts == 2
        check(answer)
        commands = [one for made in cluster.workers.values() for one in (*made.prefills, *made.decodes)]
        for command in commands:
            assert command.draw.HasField("prompt_logprobs") == (command.id.attempt == 1)


def _edit(
    change: Callable[[pb.PositionLogprobs], object], at: int = 3
) -> Callable[[pb.PromptLogprobs], None]:
    """Changes one position of each message."""

    def garble(part: pb.PromptLogprobs) -> None:
        change(part.positions[at])

    return garble


@pytest.mark.parametrize(
    ("garble", "said"),
    [
        (lambda part: setattr(part, "offset", part.offset + 1), "came from 2 on where 1 was due of 40"),
        (lambda part: setattr(part, "offset", 1), "came from 1 on where 9 was due"),
        (lambda part: part.positions.extend(list(part.positions)), "another token"),
        (lambda part: part.ClearField("positions"), "0 positions of the prompt"),
        (_edit(lambda one: setattr(one.chosen, "token_id", 9)), "position 4 of the prompt came with another token"),
        (_edit(lambda one: one.top.pop()), "or 1 alternatives"),
        (_edit(lambda one: one.top.add()), "or 3 alternatives"),
        (_edit(lambda one: setattr(one.chosen, "logprob", nan)), "no log-probability"),
        (_edit(lambda one: setattr(one.top[0], "logprob", float("-inf"))), "no log-probability"),
        (_edit(lambda one: setattr(one.top[1], "token_id", 258)), "no log-probability of a token"),
    ],
)  # fmt: skip
async def test_no_word_is_taken_that_can_be_checked(
    model_path: Path, garble: Callable[[pb.PromptLogprobs], object], said: str
) -> None:
    script = Script(garble=garble)
    async with fake_cluster(model_path, prefill_script=script, settings={"max_attempts": 1}) as cluster:
        answer = await cluster.ask(asked())
        assert answer.error is not None
        assert answer.reason == "INTERNAL"
        assert said in answer.error.message
        assert answer.tokens() == []
        await cluster.assert_quiescent()


async def test_prefill_may_leave_none_out(model_path: Path) -> None:
    script = Script(silent={"prompt_scored"})
    async with fake_cluster(model_path, prefill_script=script, settings={"max_attempts": 1}) as cluster:
        answer = await cluster.ask(asked())
        assert answer.error is not None
        assert "39 positions of the prompt were not scored" in answer.error.message


@pytest.mark.parametrize(("speaker", "wanted"), [("d0", True), ("p0", False)])
async def test_nobody_else_may_say_them_and_nobody_unasked(
    model_path: Path, speaker: str, wanted: bool
) -> None:
    gate = asyncio.Event()
    async with fake_cluster(
        model_path, prefill_script=Script(prefill_gate=gate), settings={"max_attempts": 1}
    ) as cluster:
        task = asyncio.create_task(cluster.ask(asked() if wanted else generate(PROMPT)))
        await until(lambda: cluster.workers["p0"].prefills)
        command = cluster.workers["p0"].prefills[0]
        said = worker.PromptScored(id=command.id)
        said.logprobs.offset = 1
        said.logprobs.positions.add().chosen.token_id = PROMPT[1]
        for _ in range(2 if wanted else 1):
            said.logprobs.positions[0].top.add()
        cluster.workers[speaker].sessions[0].send(prompt_scored=said)
        answer = await task
        assert answer.reason == "INTERNAL"
        assert scored(answer) == []
        gate.set()
        await cluster.assert_quiescent()


async def test_what_a_slow_client_may_leave_unread_is_bounded(model_path: Path) -> None:
    settings: dict[str, object] = {"max_buffered_tokens": 500}
    record: dict[str, object] = {"max_context_tokens": 200_000, "num_blocks": 20_000}
    async with fake_cluster(model_path, settings=settings, **record) as cluster:
        release = asyncio.Event()
        tokens = prompt(30_000)
        request = generate(tokens, prompt_logprobs=5)
        reader = asyncio.create_task(slow_reader(cluster, request, release))
        await until(lambda: cluster.workers["p0"].cancels)
        await until(lambda: not cluster.held())
        release.set()
        answer = await reader
        assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert answer.error is not None
        assert "positions of the prompt wait to be read; the limit is 500" in answer.error.message
        assert 0 < len(scored(answer)) < len(tokens)
        await cluster.assert_quiescent()


async def test_no_cache_is_worth_anything_to_it(model_path: Path) -> None:
    """What another worker has cached of it is not pulled; what it publishes is of use to others."""
    cached = prompt(20 * 16 + 3)
    async with cached_cluster(model_path, FETCH) as cluster:
        await learn(cluster, "d0", cached)
        answer = await cluster.ask(asked(cached))
        check(answer, cached)
        assert answer.finished.usage.cached_tokens == 0
        (command,) = cluster.workers["p0"].prefills
        assert not command.HasField("prefix")
        assert len(command.prompt.block_hashes) == 20 * 16, "its blocks are published"
        group = cluster.router.models.resolve("").group
        _, hashes = cluster.router.tokenize.hash(np.array(cached, np.int32), group, "", "")
        await until(lambda: "p0" in dict(cluster.router.core.longest_prefix(hashes)))
        plain = await cluster.ask(generate(cached))
        assert plain.finished.usage.cached_tokens > 0


# --- resume ---------------------------------------------------------------------------------


def resumable(**fields: object) -> pb.GenerateRequest:
    request = asked(max_tokens=60, **fields)
    request.resume_grace.seconds = 60
    return request


async def test_a_stream_that_is_resumed_gets_them_only_without_a_token(model_path: Path) -> None:
    async with fake_pair(model_path, script=SLOW) as pair:
        first = pair.generate(pair.one, resumable())
        await first.has(3)
        check(first.answer)
        await first.leave()
        later = pair.resume(pair.one, first.token, first.next_index())
        await later.has(1)
        await later.leave()
        assert scored(later.answer) == []
        again = await pair.resume(pair.one, first.token).ended()
        check(again)
        assert again.tokens() == expected(60)
        await pair.assert_quiescent()


@pytest.mark.parametrize("lost", [False, True])
async def test_another_router_computes_them_again_for_who_has_no_token(model_path: Path, lost: bool) -> None:
    script = Script(hold_after_tokens=8)
    async with fake_pair(model_path, script=script) as pair:
        first = pair.generate(pair.other, resumable())
        await first.has(8)
        await first.leave()
        if lost:
            await pair.lose()
        script.hold_after_tokens = None
        answer = await pair.resume(pair.one, first.token).ended()
        check(answer)
        assert answer.tokens() == expected(60)
        await pair.assert_quiescent()


@pytest.mark.parametrize("lost", [False, True])
async def test_another_router_leaves_them_to_who_has_tokens(model_path: Path, lost: bool) -> None:
    script = Script(hold_after_tokens=8)
    async with fake_pair(model_path, script=script) as pair:
        first = pair.generate(pair.other, resumable())
        await first.has(8)
        await first.leave()
        if lost:
            await pair.lose()
        before = sum(len(made.prefills) for made in pair.one.workers.values())
        script.hold_after_tokens = None
        later = pair.resume(pair.one, first.token, first.next_index())
        answer = await later.ended()
        assert answer.error is None
        assert scored(answer) == []
        prefills = [one for made in pair.one.workers.values() for one in made.prefills][before:]
        assert prefills
        assert not any(one.draw.HasField("prompt_logprobs") for one in prefills)
        # Nobody has them any more, and from the first token on they belong to the answer.
        anew = await pair.resume(pair.one, later.token or first.token).ended()
        assert anew.reason == "RESUME_LOST"
        await pair.assert_quiescent()


@pytest.mark.parametrize("tokens", [False, True])
async def test_a_client_of_several_routers_tells_each_position_once(model_path: Path, tokens: bool) -> None:
    """Its router is lost with the prompt scored, before the first token or behind it."""
    script = Script(hold_after_tokens=4)
    async with fake_pair(model_path, script=script) as pair:
        computing = pair.one.workers["p0"].script = Script(report_seconds=0.0 if tokens else 600.0)
        names = [pair.other.router.endpoint, pair.one.router.endpoint]
        async with ClusterClient(names) as client:
            whole, offsets = Completion(), []
            async for event in client.stream(asked(max_tokens=20), timeout=120):
                whole.take(event)
                if event.HasField("prompt_logprobs"):
                    offsets.append(event.prompt_logprobs.offset)
                if event.HasField("tokens" if tokens else "prompt_logprobs") and not pair.lost:
                    script.hold_after_tokens, computing.report_seconds = None, 0.0
                    await pair.lose()
        assert pair.lost
        assert offsets == sorted(set(offsets))
        assert [one.chosen.token_id for one in whole.prompt_logprobs] == PROMPT[1:]
        assert whole.token_ids == [expected(20)]
