# SPDX-License-Identifier: Apache-2.0
"""What a client of the router gets, over gRPC from end to end, with workers that only pretend."""

import asyncio
from pathlib import Path

import grpc
import pytest

from tests.support.fake_cluster import Answer, FakeCluster, collect, fake_cluster, generate, prompt
from tests.support.fake_worker import FIRST_TOKEN, Job, Script
from tests.support.transports import each_transport  # noqa: F401
from tests.support.waiting import until
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import inference_pb2_grpc


async def test_an_answer_from_start_to_end(model_path: Path) -> None:
    script = Script(prefill_seconds=0.02, handoff_seconds=0.02, step_seconds=0.005, prefill_cached_tokens=16)
    decode = Script(handoff_seconds=0.02, step_seconds=0.005, reserved_cached_blocks=1)
    async with fake_cluster(model_path, prefill_script=script, decode_script=decode) as cluster:
        request = generate(prompt(40), max_tokens=5, request_id="mine")
        request.sampling.seed = 99
        answer = await cluster.ask(request)
        kinds = [event.WhichOneof("event") for event in answer.events]
        assert kinds[0] == "started"
        assert kinds[-1] == "finished"
        assert set(kinds[1:-1]) == {"tokens"}
        assert answer.started == pb.GenerateStarted(
            request_id="mine", model="fake", prompt_tokens=40, seed=99
        )
        assert answer.tokens() == [FIRST_TOKEN + at for at in range(5)]
        assert answer.text() == "ABCDE"
        done = answer.finished
        assert list(done.choices) == [pb.ChoiceFinish(index=0, reason=pb.FINISH_REASON_LENGTH)]
        assert done.usage == pb.Usage(
            prompt_tokens=40, completion_tokens=5, cached_tokens=16, decode_cached_tokens=16
        )
        assert (done.prefill_worker, done.decode_worker, done.attempts) == ("p0", "d0", 1)
        assert done.handoff.blocks == 3
        assert cluster.workers["p0"].prefills[0].reader_cached_blocks == 1
        assert done.handoff.bytes == 128 * 40
        times = {
            field.name: getattr(done.timings, field.name).ToNanoseconds() / 1e9
            for field in done.timings.DESCRIPTOR.fields
        }
        assert times["prefill"] >= 0.02
        assert min(times["handoff"], times["decode"]) > 0, (
            "as the router hears of it, whatever the order of its streams"
        )
        assert times["total"] >= 0.02 + 0.02 + 4 * 0.005
        hops = sum(times[name] for name in ("tokenize", "queue", "reserve", "prefill", "handoff", "decode"))
        assert hops == pytest.approx(times["total"], abs=1e-6), "every moment belongs to one hop"
        assert 0.02 <= times["time_to_first_token"] <= times["total"]
        await cluster.assert_quiescent()
        assert not any(made.cancels for made in cluster.workers.values()), "both legs ended by themselves"


async def test_the_first_token_does_not_wait_for_the_hand_off(model_path: Path) -> None:
    never = asyncio.Event()
    async with fake_cluster(model_path, decode_script=Script(handoff_gate=never)) as cluster:
        call = cluster.stub.Generate(generate())
        started = await asyncio.wait_for(call.read(), 60)
        first = await asyncio.wait_for(call.read(), 60)
        assert started.WhichOneof("event") == "started"
        assert list(first.tokens.token_ids) == [FIRST_TOKEN]
        call.cancel()
        await cluster.assert_quiescent()


async def test_two_choices_share_a_prompt(model_path: Path) -> None:
    async with fake_cluster(model_path) as cluster:
        answer = await cluster.ask(generate(max_tokens=6, n=2))
        assert answer.text(0) == "ABCDEF"
        assert answer.text(1) == "BCDEFG"
        assert [choice.index for choice in answer.finished.choices] == [0, 1]
        assert answer.finished.usage.completion_tokens == 12
        assert answer.finished.usage.prompt_tokens == 20
        (sent,) = cluster.workers["p0"].prefills
        assert sent.draw.n == 2
        await cluster.assert_quiescent()


@pytest.mark.parametrize("n", [1, 2])
async def test_the_first_token_may_be_the_last(model_path: Path, n: int) -> None:
    """Finished without a decode step; the hand-off may go on, and both sides are free after it."""
    gate = asyncio.Event()
    async with fake_cluster(model_path, decode_script=Script(handoff_gate=gate)) as cluster:
        answer = await cluster.ask(generate(max_tokens=1, n=n))
        gate.set()
        assert [answer.tokens(index) for index in range(n)] == [[FIRST_TOKEN + index] for index in range(n)]
        assert answer.finished.usage.completion_tokens == n
        await cluster.assert_quiescent()
        assert cluster.workers["d0"].cancels == [], "the pull is let finish: the next turn can use it"


async def test_a_stop_token_ends_the_answer(model_path: Path) -> None:
    async with fake_cluster(model_path) as cluster:
        request = generate(max_tokens=50)
        request.stop.stop_token_ids.append(FIRST_TOKEN + 3)
        answer = await cluster.ask(request)
        assert answer.text() == "ABC"
        assert answer.finished.usage.completion_tokens == 4
        assert answer.finished.choices[0].stop_token_id == FIRST_TOKEN + 3
        (sent,) = cluster.workers["d0"].decodes
        assert list(sent.draw.stop_token_ids) == [FIRST_TOKEN + 3, 257], "the model's own end token is in it"
        await cluster.assert_quiescent()


async def test_a_stop_string_across_tokens_stops_the_worker(model_path: Path) -> None:
    async with fake_cluster(model_path, decode_script=Script(step_seconds=0.002)) as cluster:
        request = generate(max_tokens=4000)
        request.stop.stop_strings.extend(["EFG", "nothing"])
        answer = await cluster.ask(request)
        assert answer.text() == "ABCD"
        assert answer.tokens() == [FIRST_TOKEN + at for at in range(7)]
        assert answer.finished.choices[0] == pb.ChoiceFinish(reason=pb.FINISH_REASON_STOP, stop_string="EFG")
        await until(lambda: cluster.workers["d0"].cancels)
        await cluster.assert_quiescent()
        assert len(cluster.workers["d0"].cancels) == 1, "the decode worker would have gone on"
        assert not cluster.workers["p0"].prefills[0].draw.stop.stop_strings


async def test_a_stop_string_may_be_part_of_the_text(model_path: Path) -> None:
    async with fake_cluster(model_path) as cluster:
        request = generate(max_tokens=400)
        request.stop.stop_strings.append("EFG")
        request.stop.include_stop = True
        answer = await cluster.ask(request)
        assert answer.text() == "ABCDEFG"
        assert answer.finished.choices[0].stop_string == "EFG"


async def test_a_stop_string_in_the_first_token(model_path: Path) -> None:
    async with fake_cluster(model_path) as cluster:
        request = generate(max_tokens=2000)
        request.stop.stop_strings.append("A")
        answer = await cluster.ask(request)
        assert (answer.tokens(), answer.text()) == ([FIRST_TOKEN], "")
        await cluster.assert_quiescent()


async def test_logprobs_of_both_legs(model_path: Path) -> None:
    async with fake_cluster(model_path) as cluster:
        answer = await cluster.ask(generate(max_tokens=3, logprobs=2))
        entries = [entry for event in answer.events for entry in event.tokens.logprobs]
        assert [entry.chosen.token_id for entry in entries] == answer.tokens()
        assert all(len(entry.top) == 2 for entry in entries)
        plain = await cluster.ask(generate(max_tokens=3))
        assert not any(event.tokens.logprobs for event in plain.events)


async def test_text_and_chat_prompts(model_path: Path) -> None:
    async with fake_cluster(model_path) as cluster:
        await cluster.ask(generate(text="Hi é", max_tokens=2))
        long = "x" * 3000
        await cluster.ask(generate(text=long, max_tokens=2))
        chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="yo")])
        await cluster.ask(generate(chat=chat, max_tokens=2))
        sent = [bytes(command.prompt.token_ids) for command in cluster.workers["p0"].prefills]
        texts = [bytes(raw[::4]).decode() for raw in sent]
        assert texts == ["Hi é", long, "[user]yo\n[assistant]"]
        tokens = await cluster.stub.Tokenize(pb.TokenizeRequest(text="Hi é"))
        assert list(tokens.token_ids) == [*"Hi é".encode()]
        assert tokens.max_context_tokens == 4096


async def test_models(model_path: Path) -> None:
    async with fake_cluster(model_path, prefill=2, decode=1) as cluster:
        listed = await cluster.stub.ListModels(pb.ListModelsRequest())
        assert list(listed.models) == [
            pb.Model(
                name="fake",
                family="llama",
                max_context_tokens=4096,
                vocab_size=258,
                block_tokens=16,
                prefill_workers=2,
                decode_workers=1,
                ready=True,
            )
        ]


async def test_a_token_without_text_fails_the_stream(model_path: Path) -> None:
    def token(job: Job, choice: int, offset: int) -> int:
        return 258 if offset == 3 else FIRST_TOKEN

    async with fake_cluster(
        model_path, decode_script=Script(token=token, step_seconds=0.005), vocab_size=300
    ) as cluster:
        answer = await cluster.ask(generate(max_tokens=50))
        assert answer.code is grpc.StatusCode.INTERNAL
        assert answer.reason == "DETOKENIZE_FAILED"
        assert answer.tokens()[:3] == [FIRST_TOKEN] * 3
        await cluster.assert_quiescent()


async def test_prefill_must_draw_exactly_one_token_a_choice(model_path: Path) -> None:
    async with fake_cluster(model_path) as cluster:
        worker = cluster.workers["p0"]
        worker.script.extra_first_token = True
        answer = await cluster.ask(generate())
        assert answer.code is grpc.StatusCode.INTERNAL
        await cluster.assert_quiescent()


async def test_tokens_gather_for_the_configured_interval(model_path: Path) -> None:
    interval = 0.4
    settings: dict[str, object] = {"stream_interval_seconds": interval}
    gate = asyncio.Event()
    script = Script(handoff_gate=gate, step_seconds=0.02)
    async with fake_cluster(model_path, decode_script=script, settings=settings) as cluster:
        call = cluster.stub.Generate(generate(max_tokens=40))
        events = [await call.read() for _ in range(2)]
        assert len(events[1].tokens.token_ids) == 1, "the first token is sent at once: there is no other yet"
        gate.set()
        while (event := await call.read()) is not grpc.aio.EOF:
            events.append(event)
        sizes = [len(event.tokens.token_ids) for event in events[1:-1]]
        times = events[-1].finished.timings
        assert sum(sizes) == 40
        assert len(sizes) <= 3 + times.total.ToNanoseconds() / 1e9 / interval, sizes


async def slow_reader(cluster: FakeCluster, request: pb.GenerateRequest, release: asyncio.Event) -> Answer:
    """Reads nothing until it may, and lets no more than 64 KiB be sent to it."""
    options = [("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(cluster.router.endpoint, options) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
        await release.wait()
        return await collect(call)


async def test_a_slow_client_gets_few_messages_and_all_tokens(model_path: Path) -> None:
    """While a write waits for the client, tokens gather; nothing is lost and nothing is sent twice."""
    async with fake_cluster(model_path, max_context_tokens=200_000, num_blocks=20_000) as cluster:
        request = generate(max_tokens=3000, logprobs=20)
        request.stop.ignore_eos = True
        release = asyncio.Event()
        reader = asyncio.create_task(slow_reader(cluster, request, release))
        # The workers are done and free while the client still has most of it to read.
        await until(lambda: cluster.router.core.stats()["state_Finished"])
        assert not cluster.held()
        release.set()
        answer = await reader
        assert answer.tokens() == [FIRST_TOKEN + at % 26 for at in range(3000)]
        assert len(answer.events) < 1000
        await cluster.assert_quiescent()


async def test_what_a_slow_client_may_leave_unread_is_bounded(model_path: Path) -> None:
    settings: dict[str, object] = {"max_buffered_tokens": 500}
    async with fake_cluster(
        model_path, settings=settings, max_context_tokens=200_000, num_blocks=20_000
    ) as cluster:
        request = generate(max_tokens=60_000, logprobs=20)
        release = asyncio.Event()
        reader = asyncio.create_task(slow_reader(cluster, request, release))
        await until(lambda: cluster.workers["d0"].cancels)
        await until(lambda: cluster.router.core.stats()["reservations"] == 0)
        await until(lambda: not cluster.held())
        release.set()
        answer = await reader
        assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await cluster.assert_quiescent()
