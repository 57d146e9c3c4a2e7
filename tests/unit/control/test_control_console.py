# SPDX-License-Identifier: Apache-2.0
"""The console page's server: what it tells, whom it refuses, and what a browser may do with its page."""

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.telling import Cluster, telling_cluster
from tests.support.waiting import until, until_told
from tests.unit.base.test_base_roles import DOMAIN, Pki
from twinpool.config import TlsConfig, TwinpoolConfig
from twinpool.control.console.server import PAGES, STREAMS_MAX, Console
from twinpool.errors import TwinpoolError
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import telemetry_pb2, worker_pb2

STATIC = Path(__file__).resolve().parents[3] / "control" / "console" / "static"
NASTY = "<img src=x onerror=alert(1)>"


@asynccontextmanager
async def console(cluster: Cluster, config: TwinpoolConfig | None = None, **more: Any) -> AsyncIterator[str]:
    """Its address, without the slash at the end."""
    made = Console(config or cluster.config, cluster.collector, lambda: cluster.operations, **more)
    await made.start()
    try:
        yield made.url.rstrip("/")
    finally:
        await made.stop()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


async def body(session: aiohttp.ClientSession, url: str, status: int = 200, **more: Any) -> Any:
    async with session.get(url, **more) as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


async def test_the_api_tells_what_the_collector_knows(session: aiohttp.ClientSession) -> None:
    async with telling_cluster() as cluster, console(cluster) as url:
        await cluster.worker("p0", worker_pb2.ROLE_PREFILL)
        await cluster.worker("d0", worker_pb2.ROLE_DECODE, pool="other")
        router = await cluster.router("r0")
        router.requests = [telemetry_pb2.RequestSummary(client_id=NASTY, state="Failed", tenant="blue")]
        router.prefixes = [telemetry_pb2.HotPrefix(block_hash=b"\xab" * 16, blocks=3)]
        cluster.operations = [pb.Operation(id="o1", kind=pb.OPERATION_KIND_DRAIN)]
        overview = await body(session, f"{url}/api/overview")
        assert [one["record"]["worker"]["name"] for one in overview["workers"]] == ["d0", "p0"]
        assert [one["pool"] for one in (await body(session, f"{url}/api/overview?pool=other"))["pools"]] == [
            "other"
        ]
        found = await body(session, f"{url}/api/requests?state=ended&limit=5")
        assert (found["requests"][0]["client_id"], found["found"], found["unreachable"]) == (NASTY, 1, [])
        assert (router.asked[-1].state, router.asked[-1].limit) == ("ended", 5)
        assert (await body(session, f"{url}/api/prefixes"))["prefixes"][0]["block_hash"] == "ab" * 16
        assert (await body(session, f"{url}/api/operations"))["operations"][0]["kind"] == "drain"
        assert (await body(session, f"{url}/api/events", 404))["error"]["reason"] == "NOT_FOUND"
    async with telling_cluster() as cluster, console(cluster, events=lambda: [pb.Operation(id="e1")]) as url:
        assert (await body(session, f"{url}/api/events"))["events"][0]["id"] == "e1"


async def test_bad_questions_are_told_why(session: aiohttp.ClientSession) -> None:
    async with telling_cluster() as cluster, console(cluster) as url:
        for query in ("limit=-1", "limit=x", "limit=99999999", "router=nobody"):
            found = await body(session, f"{url}/api/requests?{query}", 400)
            assert found["error"]["reason"] == "INVALID_ARGUMENT"
        assert (await body(session, f"{url}/nothing", 404))["error"]["reason"] == "NOT_FOUND"
        async with session.post(f"{url}/api/overview") as answer:
            assert answer.status == 405


async def events(answer: aiohttp.ClientResponse, count: int) -> list[tuple[str, Any]]:
    """The next events of a stream."""
    found: list[tuple[str, Any]] = []
    while len(found) < count:
        name = (await answer.content.readline()).decode().removeprefix("event: ").strip()
        data = (await answer.content.readline()).decode().removeprefix("data: ")
        await answer.content.readline()
        found.append((name, json.loads(data)))
    return found


async def test_a_stream_goes_on_until_either_side_ends_it(session: aiohttp.ClientSession) -> None:
    async with telling_cluster() as cluster:
        worker = await cluster.worker("p0", worker_pb2.ROLE_PREFILL)
        async with console(cluster, events=lambda: []) as url:
            async with session.get(f"{url}/api/stream") as answer:
                assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
                assert answer.headers["Cache-Control"] == "no-store"
                first = await events(answer, 5)
                assert [name for name, _ in first] == [
                    "overview",
                    "requests",
                    "operations",
                    "prefixes",
                    "events",
                ]
                worker.says.running = 5
                second = await events(answer, 3)
                assert second[0][1]["workers"][0]["counts"]["running"] == 5
            last = await session.get(f"{url}/api/stream")
            await events(last, 1)
        # The console has stopped, and the answer is whole.
        await last.read()


async def test_so_many_pages_and_no_more(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert STREAMS_MAX >= 8
    monkeypatch.setattr("twinpool.control.console.server.STREAMS_MAX", 1)
    async with telling_cluster() as cluster, console(cluster) as url:
        async with session.get(f"{url}/api/stream") as first:
            await events(first, 1)
            assert (await body(session, f"{url}/api/stream", 503))["error"]["reason"] == "RESOURCE_EXHAUSTED"
        # The place is free once the server has seen that the page is gone.

        async def served() -> bool:
            async with session.get(f"{url}/api/stream") as again:
                return again.status == 200

        await until_told(served)


async def test_pages_are_served_with_a_strict_policy(session: aiohttp.ClientSession) -> None:
    async with telling_cluster() as cluster, console(cluster) as url:
        for path in [*PAGES, "/api/overview", "/nothing"]:
            async with session.get(url + path) as answer:
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "script-src 'self'" in policy
                assert "unsafe" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert answer.headers["Cache-Control"] == "no-store"
                assert "Access-Control-Allow-Origin" not in answer.headers


def test_the_page_loads_nothing_from_elsewhere_and_makes_no_markup() -> None:
    assert sorted(path.name for path in STATIC.iterdir()) == sorted(name for name, _ in PAGES.values())
    for path in STATIC.iterdir():
        text = path.read_text()
        outside = set(re.findall(r"https?://[^\s\"']+", text)) - {"http://www.w3.org/2000/svg"}
        assert not outside, path
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            " style=",
            " onclick=",
            "fetch(",
        ):
            assert word not in text, f"{word} in {path.name}"


async def test_names_of_other_sites_are_refused(session: aiohttp.ClientSession) -> None:
    """A page of another site could else have its name point here, and read as if it were ours."""
    async with (
        telling_cluster(http_hosts="console.example, other.example") as cluster,
        console(cluster) as url,
    ):
        port = url.rpartition(":")[2]
        for host in (
            "127.0.0.1",
            f"127.0.0.1:{port}",
            f"localhost:{port}",
            "[::1]:80",
            f"console.example:{port}",
        ):
            await body(session, f"{url}/api/overview", headers={"Host": host})
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
        ):
            found = await body(session, f"{url}/api/overview", 403, headers={"Host": host})
            assert found["error"]["reason"] == "PERMISSION_DENIED"


async def test_who_looks_at_requests_is_written_down(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    async with telling_cluster() as cluster:
        config = cluster.config.model_copy(
            update={"audit": cluster.config.audit.model_copy(update={"file": str(path)})}
        )
        async with console(cluster, config) as url:
            await body(session, f"{url}/api/overview")
            await body(session, f"{url}/api/requests")
            async with session.get(f"{url}/api/stream") as answer:
                await events(answer, 5)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["method"] for line in lines] == ["GET /api/requests", "GET /api/stream"]
    assert lines[0]["who"]["peer"] == "127.0.0.1"


async def test_a_taken_port_is_told() -> None:
    async with telling_cluster() as cluster, console(cluster) as url:
        taken = cluster.config.control.model_copy(update={"http_port": int(url.rpartition(":")[2])})
        with pytest.raises(TwinpoolError) as caught:
            async with console(cluster, cluster.config.model_copy(update={"control": taken})):
                pass
    assert caught.value.reason == "PORT_UNAVAILABLE"


def client(tls: TlsConfig | None, ca: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    if tls is not None:
        context.load_cert_chain(tls.cert_file, tls.key_file)
    return context


async def test_with_tls_operators_alone_are_served(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    ca = str(tmp_path / "ca.pem")
    async with telling_cluster() as cluster:
        config = cluster.config.model_copy(update={"tls": pki.of("control")})
        async with console(cluster, config) as url:
            assert url.startswith("https://")
            for role, status in (("operator", 200), ("control", 200), ("worker", 403), ("router", 403)):
                await body(session, f"{url}/api/overview", status, ssl=client(pki.of(role), ca))
            await body(session, f"{url}/api/overview", 403, ssl=client(pki.tls("stranger.example"), ca))
            with pytest.raises(aiohttp.ClientError):
                await body(session, f"{url}/api/overview", ssl=client(None, ca))
    assert DOMAIN


async def test_a_page_that_goes_while_it_is_written_to_is_no_failure(session: aiohttp.ClientSession) -> None:
    async with telling_cluster() as cluster:
        worker = await cluster.worker("p0", worker_pb2.ROLE_PREFILL)
        async with console(cluster) as url:
            worker.gate.clear()
            asked = asyncio.ensure_future(session.get(f"{url}/api/stream"))
            await until(lambda: worker.asked)
            asked.cancel()
            worker.gate.set()
            await body(session, f"{url}/api/overview")
