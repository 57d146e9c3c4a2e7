# SPDX-License-Identifier: Apache-2.0
"""A request's spans over three real processes: one trace, one span a hop, the legs linked."""

import asyncio
import itertools
from pathlib import Path

import pytest

from tests.support.collector import Collector, Seen, running_collector
from tests.support.fleet import BLOCK, Fleet, running_fleet
from tests.support.steps import prompt
from twinpool.client import request
from twinpool.engine.tiny import write_tiny

pytestmark = pytest.mark.integration

HOPS = ["tokenize", "queue", "reserve", "prefill", "handoff", "decode"]
CLIENT_TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_one_trace_over_router_and_workers(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", "deepseek_v3", seed=7)
    workers = {"prefill-0": "prefill", "decode-0": "decode"}
    with running_collector() as (collector, endpoint):
        tracing: dict[str, object] = {"tracing.endpoint": endpoint}
        with running_fleet(tmp_path, model, workers, tracing) as fleet:
            asyncio.run(asked(fleet, tracing))
            # Their ends export what is left.
            for worker in fleet.live:
                worker.stop()
            assert fleet.router is not None
            fleet.router.terminate()
            fleet.router.wait(60)
        check(collector)


async def asked(fleet: Fleet, settings: dict[str, object]) -> None:
    await fleet.start_router(settings)
    async with fleet.client() as client:
        message = request(prompt(5 * BLOCK + 3, 1), max_tokens=4, temperature=0.0, ignore_eos=True)
        parent = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"
        async for _ in client.stream(message, traceparent=parent):
            pass
        # One that the client does not trace has a trace of its own.
        async for _ in client.stream(message):
            pass


def check(collector: Collector) -> None:
    spans = [span for span in collector.spans if span.trace == CLIENT_TRACE]
    by_name = {span.name: span for span in spans}
    assert len(by_name) == len(spans), "a span came twice"
    assert sorted(by_name) == sorted(
        ["generate", *HOPS, "worker.prefill", "worker.transfer", "worker.decode"]
    )
    root = by_name["generate"]
    assert root.parent == CLIENT_SPAN
    assert {span.parent for span in spans if span is not root} == {root.span}
    assert by_name["worker.prefill"].service == "twinpool-prefill"
    assert by_name["worker.transfer"].service == by_name["worker.decode"].service == "twinpool-decode"
    assert {by_name[name].service for name in ("generate", *HOPS)} == {"twinpool-router"}
    for name in ("worker.transfer", "worker.decode"):
        assert by_name[name].links == (by_name["worker.prefill"].span,), name
    assert by_name["worker.transfer"].attributes["twinpool.blocks"] == 6
    assert root.attributes["twinpool.prompt_tokens"] == 5 * BLOCK + 3
    conventional(root, [span for span in spans if span is not root])
    one_after_another([by_name[name] for name in HOPS])
    others = {span.trace for span in collector.spans} - {CLIENT_TRACE}
    assert len(others) == 1


def conventional(root: Seen, parts: list[Seen]) -> None:
    """The request's own span has the attributes of OpenTelemetry's conventions for generative AI; its parts have none."""
    given = {name: value for name, value in root.attributes.items() if name.startswith("gen_ai.")}
    seconds = given.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < seconds <= (root.ended - root.began) / 1e9
    reasons = given.pop("gen_ai.response.finish_reasons")
    assert [each.string_value for each in reasons.values] == ["length"]
    assert given.pop("gen_ai.response.id")
    assert given == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "twinpool",
        "gen_ai.request.model": "model",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.response.model": "model",
        "gen_ai.usage.input_tokens": 5 * BLOCK + 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    for part in parts:
        assert not any(name.startswith("gen_ai.") for name in part.attributes), part.name


def one_after_another(hops: list[Seen]) -> None:
    for before, after in itertools.pairwise(hops):
        assert before.began <= before.ended
        assert abs(after.began - before.ended) < 1000, (before.name, after.name)
