# SPDX-License-Identifier: Apache-2.0
"""An answer goes on on another router: the first one lives and hands it over, or is lost and the workers have it."""

import asyncio
from pathlib import Path

import grpc
import pytest

from tests.support.fake_cluster import generate, prompt
from tests.support.fake_pair import FakePair, Stream, fake_pair, whole
from tests.support.fake_worker import FIRST_TOKEN, Script
from tests.support.waiting import until
from twinpool.router.resume_token import TokenSeal
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import router_pb2, router_pb2_grpc


def expected(tokens: int, choice: int = 0) -> list[int]:
    return [FIRST_TOKEN + (at + choice) % 26 for at in range(tokens)]


def resumable(tokens: int = 60, **fields: object) -> pb.GenerateRequest:
    request = generate(prompt(40), max_tokens=tokens, **fields)
    request.resume_grace.FromSeconds(60)
    return request


def commands(pair: FakePair) -> int:
    return sum(len(made.decodes) for made in pair.one.workers.values())


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
async def test_it_goes_on_at_the_next_token(
    model_path: Path, n: int, lost: bool, logprobs: int | None
) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        stream = pair.generate(pair.other, resumable(n=n, logprobs=logprobs))
        await stream.has(8)
        await stream.leave()
        if lost:
            await pair.lose()
        again = pair.resume(pair.one, stream.token, stream.next_index(n))
        answer = await again.ended()
        assert answer.error is None
        assert answer.started.seed == stream.answer.started.seed
        assert answer.started.request_id == stream.answer.started.request_id
        for choice in range(n):
            ids, text = whole(stream, again, choice)
            assert ids == expected(60, choice)
            assert text == "".join(map(chr, expected(60, choice)))
            if logprobs:
                entries = [
                    position.chosen.token_id
                    for event in (*stream.answer.events, *answer.events)
                    if event.HasField("tokens") and event.tokens.index == choice
                    for position in event.tokens.logprobs
                ]
                assert entries == ids
        usage = answer.events[-1].finished.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (40, 60 * n)
        await pair.assert_quiescent()


async def test_what_was_drawn_is_not_drawn_again(model_path: Path) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        stream = pair.generate(pair.other, resumable())
        await stream.has(20)
        await stream.leave()
        await pair.lose()
        again = pair.resume(pair.one, stream.token, stream.next_index())
        await again.ended()
        last = max(
            (command for made in pair.one.workers.values() for command in made.decodes),
            key=lambda command: command.draw.drawn,
        )
        assert last.draw.drawn >= 20
        assert last.portable.moves == 1
        assert last.draw.stop.max_tokens == 60, "limits stay those of the whole answer"


async def test_before_the_first_token(model_path: Path) -> None:
    """The router dies while the prompt is computed: the decode worker has the prompt."""
    async with fake_pair(model_path) as pair:
        gate = asyncio.Event()
        pair.one.workers["p0"].script = Script(prefill_gate=gate)
        stream = pair.generate(pair.other, resumable(20))
        await stream.started()
        await until(lambda: pair.one.workers["p0"].prefills)
        await stream.leave()
        await pair.lose()
        gate.set()
        again = pair.resume(pair.one, stream.token)
        assert (await again.ended()).error is None
        assert whole(stream, again)[0] == expected(20)
        await pair.assert_quiescent()


@pytest.mark.parametrize("lost", [False, True])
async def test_an_answer_that_is_drawn_to_its_end_runs_no_more(model_path: Path, lost: bool) -> None:
    async with fake_pair(model_path) as pair:
        stream = pair.generate(pair.other, resumable(12, n=2))
        await stream.ended()
        if lost:
            await pair.lose()
        ran = commands(pair)
        again = await pair.resume(pair.one, stream.token, [5, 12]).ended()
        assert again.error is None
        tokens = [token for event in again.events for token in event.tokens.token_ids]
        assert tokens == expected(12)[5:]
        choices = again.events[-1].finished.choices
        assert [choice.reason for choice in choices] == [pb.FINISH_REASON_LENGTH] * 2
        assert commands(pair) == ran


@pytest.mark.parametrize("stop", ["CDEFG", "Z"])
async def test_a_stop_string_is_found_across_the_break(model_path: Path, stop: str) -> None:
    """In what was drawn already, or held back at the break, or later."""
    async with fake_pair(model_path, script=Script(step_seconds=0.02)) as pair:
        request = resumable()
        request.stop.stop_strings.append(stop)
        stream = pair.generate(pair.other, request)
        await stream.has(4)
        await stream.leave()
        await pair.lose()
        again = pair.resume(pair.one, stream.token, stream.next_index())
        answer = await again.ended()
        assert answer.error is None
        letters = "".join(map(chr, expected(60)))
        assert whole(stream, again)[1] == letters[: letters.index(stop)]
        assert answer.events[-1].finished.choices[0].stop_string == stop
        await pair.assert_quiescent()


async def test_a_client_that_has_more_than_is_known(model_path: Path) -> None:
    """The worker that had drawn them is lost as well: they are drawn again, and not sent again."""
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        stream = pair.generate(pair.other, resumable())
        await stream.has(10)
        await stream.leave()
        await pair.lose()
        for made in pair.one.workers.values():
            for state in made.kept.states.values():
                for choice in state.choices:
                    choice.token_ids = choice.token_ids[:12]
        again = pair.resume(pair.one, stream.token, stream.next_index())
        assert (await again.ended()).error is None
        assert whole(stream, again)[0] == expected(60)


async def test_many_deaths_and_the_first_token_of_all(model_path: Path) -> None:
    """With an old token, too: the stream is the same wherever it goes."""
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        stream = pair.generate(pair.other, resumable())
        await stream.has(5)
        await stream.leave()
        second = pair.resume(pair.one, stream.token, stream.next_index())
        await second.has(5)
        await second.leave()
        third = pair.resume(pair.other, stream.token, second.next_index())
        await third.has(5)
        await third.leave()
        fourth = pair.resume(pair.one, stream.token, third.next_index())
        assert (await fourth.ended()).error is None
        tokens = [
            token
            for each in (stream, second, third, fourth)
            for event in each.answer.events
            for token in event.tokens.token_ids
        ]
        assert tokens == expected(60)
        await pair.assert_quiescent()


async def test_the_old_stream_ends_when_another_router_takes_over(model_path: Path) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        stream = pair.generate(pair.other, resumable())
        await stream.has(5)
        again = pair.resume(pair.one, stream.token, [0])
        assert (await stream.ended()).reason == "STREAM_SUPERSEDED"
        assert (await again.ended()).tokens() == expected(60)
        await pair.assert_quiescent()


async def test_two_that_resume_at_once_share_one_take_over(model_path: Path) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        stream = pair.generate(pair.other, resumable())
        await stream.has(5)
        await stream.leave()
        await pair.lose()
        streams = [pair.resume(pair.one, stream.token, stream.next_index()) for _ in range(3)]
        answers = [await each.ended() for each in streams]
        good = [each for each, answer in zip(streams, answers, strict=True) if answer.error is None]
        assert len(good) == 1
        assert whole(stream, good[0])[0] == expected(60)
        assert {answer.reason for answer in answers if answer.error} == {"STREAM_SUPERSEDED"}
        await pair.assert_quiescent()


async def test_a_router_that_cannot_be_asked_loses_its_attempt_to_the_one_that_can(model_path: Path) -> None:
    """It lives, and its workers still serve it: they end what another router asks for."""
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        stream = pair.generate(pair.other, resumable())
        await stream.has(5)
        pair.one.router.others._routers["router-other"].endpoint = "127.0.0.1:1"
        again = pair.resume(pair.one, stream.token, stream.next_index())
        assert (await again.ended()).error is None
        ended = await stream.ended()
        assert (ended.code, ended.reason) == (grpc.StatusCode.ABORTED, "STREAM_SUPERSEDED")
        await pair.assert_quiescent()


async def test_nobody_has_it(model_path: Path) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        stream = pair.generate(pair.other, resumable())
        await stream.has(5)
        await stream.leave()
        await pair.lose()
        for made in pair.one.workers.values():
            made.kept.states.clear()
        lost = await pair.resume(pair.one, stream.token, [5]).ended()
        assert (lost.code, lost.reason) == (grpc.StatusCode.NOT_FOUND, "RESUME_LOST")


async def test_nobody_can_be_asked(model_path: Path) -> None:
    async with fake_pair(model_path) as pair:
        stream = pair.generate(pair.other, resumable(4))
        await stream.ended()
        await pair.lose()
        for made in pair.one.workers.values():
            await made.kill()
        asked = await pair.resume(pair.one, stream.token, [1]).ended()
        assert (asked.code, asked.reason) == (grpc.StatusCode.UNAVAILABLE, "RESUME_UNREACHABLE")


async def test_a_refused_take_over_can_be_tried_again(model_path: Path) -> None:
    """Whatever it was refused for may pass; nobody else has the answer any more."""
    settings: dict[str, object] = {"max_tenant_requests": 1}
    async with fake_pair(model_path, script=Script(step_seconds=0.01), settings=settings) as pair:
        stream = pair.generate(pair.other, resumable())
        await stream.has(5)
        await stream.leave()
        await pair.lose()
        busy = Stream(pair.one.stub.Generate(generate(max_tokens=3000)))
        await busy.has(1)
        refused = await pair.resume(pair.one, stream.token, stream.next_index()).ended()
        assert refused.reason == "TENANT_CONCURRENCY"
        for made in pair.one.workers.values():
            made.kept.states.clear()
        await busy.leave()
        await pair.one.assert_quiescent()
        again = pair.resume(pair.one, stream.token, stream.next_index())
        assert (await again.ended()).error is None
        assert whole(stream, again)[0] == expected(60)


@pytest.mark.parametrize("lost", [False, True])
async def test_cancel_reaches_it_wherever_it_is(model_path: Path, lost: bool) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        stream = pair.generate(pair.other, resumable(3000))
        await stream.has(3)
        if lost:
            await pair.lose()
            await stream.ended()
        assert (await pair.one.stub.Cancel(pb.CancelRequest(token=stream.token))).found
        await pair.assert_quiescent()
        assert not any(made.kept.states for made in pair.one.workers.values())
        assert (await pair.resume(pair.one, stream.token).ended()).error is not None
        assert not (await pair.one.stub.Cancel(pb.CancelRequest(token=stream.token))).found


async def test_a_router_that_stops_sends_its_streams_to_the_others(model_path: Path) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        stream = pair.generate(pair.other, resumable())
        await stream.has(5)
        pair.lost = True
        stopping = asyncio.create_task(pair.other.router.stop(60.0))
        assert (await stream.ended()).reason == "DRAINING"
        again = pair.resume(pair.one, stream.token, stream.next_index())
        assert (await again.ended()).error is None
        assert whole(stream, again)[0] == expected(60)
        await stopping
        await pair.assert_quiescent()


async def test_only_routers_of_the_cluster_are_told_a_prompt(model_path: Path) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        stream = pair.generate(pair.one, resumable())
        await stream.has(3)
        (stream_id,) = pair.one.router.kept._kept
        stub = router_pb2_grpc.RouterServiceStub(pair.one.channel)
        request = router_pb2.HandOverRequest(stream_id=stream_id)
        stranger = TokenSeal()
        for sign in (lambda _: None, stranger.sign):
            sign(request)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.HandOver(request)
            assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
        pair.other.router.seal.sign(request)
        changed = router_pb2.HandOverRequest()
        changed.CopyFrom(request)
        changed.stream_id = "another"
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.HandOver(changed)
        assert (await stub.HandOver(request)).HasField("state")
        assert (await stream.ended()).reason == "STREAM_SUPERSEDED"


async def test_an_answer_that_a_stop_string_has_ended_runs_no_more(model_path: Path) -> None:
    """The worker would have drawn on, and was told that the answer is complete."""
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        request = resumable(3000)
        request.stop.stop_strings.append("GHI")
        first = await pair.generate(pair.other, request).ended()
        assert (first.error, first.text()) == (None, "ABCDEF")
        await pair.other.assert_quiescent()
        await pair.lose()
        ran = commands(pair)
        again = await pair.resume(pair.one, first.started.resume_token, [4]).ended()
        assert again.error is None
        assert "".join(event.tokens.text for event in again.events) == "EF"
        assert again.events[-1].finished.choices == first.finished.choices
        assert again.events[-1].finished.usage.completion_tokens == 9
        assert commands(pair) == ran
