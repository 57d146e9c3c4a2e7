# SPDX-License-Identifier: Apache-2.0
"""A worker dies under a running answer: it goes on at the next token elsewhere, and the client sees each token once."""

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.support.fake_cluster import Answer, FakeCluster, fake_cluster, generate, prompt
from tests.support.fake_worker import FIRST_TOKEN, Job, Script
from tests.support.waiting import until
from twinpool._core import hash_blocks
from twinpool.v1 import control_pb2, inference_pb2
from twinpool.v1 import worker_pb2 as pb

BLOCK = 16


def expected(tokens: int, choice: int = 0) -> list[int]:
    """What the fake workers count out."""
    return [FIRST_TOKEN + (at + choice) % 26 for at in range(tokens)]


def running_on(cluster: FakeCluster, killed: list[str]) -> str | None:
    """The decode worker that has drawn some tokens of the answer."""
    for name, made in cluster.workers.items():
        for session in made.sessions if name not in killed else ():
            for job in session.running.values():
                if max(job.offsets.values()) - job.draw.drawn >= 5:
                    return name
    return None


def client_has_tokens(cluster: FakeCluster) -> bool:
    """A router that is slow to hear of drawn tokens has nothing to go on from yet, and would place the request anew."""
    waiting = cluster.router.admission._waiting.values()
    return all(owner._delivered for owner in waiting)  # type: ignore[attr-defined]


async def kill_under(cluster: FakeCluster, request: inference_pb2.GenerateRequest, kills: int = 1) -> Answer:
    """Asks, and kills the decode worker so often in the middle of the answer, where it waits for that."""
    hold(cluster, 8)
    task = asyncio.create_task(cluster.ask(request))
    killed: list[str] = []
    for _ in range(kills):
        await until(lambda: running_on(cluster, killed) and client_has_tokens(cluster))
        name = running_on(cluster, killed)
        assert name is not None
        killed.append(name)
        await cluster.workers[name].kill()
    hold(cluster, None)
    return await task


def hold(cluster: FakeCluster, tokens: int | None) -> None:
    """No worker draws more than so many tokens of an answer."""
    for made in cluster.workers.values():
        made.script.hold_after_tokens = tokens


async def test_it_goes_on_at_the_next_token(model_path: Path) -> None:
    async with fake_cluster(model_path, decode=2, decode_script=Script(step_seconds=0.01)) as cluster:
        answer = await kill_under(cluster, generate(prompt(40), max_tokens=60))
        assert answer.error is None
        assert answer.tokens() == expected(60)
        usage, finished = answer.finished.usage, answer.finished
        assert (usage.prompt_tokens, usage.completion_tokens, finished.attempts) == (40, 60, 2)
        offsets = [event.tokens.offset for event in answer.events if event.HasField("tokens")]
        assert offsets == sorted(set(offsets)), "no token came twice"
        (second,) = [command for command in commands(cluster) if command.id.attempt == 2]
        drawn = second.draw.drawn
        assert 1 <= drawn < 60
        tokens = np.frombuffer(second.prompt.token_ids, "<i4")
        assert tokens.tolist() == [*prompt(40), *expected(drawn)]
        assert second.prompt.block_hashes == hash_blocks(second.prompt.root_hash, tokens, BLOCK).tobytes()
        assert second.draw.stop.max_tokens == 60, "limits stay those of the whole answer"
        await cluster.assert_quiescent()


def commands(cluster: FakeCluster) -> list[pb.PrefillCommand]:
    return [command for made in cluster.workers.values() for command in made.prefills]


async def test_it_survives_more_than_one_death(model_path: Path) -> None:
    async with fake_cluster(model_path, decode=4, decode_script=Script(step_seconds=0.01)) as cluster:
        answer = await kill_under(cluster, generate(max_tokens=80), kills=3)
        assert (answer.error, answer.tokens()) == (None, expected(80))
        assert answer.finished.attempts == 4
        await cluster.assert_quiescent()


async def test_a_prefill_worker_that_dies_in_the_hand_off(model_path: Path) -> None:
    script = Script(fail_handoff=pb.FAILURE_REASON_PEER_LOST)
    async with fake_cluster(model_path, decode=2, decode_script=script) as cluster:
        task = asyncio.create_task(cluster.ask(generate(max_tokens=5)))
        await until(lambda: any(made.cancels for made in cluster.workers.values()))
        for made in cluster.workers.values():
            made.script = Script()
        answer = await task
        assert (answer.error, answer.tokens()) == (None, expected(5))
        await cluster.assert_quiescent()


async def test_a_stop_string_is_found_across_the_break(model_path: Path) -> None:
    """The text is one stream, whoever draws it."""
    first = Script(fail_after_tokens=4, fail_reason=pb.FAILURE_REASON_TRANSFER)
    async with fake_cluster(model_path, decode=2, decode_script=first) as cluster:
        request = generate(max_tokens=40)
        request.stop.stop_strings.append("CDEFG")
        task = asyncio.create_task(cluster.ask(request))
        await until(lambda: any(made.cancels for made in cluster.workers.values()))
        for made in cluster.workers.values():
            made.script = Script()
        answer = await task
        assert (answer.error, answer.text()) == (None, "AB")
        assert answer.finished.choices[0].stop_string == "CDEFG"
        await cluster.assert_quiescent()


async def test_log_probabilities_come_once_a_token(model_path: Path) -> None:
    async with fake_cluster(model_path, decode=2, decode_script=Script(step_seconds=0.01)) as cluster:
        answer = await kill_under(cluster, generate(max_tokens=30, logprobs=1))
        entries = [
            entry.chosen.token_id
            for event in answer.events
            if event.HasField("tokens")
            for entry in event.tokens.logprobs
        ]
        assert (answer.error, entries) == (None, expected(30))


async def test_choices_are_drawn_again_and_must_be_the_same(model_path: Path) -> None:
    async with fake_cluster(model_path, decode=2, decode_script=Script(step_seconds=0.01)) as cluster:
        answer = await kill_under(cluster, generate(max_tokens=40, n=2))
        assert answer.error is None
        assert [answer.tokens(choice) for choice in range(2)] == [expected(40), expected(40, 1)]
        assert not any(command.draw.drawn for command in commands(cluster))
        await cluster.assert_quiescent()


async def test_choices_that_part_from_what_was_sent_end_the_stream(model_path: Path) -> None:
    """Half of one answer and half of another is no answer."""

    def other(job: Job, choice: int, offset: int) -> int:
        return FIRST_TOKEN + (offset + choice + (job.key[1] > 1 and offset == 1)) % 26

    script = Script(step_seconds=0.01, token=other)
    async with fake_cluster(model_path, decode=2, decode_script=script) as cluster:
        answer = await kill_under(cluster, generate(max_tokens=40, n=2))
        assert (answer.code, answer.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
        for choice in range(2):
            tokens = answer.tokens(choice)
            assert tokens == expected(40, choice)[: len(tokens)]
        await cluster.assert_quiescent()


@pytest.mark.parametrize("allowed", [0, 1])
async def test_it_goes_on_so_often_and_no_more(model_path: Path, allowed: int) -> None:
    settings: dict[str, object] = {"max_resumes": allowed}
    script = Script(step_seconds=0.01)
    async with fake_cluster(model_path, decode=3, decode_script=script, settings=settings) as cluster:
        answer = await kill_under(cluster, generate(max_tokens=200), kills=allowed + 1)
        assert (answer.code, answer.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
        tokens = answer.tokens()
        assert tokens == expected(200)[: len(tokens)]
        assert tokens, "the client had some"
        await cluster.assert_quiescent()


async def test_a_client_that_does_not_read_is_not_served_again(model_path: Path) -> None:
    """No other worker would make it faster."""
    settings: dict[str, object] = {"max_buffered_tokens": 16}
    async with fake_cluster(model_path, decode=2, settings=settings) as cluster:
        call = cluster.stub.Generate(generate(max_tokens=3000), timeout=120.0)
        await until(lambda: cluster.router.admission.active == 0 and commands(cluster))
        assert len(commands(cluster)) == 1
        call.cancel()
        await cluster.assert_quiescent()


# --- a worker that leaves in good order --------------------------------------------------------


def drain(cluster: FakeCluster, name: str) -> None:
    """The worker says that it takes no more work; what runs on it goes on."""
    cluster.router.fleet.upsert(cluster.workers[name].record(control_pb2.WORKER_STATE_DRAINING))


async def test_answers_move_off_a_decode_worker_that_drains(model_path: Path) -> None:
    settings: dict[str, object] = {"finish_seconds": 0.0, "max_resumes": 0}
    script = Script(step_seconds=0.02)
    async with fake_cluster(model_path, decode=2, decode_script=script, settings=settings) as cluster:
        hold(cluster, 8)
        asking = [asyncio.create_task(cluster.ask(generate(prompt(20, s), max_tokens=150))) for s in range(4)]
        await until(lambda: running_on(cluster, ["d1"]) and running_on(cluster, ["d0"]))
        drain(cluster, "d0")
        await until(lambda: not cluster.workers["d0"].held)
        hold(cluster, None)
        for answer in await asyncio.gather(*asking):
            assert (answer.error, answer.tokens()) == (None, expected(150))
            assert answer.finished.decode_worker == "d1"
        await cluster.assert_quiescent()


async def test_without_another_worker_they_end_where_they_are(model_path: Path) -> None:
    settings: dict[str, object] = {"finish_seconds": 0.0}
    script = Script(step_seconds=0.01)
    async with fake_cluster(model_path, decode=1, decode_script=script, settings=settings) as cluster:
        asking = asyncio.create_task(cluster.ask(generate(max_tokens=100)))
        await until(lambda: running_on(cluster, []))
        drain(cluster, "d0")
        cluster.router.migration.watch()
        answer = await asking
        assert (answer.error, answer.finished.attempts) == (None, 1)


async def test_they_may_end_by_themselves_first(model_path: Path) -> None:
    settings: dict[str, object] = {"finish_seconds": 60.0}
    script = Script(step_seconds=0.01)
    async with fake_cluster(model_path, decode=2, decode_script=script, settings=settings) as cluster:
        asking = asyncio.create_task(cluster.ask(generate(max_tokens=100)))
        await until(lambda: running_on(cluster, []))
        drain(cluster, str(running_on(cluster, [])))
        cluster.router.migration.watch()
        answer = await asking
        assert (answer.error, answer.finished.attempts) == (None, 1)


async def test_several_choices_end_where_they_are(model_path: Path) -> None:
    settings: dict[str, object] = {"finish_seconds": 0.0}
    script = Script(step_seconds=0.01)
    async with fake_cluster(model_path, decode=2, decode_script=script, settings=settings) as cluster:
        asking = asyncio.create_task(cluster.ask(generate(max_tokens=60, n=2)))
        await until(lambda: running_on(cluster, []))
        drain(cluster, str(running_on(cluster, [])))
        cluster.router.migration.watch()
        answer = await asking
        assert (answer.error, answer.finished.attempts) == (None, 1)
