# SPDX-License-Identifier: Apache-2.0
"""Recorded sessions through a real cluster of three prefill workers and one decode worker.

What placement expected in a worker's cache is what the worker found there, by its own count, and the answers are the
oracle's. The recorded traces are not part of the project: ``TWINPOOL_TRACES`` names the directory that holds them.
"""

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, running_cluster
from tests.support.oracle import oracle
from twinpool.client import Client
from twinpool.control.replay.figures import Objectives
from twinpool.control.replay.live import Limits, Replay, replay_figures
from twinpool.control.replay.load import Selection, load_trace
from twinpool.router_client import RouterClient
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import router_pb2, worker_pb2

pytestmark = pytest.mark.integration

BLOCK = 16
AGREEMENT = 0.02
"""Most that expected and found cached tokens may differ by, as a share of those found."""
SAMPLE = 12
"""Answers of a replay that are compared with the oracle."""

TRACES = {"ci_conversation_dense_x32.jsonl": 60.0, "ci_coding_agent_x64.jsonl": 900.0}
"""Recorded traces and the speed at which they take about a minute."""


@dataclass
class Heard:
    """One answer as its client saw it."""

    message: pb.GenerateRequest
    request_id: str
    token_ids: list[int]
    usage: pb.Usage


class Listening(Client):
    """A client that remembers what it got."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.heard: list[Heard] = []

    async def stream(
        self, message: pb.GenerateRequest, *, timeout: float | None = None
    ) -> AsyncIterator[pb.GenerateResponse]:
        """See Client."""
        heard = Heard(message, "", [], pb.Usage())
        async for event in super().stream(message, timeout=timeout):
            kind = event.WhichOneof("event")
            if kind == "started":
                heard.request_id = event.started.request_id
            elif kind == "tokens":
                heard.token_ids += event.tokens.token_ids
            elif kind == "finished":
                heard.usage = event.finished.usage
                self.heard.append(heard)
            yield event


@pytest.fixture(scope="module")
def wide_cluster(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three prefill workers and one decode worker, on cores that they share."""
    settings = {
        "pools.prefill_workers": 3,
        "pools.decode_workers": 1,
        "kv.num_blocks": 1200,
        "scheduler.max_chunk_tokens": 512,
        "scheduler.max_batched_tokens": 1024,
        "worker.threads": 1,
    }
    with running_cluster(tmp_path_factory.mktemp("wide"), checkpoints["deepseek_v3"], settings) as running:
        yield running


async def replay(cluster: Cluster, path: Path, speed: float) -> dict[str, object]:
    """Replays a trace and checks it; returns its figures."""
    trace = load_trace(path, "scaled", Selection(speed=speed))
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Listening(cluster.state.router_endpoints[0]))
        routers = await stack.enter_async_context(RouterClient(cluster.state.router_endpoints[0]))
        (model,) = await client.models()
        limits = Limits(in_flight=64, seconds=500.0, request_seconds=200.0)
        run = Replay(
            trace, [client], model, closed=trace.closed, limits=limits, seed=0, tell=lambda progress: None
        )
        await run.run()
        figures = replay_figures(run, Objectives(float("inf"), float("inf")))
        assert figures["failed"] == 0, figures["causes"]
        assert len(client.heard) == len(trace.requests)
        selected, actual = await _counts(routers, client.heard)
    assert actual > 0
    figures |= {"selected_tokens": selected, "actual_tokens": actual}
    assert abs(selected - actual) <= AGREEMENT * actual, figures
    _check_answers(cluster, client.heard)
    await cluster.assert_quiescent()
    return figures


async def _counts(routers: RouterClient, heard: list[Heard]) -> tuple[int, int]:
    """Cached tokens that placement expected, and that prefill workers found, of all requests."""
    selected = actual = 0
    for each in heard:
        last = (await routers.trace(each.request_id)).attempts[-1].locality
        assert last.actual_tokens == each.usage.cached_tokens, "the router knows what the worker counted"
        selected += last.selected_tokens
        actual += each.usage.cached_tokens
    return selected, actual


def _check_answers(cluster: Cluster, heard: list[Heard]) -> None:
    """Short and long, cached and new: a sample of the answers, token by token."""
    for each in random.Random(1).sample(heard, min(SAMPLE, len(heard))):
        prompt = list(each.message.token_ids.ids)
        expected = oracle(cluster.model).greedy(prompt, each.message.stop.max_tokens, ignore_eos=True)
        assert each.token_ids == expected, f"prompt of {len(prompt)} tokens"


def write_sessions(path: Path, sessions: int, turns: int) -> None:
    """Agents that share a system prompt; each turn adds some blocks to the one before, half a second after its answer."""
    draw = random.Random(7)
    lines: list[dict[str, object]] = []
    fresh = 4
    for session in range(sessions):
        blocks, before = list(range(4)), None
        for turn in range(turns):
            added = draw.randint(1, 6)
            blocks = blocks + list(range(fresh, fresh + added))
            fresh += added
            lines.append(
                {
                    "id": len(lines),
                    "session": f"s{session}",
                    "turn": turn,
                    "timestamp": 100 * session,
                    "after": before,
                    "think_ms": 500 if turn else 0,
                    "input_length": len(blocks) * BLOCK + draw.randrange(BLOCK),
                    "output_length": draw.randint(2, 6),
                    "hash_ids": blocks,
                }
            )
            before = len(lines) - 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


async def test_sessions_hit_what_placement_expected(wide_cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    write_sessions(path, sessions=6, turns=6)
    figures = await replay(wide_cluster, path, speed=2.0)
    hit = figures["token_hit_rate"]
    assert isinstance(hit, float)
    assert hit > 0.6, figures


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TRACES)
async def test_recorded_traces_hit_what_placement_expected(wide_cluster: Cluster, name: str) -> None:
    directory = os.environ.get("TWINPOOL_TRACES", "")
    path = Path(directory) / name
    if not directory or not path.exists():
        pytest.skip(f"{name} is not in TWINPOOL_TRACES={directory or '(unset)'}")
    figures = await replay(wide_cluster, path, TRACES[name])
    print(json.dumps({"trace": name} | figures, default=str))


async def _known(router: RouterClient, message: pb.GenerateRequest, tokens: int) -> None:
    """Waits until the router has heard that a prefill worker holds so many tokens of the prompt."""
    lookup = router_pb2.LookupPrefixRequest(text=message.text)
    if message.WhichOneof("prompt") == "chat":
        lookup.chat.CopyFrom(message.chat)
    elif message.WhichOneof("prompt") == "token_ids":
        lookup.token_ids.CopyFrom(message.token_ids)
    async with asyncio.timeout(60):
        while True:
            holders = (await router.lookup(lookup)).holders
            if any(each.tokens >= tokens and each.role == worker_pb2.ROLE_PREFILL for each in holders):
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("form", ["text", "chat", "ids"])
async def test_every_form_of_a_prompt_is_found_where_it_was_computed(
    wide_cluster: Cluster, form: str
) -> None:
    """What the router hashes is what the workers compute, whichever way the prompt came: three homes are possible."""
    words = " ".join(f"{form} word {number}" for number in range(60))
    message = pb.GenerateRequest()
    if form == "text":
        message.text = words
    elif form == "chat":
        message.chat.messages.add(role="user", content=words)
    else:
        message.token_ids.ids.extend(300 + number % 200 for number in range(150))
    message.stop.max_tokens, message.sampling.temperature = 3, 0.0
    endpoint = wide_cluster.state.router_endpoints[0]
    async with Listening(endpoint) as client, RouterClient(endpoint) as router:
        first = await client.complete(message, timeout=60)
        usable = (first.finished.usage.prompt_tokens - 1) // BLOCK * BLOCK
        await _known(router, message, usable)
        again = await client.complete(message, timeout=60)
        trace = await router.trace(client.heard[-1].request_id)
    assert usable >= 4 * BLOCK
    assert first.finished.usage.cached_tokens < usable
    locality = trace.attempts[-1].locality
    assert locality.selected_tokens == again.finished.usage.cached_tokens == usable
    assert again.token_ids == first.token_ids
