# SPDX-License-Identifier: Apache-2.0
"""A request that is repeated under its idempotency key attaches to the first one, wherever that is."""

import asyncio
from pathlib import Path

import grpc
import pytest

from tests.support.fake_cluster import generate, prompt
from tests.support.fake_pair import FakePair, fake_pair
from tests.support.fake_worker import FIRST_TOKEN, Script
from twinpool.v1 import inference_pb2 as pb


def expected(tokens: int) -> list[int]:
    return [FIRST_TOKEN + at % 26 for at in range(tokens)]


def keyed(key: str = "k", tokens: int = 40, **fields: object) -> pb.GenerateRequest:
    return generate(prompt(40), max_tokens=tokens, idempotency_key=key, **fields)


def ran(pair: FakePair) -> int:
    """Requests that reached a decode worker."""
    return len({command.portable.stream_id for made in pair.one.workers.values() for command in made.decodes})


async def test_it_attaches_to_the_one_that_runs(model_path: Path) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        first = pair.generate(pair.one, keyed(request_id="mine"))
        await first.has(5)
        second = pair.generate(pair.one, keyed(request_id="mine"))
        assert (await first.ended()).reason == "STREAM_SUPERSEDED"
        answer = await second.ended()
        assert (answer.error, answer.tokens()) == (None, expected(40))
        assert answer.started == first.answer.started
        third = await pair.generate(pair.one, keyed(request_id="mine")).ended()
        assert (third.error, third.tokens(), third.finished) == (None, expected(40), answer.finished)
        assert ran(pair) == 1
        await pair.assert_quiescent()


async def test_it_goes_on_without_a_client_for_the_default_grace(model_path: Path) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        first = pair.generate(pair.one, keyed())
        await first.has(5)
        await first.leave()
        answer = await pair.generate(pair.one, keyed()).ended()
        assert (answer.error, answer.tokens()) == (None, expected(40))
        assert ran(pair) == 1


@pytest.mark.parametrize("change", ["prompt", "max_tokens", "seed", "tenant"])
async def test_another_request_under_the_key(model_path: Path, change: str) -> None:
    async with fake_pair(model_path) as pair:
        first = await pair.generate(pair.one, keyed()).ended()
        assert first.error is None
        other = keyed()
        if change == "prompt":
            other.token_ids.ids[0] += 1
        elif change == "max_tokens":
            other.stop.max_tokens += 1
        elif change == "seed":
            other.sampling.seed = 1
        else:
            other.tenant = "another"
        for cluster in (pair.one, pair.other):
            answer = await pair.generate(cluster, other).ended()
            if change == "tenant":
                assert answer.error is None, "keys are a tenant's own"
            else:
                assert (answer.code, answer.reason) == (
                    grpc.StatusCode.ALREADY_EXISTS,
                    "IDEMPOTENCY_MISMATCH",
                )
        again = await pair.generate(pair.one, keyed()).ended()
        assert (again.error, again.tokens()) == (None, expected(40)), "the first one is as it was"


async def test_the_grace_is_no_part_of_the_request(model_path: Path) -> None:
    async with fake_pair(model_path) as pair:
        await pair.generate(pair.one, keyed()).ended()
        again = keyed(repeated=True)
        again.resume_grace.FromSeconds(7)
        assert (await pair.generate(pair.one, again).ended()).error is None
        assert ran(pair) == 1


async def test_another_router_has_it(model_path: Path) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        first = pair.generate(pair.other, keyed(logprobs=0))
        await first.has(5)
        answer = await pair.generate(pair.one, keyed(logprobs=0)).ended()
        assert (answer.error, answer.tokens()) == (None, expected(40))
        entries = [one.chosen.token_id for event in answer.events for one in event.tokens.logprobs]
        assert entries == expected(40)
        assert (await first.ended()).reason == "STREAM_SUPERSEDED"
        assert ran(pair) == 1
        await pair.assert_quiescent()


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_its_router_is_lost(model_path: Path, logprobs: int | None) -> None:
    """The workers have it, if the client says that it repeats."""
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        first = pair.generate(pair.other, keyed(logprobs=logprobs))
        await first.has(10)
        await first.leave()
        await pair.lose()
        answer = await pair.generate(pair.one, keyed(logprobs=logprobs, repeated=True)).ended()
        assert (answer.error, answer.tokens()) == (None, expected(40))
        assert ran(pair) == 1
        other = await pair.generate(pair.one, keyed(tokens=41, repeated=True)).ended()
        assert other.reason == "IDEMPOTENCY_MISMATCH"


async def test_workers_do_not_give_it_to_another_request(model_path: Path) -> None:
    """Not even where they draw it: it goes on."""
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        first = pair.generate(pair.other, keyed())
        await first.has(3)
        pair.one.router.others._routers.clear()
        other = await pair.generate(pair.one, keyed(tokens=41, repeated=True)).ended()
        assert other.reason == "IDEMPOTENCY_MISMATCH"
        assert (await first.ended()).tokens() == expected(40)


async def test_one_that_failed_is_run_again(model_path: Path) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        first = pair.generate(pair.one, keyed())
        await first.has(3)
        assert (await pair.one.stub.Cancel(pb.CancelRequest(idempotency_key="k"))).found
        assert (await first.ended()).reason == "CANCELLED"
        answer = await pair.generate(pair.one, keyed()).ended()
        assert (answer.error, answer.tokens()) == (None, expected(40))
        assert ran(pair) == 2
        await pair.assert_quiescent()


@pytest.mark.parametrize("lost", [False, True])
async def test_cancel_by_key_reaches_it_anywhere(model_path: Path, lost: bool) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        first = pair.generate(pair.other, keyed(tokens=3000))
        await first.has(3)
        if lost:
            await pair.lose()
        assert not (await pair.one.stub.Cancel(pb.CancelRequest(idempotency_key="k", tenant="x"))).found
        assert (await pair.one.stub.Cancel(pb.CancelRequest(idempotency_key="k"))).found
        await first.ended()
        await pair.assert_quiescent()
        assert not any(made.kept.states for made in pair.one.workers.values())


async def test_a_cancel_that_names_nothing(model_path: Path) -> None:
    async with fake_pair(model_path) as pair:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pair.one.stub.Cancel(pb.CancelRequest())
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_many_at_once_on_both_routers_run_once(model_path: Path) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.005)) as pair:
        for round_ in range(5):
            key = f"round-{round_}"
            streams = [
                pair.generate((pair.one, pair.other)[at % 2], keyed(key, request_id=key)) for at in range(6)
            ]
            answers = [await stream.ended() for stream in streams]
            good = [answer for answer in answers if answer.error is None]
            assert len(good) >= 1
            assert all(answer.tokens() == expected(40) for answer in good)
            assert {answer.reason for answer in answers if answer.error} <= {"STREAM_SUPERSEDED"}
            assert ran(pair) == round_ + 1
        await pair.assert_quiescent()
        for cluster in (pair.one, pair.other):
            assert not cluster.router.service._running, (
                "an answer that is handed over at once frees its id, too"
            )


async def test_a_router_that_does_not_answer_delays_few(model_path: Path) -> None:
    """One request waits for it, those that come at once after it do not."""
    settings: dict[str, object] = {"takeover_timeout_seconds": 0.3}
    async with fake_pair(model_path, settings=settings) as pair:
        # Nobody accepts on a socket that only listens.
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pair.one.router.others._routers["router-other"].endpoint = f"127.0.0.1:{port}"
        assert (await pair.generate(pair.one, keyed("a")).ended()).error is None
        assert pair.one.router.others._muted
        asked = await pair.one.router.others.ask_routers(key=b"b")
        assert (asked.answered, asked.unreachable) == (0, 1)
        server.close()
