# SPDX-License-Identifier: Apache-2.0
"""The live replay against a router that only pretends, and the two commands."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from typer.testing import CliRunner

from tests.unit.control.simulated import sessions
from tests.unit.control.test_control_formats import write
from twinpool.client import Client
from twinpool.control.cli.main import app
from twinpool.control.replay.figures import Objectives
from twinpool.control.replay.live import Limits, Progress, Replay, replay_figures
from twinpool.control.replay.trace import Trace
from twinpool.control.simulate.plot import PlotError, svg, write_plot
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import inference_pb2_grpc

MODEL = pb.Model(name="pretend", max_context_tokens=4096, vocab_size=512, block_tokens=16)


class Pretender(inference_pb2_grpc.InferenceServiceServicer):
    """Answers with as many tokens as asked for, two an event; notes prompts and how many it serves at a time."""

    def __init__(self, pause: float = 0.0, fail: int = 0) -> None:
        self.prompts: list[list[int]] = []
        self.serving = self.most = 0
        self._pause, self._fail = pause, fail

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[MODEL])

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.prompts.append(list(request.token_ids.ids))
        if len(self.prompts) <= self._fail:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        self.serving += 1
        self.most = max(self.most, self.serving)
        await asyncio.sleep(self._pause)
        asked = request.stop.max_tokens
        for offset in range(0, asked, 2):
            ids = [7] * min(2, asked - offset)
            yield pb.GenerateResponse(tokens=pb.GenerateTokens(offset=offset, token_ids=ids))
        usage = pb.Usage(prompt_tokens=len(request.token_ids.ids), cached_tokens=16)
        done = pb.GenerateFinished(usage=usage, prefill_worker="p0", attempts=1)
        yield pb.GenerateResponse(finished=done)
        self.serving -= 1


async def serve(pretender: Pretender) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(pretender, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def run(
    trace: Trace, pretender: Pretender, *, closed: bool = False, limits: Limits | None = None
) -> tuple[Replay, list[Progress]]:
    told: list[Progress] = []
    server, endpoint = await serve(pretender)
    try:
        async with Client(endpoint) as client:
            replay = Replay(
                trace, [client], MODEL, closed=closed, limits=limits or Limits(), seed=0, tell=told.append
            )
            await replay.run()
    finally:
        await server.stop(None)
    return replay, told


async def test_open_loop_sends_every_request_once() -> None:
    trace = sessions(count=4, turns=3).faster(20.0)
    pretender = Pretender()
    replay, told = await run(trace, pretender)
    figures = replay_figures(replay, Objectives(ttft=60.0))
    assert (figures["requests"], figures["served"], figures["attainment"]) == (12, 12, 1.0)
    assert sorted(map(len, pretender.prompts)) == sorted(r.input_length for r in trace.requests)
    tokens = sum(request.output_length for request in trace.requests)
    assert sum(each.timing.output_tokens for each in replay.answered) == tokens
    assert figures["token_hit_rate"] == pytest.approx(12 * 16 / sum(r.input_length for r in trace.requests))
    assert told[-1].served == 12
    assert told[-1].in_flight == 0
    for each in replay.answered:
        assert each.timing.arrival >= each.request.arrival
        assert len(each.gaps) == each.request.output_length - 1


async def test_equal_blocks_are_equal_tokens_on_the_wire() -> None:
    pretender = Pretender()
    trace = sessions(count=2, turns=2).faster(20.0)
    await run(trace, pretender)
    assert len({tuple(prompt[:16]) for prompt in pretender.prompts}) == 1
    assert len({tuple(prompt) for prompt in pretender.prompts}) == 4
    assert all(256 <= token < 512 for prompt in pretender.prompts for token in prompt)


async def test_closed_loop_waits_for_the_answer() -> None:
    trace = sessions(count=3, turns=3, closed=True).faster(20.0)
    replay, _ = await run(trace, Pretender(pause=0.05), closed=True)
    answered = {each.request.id: each.timing for each in replay.answered}
    assert len(answered) == 9
    for request in trace.requests:
        if request.after is not None:
            assert answered[request.id].arrival >= answered[request.after].end + request.think


async def test_it_is_bounded_in_flight_and_in_time() -> None:
    pretender = Pretender(pause=0.05)
    replay, _ = await run(sessions(count=4, turns=2).faster(1000.0), pretender, limits=Limits(in_flight=2))
    assert pretender.most == 2
    assert replay.late > 0
    trace = sessions(count=4, turns=3)
    replay, _ = await run(trace, Pretender(), limits=Limits(seconds=1.0))
    assert replay.progress.served < 12
    assert replay.progress.served + replay.progress.skipped == 12
    assert all(each.timing.arrival < 1.0 for each in replay.answered)


async def test_failures_are_counted_and_end_their_session() -> None:
    trace = sessions(count=1, turns=4, closed=True).faster(20.0)
    replay, _ = await run(trace, Pretender(fail=1), closed=True)
    figures = replay_figures(replay, Objectives())
    assert (figures["served"], figures["failed"], figures["skipped"]) == (0, 1, 3)
    assert len(figures["causes"]) == 1  # type: ignore[arg-type]


async def test_what_does_not_fit_the_model_is_skipped() -> None:
    trace = sessions(count=2, turns=2).faster(20.0)
    longest = max(request.input_length + request.output_length for request in trace.requests)
    small = pb.Model(name="small", max_context_tokens=longest - 1, vocab_size=512)
    server, endpoint = await serve(Pretender())
    async with Client(endpoint) as client:
        replay = Replay(
            trace, [client], small, closed=False, limits=Limits(), seed=0, tell=lambda progress: None
        )
        await replay.run()
    await server.stop(None)
    assert replay.progress.skipped >= 1
    assert replay.progress.served + replay.progress.skipped == 4


# --- the commands -----------------------------------------------------------------------------


def mooncake(directory: Path) -> Path:
    lines = [
        {"timestamp": n * 400, "input_length": 1100, "output_length": 5, "hash_ids": [0, n // 4 + 1, n + 50]}
        for n in range(20)
    ]
    return write(directory, "small.jsonl", *lines)


def test_simulate_prints_json(tmp_path: Path) -> None:
    arguments = ["simulate", str(mooncake(tmp_path)), "--policy", "all", "--prefill", "2", "-o", "json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [row["policy"] for row in document["policies"]][:2] == ["ours", "round_robin"]
    assert {row["served"] for row in document["policies"]} == {20}
    assert document["setup"]["model"]["source"]
    assert all(0 < row["block_hit_rate"] <= row["infinite_hit_rate"] for row in document["policies"])


def test_simulate_sweeps_and_plots(tmp_path: Path) -> None:
    plot = tmp_path / "sweep.svg"
    faults = tmp_path / "faults.txt"
    faults.write_text("2 slow prefill-0 2\n")
    arguments = [
        "simulate",
        str(mooncake(tmp_path)),
        "--sweep",
        "3",
        "--plot",
        str(plot),
        "--faults",
        str(faults),
    ]
    result = CliRunner().invoke(app, [*arguments, "-o", "json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [row["prefill"] for row in document["splits"]["ours"]] == [1, 2]
    assert document["best"]["ours"] in document["splits"]["ours"]
    assert plot.read_text().startswith("<svg")
    table = CliRunner().invoke(app, arguments)
    assert "PREFILL" in table.stdout
    assert table.stdout.count("*") == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--policy", "x"], "unknown policy 'x'"),
        (["--preset", "x"], "unknown preset 'x'"),
        (["--core", "x=1"], "unknown field x"),
        (["--core", "x"], "expected name=number"),
        (["--block-tokens", "48"], "do not fit the trace's"),
        (["--format", "x"], "unknown format 'x'"),
    ],
)
def test_simulate_says_what_is_wrong(tmp_path: Path, more: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["simulate", str(mooncake(tmp_path)), *more])
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")


async def test_replay_prints_json(tmp_path: Path) -> None:
    server, endpoint = await serve(Pretender())
    arguments = [
        "replay",
        str(mooncake(tmp_path)),
        "--endpoint",
        endpoint,
        "--speed",
        "100",
        "-n",
        "9",
        "-o",
        "json",
    ]
    result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--slo-ttft", "60"])
    await server.stop(None)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["mode"], document["served"], document["met_objectives"]) == ("open", 9, 9)
    assert document["objectives"] == {"ttft": 60.0, "itl": None}


def test_replay_refuses_a_closed_loop_without_sessions(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["replay", str(mooncake(tmp_path)), "--endpoint", "x:1", "--mode", "closed"]
    )
    assert result.exit_code == 2
    assert "no request follows an answer" in result.output.replace("\n", " ")


def test_plots(tmp_path: Path) -> None:
    text = svg("a < b", "x", "y", {"one": [(1.0, 2.0), (2.0, 4.0)], "two": [(1.0, 0.0)]})
    assert "a &lt; b" in text
    assert text.count("<polyline") == 2
    with pytest.raises(PlotError, match=r"allowed endings: \.svg, \.png"):
        write_plot(tmp_path / "x.pdf", "", "", "", {"one": [(1.0, 1.0)]})
