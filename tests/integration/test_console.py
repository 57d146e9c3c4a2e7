# SPDX-License-Identifier: Apache-2.0
"""A live cluster as operators see it: over HTTP, in a terminal, in a browser and through Prometheus."""

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.browser import Page, browser, find_browser
from tests.support.cluster import Cluster, running_cluster
from tests.support.promql import KNOWN, check
from tests.support.terminal import Terminal
from tests.support.waiting import until, until_told
from twinpool.metrics.page import known, shown_name
from twinpool.v1 import inference_pb2 as pb

pytestmark = pytest.mark.integration
needs_browser = pytest.mark.skipif(not find_browser(), reason="there is no Chromium on this machine")

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "twinpool.control.cli.main"]
NASTY = "<script>alert(1)</script>"
PROMPT = list(range(4, 68))


@pytest.fixture(scope="module")
def cluster(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker a role, two routers, and a console page."""
    settings = {"control.http_port": 0, "pools.routers": 2}
    with running_cluster(tmp_path_factory.mktemp("console"), checkpoints["deepseek_v2"], settings) as made:
        yield made


def request(name: str, tokens: list[int], max_tokens: int = 8, tenant: str = "") -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=name,
        tenant=tenant,
        token_ids=pb.TokenIds(ids=tokens),
        stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True),
    )


async def served(cluster: Cluster, name: str, router: int = 0, tenant: str = "") -> None:
    async with cluster.client(router) as client:
        await client.complete(request(name, PROMPT, tenant=tenant))


@asynccontextmanager
async def running(cluster: Cluster, name: str) -> AsyncIterator[None]:
    """Requests that run meanwhile, one after another."""

    async def ask() -> None:
        async with cluster.client() as client:
            for number in itertools.count():
                await client.complete(request(f"{name}-{number}", PROMPT, max_tokens=700))

    asking = asyncio.ensure_future(ask())
    yield
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def get(cluster: Cluster, path: str) -> Any:
    def read() -> Any:
        with urllib.request.urlopen(cluster.state.console_url.rstrip("/") + path, timeout=60) as answer:
            return json.load(answer)

    return await asyncio.to_thread(read)


def environment(cluster: Cluster) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TWINPOOL_")}
    return kept | {"TWINPOOL_HOME": str(cluster.home)}


async def cli(cluster: Cluster, *arguments: str) -> str:
    def run() -> str:
        made = subprocess.run(
            [*COMMAND, *arguments, "--cluster", "test"],
            env=environment(cluster),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert made.returncode == 0, made.stderr
        return made.stdout

    return await asyncio.to_thread(run)


async def test_the_overview_counts_what_happened(cluster: Cluster) -> None:
    await served(cluster, "counted-0", router=0)
    await served(cluster, "counted-1", router=1)
    found = await get(cluster, "/api/overview")
    assert {one["record"]["role"] for one in found["workers"]} == {"prefill", "decode"}
    assert all(one["reachable"] and one["record"]["state"] == "ready" for one in found["workers"])
    (pool,) = found["pools"]
    for role in pool["roles"]:
        assert (role["desired"], role["registered"], role["ready"], role["unreachable"]) == (1, 1, 1, 0)
    prefill, decode = (
        next(one for one in found["workers"] if one["record"]["role"] == role)
        for role in ("prefill", "decode")
    )
    assert prefill["counts"]["prompt_tokens"] >= len(PROMPT)
    # A router that already knows of the decode worker's copy has that one read the prompt.
    hits = prefill["counts"]["hit_tokens"] + decode["counts"]["hit_tokens"]
    assert hits > 0, "the second prompt is the first one's"
    assert decode["counts"]["generation_tokens"] >= 14
    assert decode["counts"]["busy"] > 0
    counts = decode["counts"]
    assert counts["free_blocks"] + counts["cached_blocks"] + counts["held_blocks"] <= counts["total_blocks"]
    assert len(found["routers"]) == 2
    assert found["time_to_first_token"]["count"] >= 2
    assert (
        sum(one["telemetry"]["time_to_first_token_summary"]["count"] for one in found["routers"])
        == found["time_to_first_token"]["count"]
    )
    prefixes = (await get(cluster, "/api/prefixes"))["prefixes"]
    assert prefixes[0]["uses"] >= 2
    assert {holder["role"] for holder in prefixes[0]["holders"]} == {"prefill", "decode"}


async def test_requests_are_listed_while_they_run_and_afterwards(cluster: Cluster) -> None:
    await served(cluster, "ended", router=1, tenant=NASTY)
    async with running(cluster, "runs"):

        async def decoding() -> bool:
            live = json.loads(await cli(cluster, "get", "requests", "--state", "live", "-o", "json"))
            assert all(one["live"] and one["client_id"].startswith("runs-") for one in live)
            return any(
                (one["state"], one["hop"]) == ("Decoding", "decode")
                and one["prefill"] == "default-prefill-0"
                and one["cached"] is not None
                for one in live
            )

        await until_told(decoding)
    rows = json.loads(await cli(cluster, "get", "requests", "-o", "json"))
    by_name = {one["client_id"]: one for one in rows}
    assert by_name["ended"]["output"] == 8
    assert by_name["ended"]["tenant"].startswith("sha256:"), "a client's own words are not shown"
    assert [hop["name"] for hop in by_name["ended"]["hops"]][-3:] == ["prefill", "handoff", "decode"]
    table = await cli(cluster, "get", "requests", "--router", "router-1", "--limit", "1")
    assert "ended" in table
    assert "runs-" not in table
    text = json.dumps(rows) + json.dumps(await get(cluster, "/api/requests"))
    assert NASTY not in text
    assert "token_ids" not in text


async def test_top_prints_once_without_a_terminal(cluster: Cluster) -> None:
    table = await cli(cluster, "top")
    for part in ("PREFILL" if "PREFILL" in table else "prefill", "decode-0", "router-1", "TTFT ms"):
        assert part in table
    found = json.loads(await cli(cluster, "top", "-o", "json", "--pool", "default"))
    assert [one["pool"] for one in found["pools"]] == ["default"]
    picture = cluster.home / "top.svg"
    await cli(cluster, "top", "--once", "--svg", str(picture))
    text = picture.read_text()
    assert "default-decode-0" in text.replace("&#160;", " ")
    assert "url(" not in text.replace("url(#", "(#")


async def test_top_in_a_terminal(cluster: Cluster) -> None:
    terminal = Terminal([*COMMAND, "top", "--cluster", "test", "--interval", "0.2"], environment(cluster))
    try:
        await until(lambda: "decode-0" in terminal.text and "router-1" in terminal.text)
        assert terminal.screen.alternate
        assert not terminal.restored(), "keys come one by one"
        first = next(line for line in terminal.text.splitlines() if line.startswith("▶"))
        terminal.press("\x1b[B")
        await until(
            lambda: any(
                line.startswith("▶") and line[2:20] != first[2:20] for line in terminal.text.splitlines()
            )
        )
        terminal.press("s")
        await until(lambda: "POOL▲" in terminal.text)
        terminal.press("d")
        await until(lambda: "[y/n]" in terminal.text)
        terminal.press("n")
        await until(lambda: "nothing was done" in terminal.text)
        terminal.resize(90, 24)
        os.kill(terminal.process.pid, 28)
        await until(lambda: "▶" in terminal.text and "PINS" not in terminal.text)
        assert max(map(len, terminal.text.splitlines())) <= 90
        terminal.press("q")
        await until(lambda: terminal.process.poll() is not None)
        assert terminal.process.returncode == 0
        assert terminal.restored()
        assert not terminal.screen.alternate
    finally:
        terminal.close()


def endpoints(found: Any) -> dict[str, str]:
    """Where each process of a cluster has its metrics."""
    routers = {one["record"]["name"]: one["record"]["metrics_endpoint"] for one in found["routers"]}
    return routers | {
        one["record"]["worker"]["name"]: one["record"]["metrics_endpoint"] for one in found["workers"]
    }


async def scraped(cluster: Cluster) -> dict[str, dict[str, set[str]]]:
    """Labels of each series by its name, by process. A series without a sample yet has those of the code."""

    def read(endpoint: str) -> dict[str, set[str]]:
        with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        found: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(text):
            ending = {"counter": "_total", "info": "_info"}.get(family.type, "")
            names = (
                [f"{family.name}{end}" for end in ("_bucket", "_sum", "_count")]
                if family.type == "histogram"
                else [family.name + ending]
            )
            for name in names:
                found[name] = set(KNOWN.get(name, set()))
            for sample in family.samples:
                found[sample.name] = set(sample.labels)
        return found

    places = endpoints(await get(cluster, "/api/overview")) | {"control": cluster.state.metrics_endpoint}
    return {name: await asyncio.to_thread(read, at) for name, at in places.items()}


def own(names: set[str]) -> set[str]:
    """Ours, without the times at which counters were made."""
    return {name for name in names if name.startswith("twinpool_") and not name.endswith("_created")}


async def test_every_process_shows_the_documented_metrics_and_no_other(cluster: Cluster) -> None:
    await served(cluster, "scraped")
    documented: set[str] = set()
    for metric in known():
        name = shown_name(metric)
        histogram = next(iter(metric.describe())).type == "histogram"
        documented |= {f"{name}{end}" for end in ("_bucket", "_sum", "_count")} if histogram else {name}
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert all(f"`{shown_name(metric)}`" in page for metric in known())
    processes = await scraped(cluster)
    assert len(processes) == 5
    for process, series in processes.items():
        assert own(set(series)) == documented, process
    roles = [(series["twinpool_worker_utilization_ratio"], process) for process, series in processes.items()]
    assert {process for labels, process in roles if labels == {"role"}} >= {
        "default-prefill-0",
        "default-decode-0",
    }


async def test_dashboards_and_alerts_ask_for_what_is_scraped(cluster: Cluster) -> None:
    series: dict[str, set[str]] = {"up": set()}
    for found in (await scraped(cluster)).values():
        for name, labels in found.items():
            series[name] = series.get(name, set()) | labels
    asked = [
        target["expr"].replace("$__rate_interval", "5m")
        for path in sorted((ROOT / "deploy" / "grafana").glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    ]
    assert len(asked) >= 30
    rules = (ROOT / "deploy" / "helm" / "twinpool" / "templates" / "monitoring.yaml").read_text()
    rules = rules.replace("{{- $of -}}", 'namespace="n",service=~"s"')
    alerts = [
        re.sub(r"\{\{.*?\}\}", "1", line) for line in re.findall(r"^ *expr: (.*)$", rules, re.MULTILINE)
    ]
    assert len(alerts) >= 12
    for expression in [*asked, *alerts]:
        check(expression, series)
    with pytest.raises(AssertionError):
        check('twinpool_router_nosuch{namespace="n"}', series)


@needs_browser
async def test_the_page_in_a_browser(cluster: Cluster, tmp_path: Path) -> None:
    await served(cluster, "seen")
    async with browser(tmp_path / "profile") as page:
        await page.open(cluster.state.console_url)
        await page.until("document.querySelectorAll('#worker-table tbody tr').length === 2")
        await page.until("document.querySelector('#link').dataset.state === 'live'")
        await page.until("document.querySelector('#request-table').innerText.includes('seen')")
        await page.until("document.querySelectorAll('#prefix-table tbody .bar').length > 0")
        assert "default-decode-0" in await page.text("#worker-table")
        assert "router-1" in await page.text("#router-table")
        assert "nothing was asked" in (await page.text("#operation-table")).lower()
        ways = await page.run(
            "[...document.querySelectorAll('.way svg')].map((way) => way.getAttribute('aria-label'))"
        )
        assert any("prefill" in way and "decode" in way for way in ways)
        await keyboard(page)
        async with running(cluster, "shown"):
            await page.until("document.querySelector('#request-table').innerText.includes('Decoding')")
            await page.run(
                "document.querySelector('#show').value = 'live';"
                "document.querySelector('#show').dispatchEvent(new Event('change'))"
            )
            assert "seen" not in await page.text("#request-table")
        await page.until("document.querySelector('#request-table').innerText.includes('No request fits')")
        # Other sites, markup made of text, scripts in the page: the policy and the browser would have complained.
        assert page.complaints == []
        assert all(url.startswith(cluster.state.console_url) for url in page.requested), page.requested


async def keyboard(page: Page) -> None:
    """Every control is reached by Tab; Enter on a title sorts, and the title stays the one that has the focus."""
    reached = []
    for _ in range(30):
        await page.press("Tab")
        reached.append(
            await page.run("(document.activeElement.innerText || document.activeElement.id).trim()")
        )
        if reached[-1] == "running":
            break
    assert reached[0] == "Skip to the content"
    assert "Requests" in reached
    await page.press("Enter")
    await page.until("document.querySelector('#worker-table th[aria-sort]').innerText.includes('running')")
    heard = await page.run("document.querySelector('#link').textContent")
    await page.until(f"document.querySelector('#link').textContent !== {heard!r}")
    assert await page.run("document.activeElement.innerText.trim()") == "running"


async def test_top_acts_on_the_chosen_worker(cluster: Cluster) -> None:
    """The last test of this cluster: it replaces a worker."""
    terminal = Terminal([*COMMAND, "top", "--cluster", "test", "--interval", "0.2"], environment(cluster))
    try:
        await until(lambda: "▶ default-decode-0" in terminal.text)
        terminal.press("R")
        await until(lambda: "Restart default-decode-0? [y/n]" in terminal.text)
        terminal.press("y")
        await until(lambda: "default-decode-0: default-decode-0-" in terminal.text)
        await until(lambda: "succeeded" in terminal.text)
    finally:
        terminal.close()
    (operation,) = (await get(cluster, "/api/operations"))["operations"]
    assert (operation["kind"], operation["state"]) == ("restart", "succeeded")

    async def ready() -> bool:
        found = await get(cluster, "/api/overview")
        return (
            all(one["reachable"] and one["record"]["state"] == "ready" for one in found["workers"])
            and len(found["workers"]) == 2
        )

    await until_told(ready)
