# SPDX-License-Identifier: Apache-2.0
"""Answers that outlive their client's stream, on the router that makes them."""

from pathlib import Path

import grpc
import pytest

from tests.support.fake_cluster import FakeCluster, fake_cluster, generate, prompt
from tests.support.fake_pair import Stream, fake_pair, whole
from tests.support.fake_worker import FIRST_TOKEN, Script
from tests.support.waiting import until
from twinpool import metrics
from twinpool.v1 import inference_pb2 as pb


def expected(tokens: int, choice: int = 0) -> list[int]:
    return [FIRST_TOKEN + (at + choice) % 26 for at in range(tokens)]


def resumable(tokens: int = 40, grace: float = 60.0, **fields: object) -> pb.GenerateRequest:
    request = generate(prompt(40), max_tokens=tokens, **fields)
    request.resume_grace.FromNanoseconds(int(grace * 1e9))
    return request


async def test_without_a_grace_a_client_that_leaves_cancels(model_path: Path) -> None:
    async with fake_cluster(model_path, decode_script=Script(step_seconds=0.01)) as cluster:
        stream = Stream(cluster.stub.Generate(generate(max_tokens=2000)))
        await stream.has(3)
        assert stream.token == b""
        assert not len(cluster.router.kept)
        assert not any(command.HasField("portable") for command in cluster.workers["d0"].decodes)
        await stream.leave()
        await cluster.assert_quiescent()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_comes_back_and_misses_nothing(model_path: Path, n: int) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        stream = pair.generate(pair.one, resumable(n=n, logprobs=1))
        await stream.has(5)
        await stream.leave()
        again = pair.resume(pair.one, stream.token, stream.next_index(n))
        answer = await again.ended()
        assert answer.error is None
        assert answer.started.resume_token, "with the newest one it could be lost again"
        for choice in range(n):
            ids, text = whole(stream, again, choice)
            assert ids == expected(40, choice)
            assert text == "".join(map(chr, expected(40, choice)))
        assert answer.events[-1].finished.usage.completion_tokens == 40 * n
        assert sum(len(made.decodes) for made in pair.one.workers.values()) == 1, "nothing ran twice"
        await pair.assert_quiescent()


async def test_an_ended_answer_is_kept_for_its_grace(model_path: Path) -> None:
    async with fake_pair(model_path) as pair:
        stream = pair.generate(pair.one, resumable(8))
        assert (await stream.ended()).error is None
        for at in (0, 3, 8, 100):
            again = await pair.resume(pair.one, stream.token, [at]).ended()
            tokens = [token for event in again.events for token in event.tokens.token_ids]
            assert (again.error, tokens) == (None, expected(8)[at:])
            assert again.events[-1].finished == stream.answer.finished
        await pair.assert_quiescent()


async def test_when_the_grace_has_passed_it_is_over(model_path: Path) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        running = pair.generate(pair.one, resumable(3000, grace=0.05))
        await running.has(2)
        await running.leave()
        await pair.assert_quiescent()
        assert (await pair.resume(pair.one, running.token).ended()).reason == "RESUME_LOST"
        await until(lambda: not len(pair.one.router.kept))
        for made in pair.one.workers.values():
            assert not made.kept.states, "the router said that it is over"
        gone = await pair.resume(pair.one, running.token).ended()
        assert (gone.code, gone.reason) == (grpc.StatusCode.NOT_FOUND, "RESUME_LOST")
        assert pair.one.router.kept._bytes == 0


async def test_the_newest_stream_has_the_rest(model_path: Path) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        first = pair.generate(pair.one, resumable(60))
        await first.has(3)
        second = pair.resume(pair.one, first.token, [0])
        ended = await first.ended()
        assert (ended.code, ended.reason) == (grpc.StatusCode.ABORTED, "STREAM_SUPERSEDED")
        answer = await second.ended()
        assert (answer.error, answer.tokens()) == (None, expected(60))


async def test_a_client_may_end_it(model_path: Path) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        stream = pair.generate(pair.one, resumable(3000))
        await stream.has(2)
        said = await pair.one.stub.Cancel(pb.CancelRequest(token=stream.token))
        assert said.found
        assert (await stream.ended()).reason == "CANCELLED"
        assert (await pair.resume(pair.one, stream.token).ended()).reason == "CANCELLED"
        assert not (await pair.one.stub.Cancel(pb.CancelRequest(token=stream.token))).found
        await pair.assert_quiescent()
        assert not any(made.kept.states for made in pair.one.workers.values())


async def test_the_deadline_of_the_request_stays(model_path: Path) -> None:
    async with fake_cluster(model_path, decode_script=Script(step_seconds=0.01)) as cluster:
        call = cluster.stub.Generate(resumable(3000), timeout=0.5)
        stream = Stream(call)
        await stream.ended()
        assert stream.answer.code == grpc.StatusCode.DEADLINE_EXCEEDED
        await cluster.assert_quiescent()


async def test_a_reader_that_never_comes_back_bounds_what_is_drawn(model_path: Path) -> None:
    settings: dict[str, object] = {"max_buffered_tokens": 20}
    async with fake_pair(model_path, script=Script(step_seconds=0.002), settings=settings) as pair:
        stream = pair.generate(pair.one, resumable(3000))
        await stream.has(2)
        await stream.leave()
        await pair.assert_quiescent()
        assert (await pair.resume(pair.one, stream.token).ended()).reason == "CLIENT_TOO_SLOW"


async def test_memory_is_bounded_and_ended_answers_go_first(model_path: Path) -> None:
    settings: dict[str, object] = {"resume_bytes": 4096}
    async with fake_pair(model_path, settings=settings) as pair:
        streams: list[Stream] = []
        for seed in range(40):
            request = generate(prompt(60, seed), max_tokens=4)
            request.resume_grace.FromSeconds(60)
            streams.append(pair.generate(pair.one, request))
            assert (await streams[-1].ended()).error is None
        book = pair.one.router.kept
        assert book._bytes <= 4096 + 1024
        assert 0 < len(book) < 40
        assert (await pair.resume(pair.one, streams[-1].token).ended()).error is None
        for made in pair.one.workers.values():
            made.kept.states.clear()
        assert (await pair.resume(pair.one, streams[0].token).ended()).reason == "RESUME_LOST"


async def test_while_running_ones_take_all_memory_no_new_one_is_taken(model_path: Path) -> None:
    settings: dict[str, object] = {"resume_bytes": 100}
    async with fake_cluster(
        model_path, decode_script=Script(step_seconds=0.01), settings=settings
    ) as cluster:
        stream = Stream(cluster.stub.Generate(resumable(3000)))
        await stream.has(2)
        refused = await cluster.ask(resumable(4))
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RESUME_FULL")
        assert (await cluster.ask(generate(prompt(10, 3)))).error is None, "what does not opt in pays nothing"
        await cluster.stub.Cancel(pb.CancelRequest(token=stream.token))
        await stream.ended()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"grace": -1.0}, "INVALID_RESUME"),
        ({"grace": 1e6}, "INVALID_RESUME"),
        ({"idempotency_key": "k" * 129}, "INVALID_RESUME"),
        ({"idempotency_key": "line\nbreak"}, "INVALID_RESUME"),
    ],
)
async def test_limits(model_path: Path, fields: dict[str, object], reason: str) -> None:
    async with fake_cluster(model_path) as cluster:
        answer = await cluster.ask(resumable(**fields))  # type: ignore[arg-type]
        assert answer.reason == reason


async def test_tokens_of_others_are_refused(model_path: Path) -> None:
    async with fake_pair(model_path) as pair:
        stream = pair.generate(pair.one, resumable(4, tenant="a"))
        await stream.ended()
        other = await pair.resume(pair.one, stream.token, tenant="b").ended()
        assert (other.code, other.reason) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
        forged = await pair.resume(pair.one, changed(stream.token), tenant="a").ended()
        assert (forged.code, forged.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "RESUME_TOKEN_INVALID")
        many = await pair.resume(pair.one, stream.token, [0] * 17, tenant="a").ended()
        assert many.reason == "INVALID_RESUME"


async def test_a_request_id_is_in_use_until_the_answer_ends(model_path: Path) -> None:
    async with fake_cluster(model_path, decode_script=Script(step_seconds=0.01)) as cluster:
        stream = Stream(cluster.stub.Generate(resumable(3000, request_id="mine")))
        await stream.has(2)
        await stream.leave()
        assert (await cluster.ask(generate(request_id="mine"))).reason == "DUPLICATE_REQUEST"
        await cluster.stub.Cancel(pb.CancelRequest(token=stream.token))
        await cluster.assert_quiescent()
        assert (await cluster.ask(generate(request_id="mine"))).error is None


async def test_a_worker_that_dies_while_nobody_reads(model_path: Path) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.01)) as pair:
        stream = pair.generate(pair.one, resumable(60))
        await stream.has(5)
        await stream.leave()
        (name,) = running(pair.one)
        await pair.one.workers[name].kill()
        again = pair.resume(pair.one, stream.token, stream.next_index())
        assert (await again.ended()).error is None
        assert whole(stream, again)[0] == expected(60)
        await pair.assert_quiescent()


def changed(token: bytes) -> bytes:
    """Its last byte is another one."""
    return token[:-1] + bytes([token[-1] ^ 1])


def running(cluster: FakeCluster) -> list[str]:
    """Decode workers that draw."""
    return [name for name, made in cluster.workers.items() if any(s.running for s in made.sessions)]


async def test_it_counts_once_whatever_its_streams_do(model_path: Path) -> None:
    def counted() -> float:
        return sum(
            sample.value
            for family in metrics.ROUTER_REQUESTS.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        )

    async with fake_pair(model_path, script=Script(step_seconds=0.005)) as pair:
        before = counted()
        stream = pair.generate(pair.one, resumable(30))
        await stream.has(2)
        await stream.leave()
        await pair.resume(pair.one, stream.token, stream.next_index()).ended()
        await pair.assert_quiescent()
        assert counted() == before + 1
        assert metrics.ROUTER_INFLIGHT_REQUESTS._value.get() == 0
