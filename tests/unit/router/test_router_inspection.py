# SPDX-License-Identifier: Apache-2.0
"""What a router tells operators: its view, who holds a prompt, why a request went where it went."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.support.fake_cluster import FakeCluster, fake_cluster, generate, prompt
from tests.support.fake_worker import Script
from tests.support.waiting import until
from tests.unit.router.test_router_hops import prepared
from tests.unit.router.test_router_locality import cached_cluster, longest
from twinpool._core import AdmissionConfig, RouterCore
from twinpool.control.cli.main import app
from twinpool.errors import TwinpoolError
from twinpool.router.trace import EVENTS_MAX, Trace, TraceBook
from twinpool.router_client import RouterClient
from twinpool.v1 import inference_pb2
from twinpool.v1 import router_pb2 as pb
from twinpool.v1 import worker_pb2 as worker

BLOCK = 16


@pytest.fixture
async def cluster(model_path: Path) -> AsyncIterator[FakeCluster]:
    """Two prefill workers with caches, one decode worker."""
    async with cached_cluster(model_path) as made:
        yield made


@pytest.fixture
async def client(cluster: FakeCluster) -> AsyncIterator[RouterClient]:
    async with RouterClient(cluster.router.endpoint) as made:
        yield made


async def cli(*arguments: str) -> Result:
    """A command as it is typed, on a thread of its own."""
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments))


async def test_the_view_keeps_reports_and_reservations_apart(
    cluster: FakeCluster, client: RouterClient
) -> None:
    gate = asyncio.Event()
    for name in ("p0", "p1"):
        cluster.workers[name].script.prefill_gate = gate
    asked = asyncio.ensure_future(cluster.ask(generate(prompt(64))))
    await until(lambda: cluster.held())
    cluster.workers["p1"].report(
        running_requests=7, waiting_prefill_tokens=4000, available_blocks=9, prefix_pinned_blocks=3
    )
    await until(lambda: cluster.router.fleet.reported(cluster.workers["p1"].key))
    view = await client.inspect()
    assert view.router == "router-test"
    assert [row.worker.name for row in view.workers] == ["d0", "p0", "p1"]
    d0, p0, p1 = view.workers
    assert sum(row.reserved.prefill_tokens for row in (p0, p1)) == 64
    assert p1.reported.prefix_pinned_blocks == 3
    assert (p1.reported.running, p1.reported.queued_prefill_tokens, p1.reported.available_blocks) == (
        7,
        4000,
        9,
    )
    assert not p0.HasField("reported")
    # Its blocks, and the hand-off that will fill them.
    assert (d0.reserved.reservations, d0.reserved.transfers) == (2, 1)
    assert (d0.locality.state, p0.locality.state) == ("segments", "live")
    gate.set()
    await asked
    view = await client.inspect()
    assert sum(row.reserved.prefill_tokens for row in view.workers) == 0


async def test_conditions_are_told(cluster: FakeCluster, client: RouterClient) -> None:
    cluster.router.locality.watch()
    view = await client.inspect()
    # The decode worker of this cluster publishes no events.
    (one,) = view.conditions
    assert (one.type, one.cause, one.detail) == ("LocalityDegraded", "no_event_stream", "d0")
    listed = await cli("get", "conditions", "--endpoint", cluster.router.endpoint, "-o", "json")
    assert listed.exit_code == 0
    assert json.loads(listed.stdout)[0]["cause"] == "no_event_stream"


async def test_who_holds_a_prompt(cluster: FakeCluster, client: RouterClient) -> None:
    tokens = prompt(70)
    await cluster.ask(generate(tokens))
    await until(lambda: longest(cluster.router, tokens) == 4)
    request = pb.LookupPrefixRequest()
    request.token_ids.ids.extend([*tokens[:50], *prompt(40, seed=3)])
    found = await client.lookup(request)
    assert (found.prompt_tokens, found.prompt_blocks) == (90, 5)
    ((holder),) = found.holders
    assert (holder.blocks, holder.tokens) == (3, 48)
    assert holder.worker.name in ("p0", "p1")
    request.tenant = "other"
    assert not (await client.lookup(request)).holders


async def test_a_trace_says_why(cluster: FakeCluster, client: RouterClient) -> None:
    tokens = prompt(64)
    await cluster.ask(generate(tokens))
    await until(lambda: longest(cluster.router, tokens) == 4)
    await cluster.ask(generate([*tokens, *prompt(30, seed=2)], request_id="mine"))
    await until(lambda: cluster.router.admission.active == 0)
    trace = await client.trace("mine")
    assert (trace.client_id, trace.prompt_tokens, trace.state, trace.cause) == ("mine", 94, "Finished", "")
    ((attempt),) = trace.attempts
    assert attempt.pairs == 2
    assert len(attempt.others) == 1
    assert attempt.chosen.prefill_cached_blocks == 4
    assert attempt.others[0].prefill_cached_blocks == 0
    assert attempt.chosen.total.ToNanoseconds() < attempt.others[0].total.ToNanoseconds()
    known = attempt.locality
    assert (known.query_tokens, known.best_tokens, known.selected_tokens, known.actual_tokens) == (
        94,
        64,
        64,
        64,
    )
    names = [event.event for event in trace.events]
    assert names[:2] == ["accepted", "placed"]
    assert names[-1] == "finished"
    assert {"decode_reserved", "first_token", "handoff_done"} < set(names)
    moments = [event.at.ToNanoseconds() for event in trace.events]
    assert moments == sorted(moments)
    # By the router's own id, too.
    assert (await client.trace(trace.request_id)).client_id == "mine"


async def test_a_trace_shows_each_attempt_and_how_it_failed(model_path: Path) -> None:
    script = Script(fail_prefill=worker.FAILURE_REASON_TRANSFER)
    async with fake_cluster(model_path, prefill=2, prefill_script=script) as cluster:
        cluster.workers["p0"].script = cluster.workers["p1"].script = script
        answer = await cluster.ask(generate(request_id="unlucky"))
        assert answer.error is not None
        async with RouterClient(cluster.router.endpoint) as client:
            trace = await client.trace("unlucky")
        assert [attempt.number for attempt in trace.attempts] == [1, 2, 3]
        assert trace.state == "Failed"
        failures = [event.detail for event in trace.events if event.event == "attempt_failed"]
        assert failures == ["TRANSFER:prefill"] * 3
        assert not trace.attempts[-1].locality.HasField("actual_tokens")


async def test_a_waiting_request_says_what_it_waits_for(model_path: Path) -> None:
    async with fake_cluster(model_path, prefill=1, decode=1) as cluster:
        cluster.router.admission.quarantine(cluster.workers["p0"].key, 60.0)
        asked = asyncio.ensure_future(cluster.ask(generate(request_id="waits")))
        async with RouterClient(cluster.router.endpoint) as client:
            await until(lambda: cluster.router.traces.find("waits"))
            await until(lambda: cluster.router.traces.find("waits").obstacle)  # type: ignore[union-attr]
            trace = await client.trace("waits")
            assert trace.state == "Queued"
            assert trace.obstacle
            assert not trace.attempts
        cluster.router.admission.quarantine(cluster.workers["p0"].key, 0.0)
        await asked


async def test_an_unknown_request_is_said_to_be_unknown(client: RouterClient, cluster: FakeCluster) -> None:
    with pytest.raises(TwinpoolError) as caught:
        await client.trace("nobody")
    assert caught.value.reason == "REQUEST_NOT_FOUND"
    asked = await cli("trace", "nobody", "--endpoint", cluster.router.endpoint)
    assert asked.exit_code == 2


async def test_the_commands_print_it(cluster: FakeCluster) -> None:
    text = "The quick brown fox jumps over the lazy dog, again and again."
    await cluster.ask(inference_pb2.GenerateRequest(text=text, request_id="typed"))
    await until(lambda: cluster.router.admission.active == 0)
    await until(lambda: cluster.router.core.stats()["index_blocks"] == 3)
    endpoint = cluster.router.endpoint
    shown = await cli("trace", "typed", "--endpoint", endpoint)
    assert shown.exit_code == 0, shown.output
    for word in ("typed", "Finished", "chosen", "2 pairs were compared", "expected 0, found 0"):
        assert word in shown.stdout
    as_json = json.loads((await cli("trace", "typed", "--endpoint", endpoint, "-o", "json")).stdout)
    assert as_json["attempts"][0]["chosen"]["decode"]["name"] == "d0"
    listed = await cli("get", "prefixes", "--endpoint", endpoint, "-o", "json")
    rows = {row["worker"]: row for row in json.loads(listed.stdout)}
    assert sum(row["blocks"] for row in rows.values()) == 3
    assert rows["p0"]["state"] == "live"
    held = await cli("get", "prefixes", "--endpoint", endpoint, "--prompt", text, "-o", "json")
    ((row),) = json.loads(held.stdout)
    assert (row["blocks"], row["tokens"]) == (3, 48)


# --- the book -----------------------------------------------------------------------------------


def test_the_book_is_bounded_and_knows_the_last_of_an_id() -> None:
    book = TraceBook(RouterCore(AdmissionConfig()), 3)
    for number in range(5):
        request = dataclasses.replace(prepared([1]), request_id=f"r{number}", client_id=f"c{number % 2}")
        book.begin(number, request)
        book.end(number)
    assert len(book) == 3
    assert book.find("r1") is None
    assert book.find("c0") is not None
    assert book.find("c0").request_id == "r4"  # type: ignore[union-attr]
    assert book.find("c1").request_id == "r3"  # type: ignore[union-attr]


def test_a_book_of_no_requests_keeps_none() -> None:
    book = TraceBook(RouterCore(AdmissionConfig()), 0)
    book.begin(1, prepared([1]))
    assert len(book) == 0


def test_steps_of_a_request_are_bounded() -> None:
    trace = Trace("c", "r", "m", 0.0, 1, 1)
    for _ in range(EVENTS_MAX + 10):
        trace.step(1, "attempt_failed", "", "Retrying")
    assert len(trace.steps) == EVENTS_MAX
