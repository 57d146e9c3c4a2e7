# SPDX-License-Identifier: Apache-2.0
"""The console page in a browser, over made-up clusters: nobody there yet, words that look like markup, a connection that goes."""

from pathlib import Path

import pytest

from tests.support.browser import Page, browser, find_browser
from tests.support.telling import Cluster, telling_cluster
from tests.unit.control.test_control_console import NASTY
from twinpool.config import TwinpoolConfig
from twinpool.control.console.server import Console
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import telemetry_pb2, worker_pb2

pytestmark = pytest.mark.skipif(not find_browser(), reason="there is no Chromium on this machine")

LIVE = "document.querySelector('#link').dataset.state === 'live'"


async def console(cluster: Cluster, port: int = 0) -> Console:
    control = cluster.config.control.model_copy(update={"http_port": port})
    config: TwinpoolConfig = cluster.config.model_copy(update={"control": control})
    made = Console(config, cluster.collector, lambda: cluster.operations)
    await made.start()
    return made


async def emptiness(page: Page) -> None:
    for table, said in (
        ("pool", "there is no pool yet"),
        ("worker", "No worker is registered"),
        ("router", "No router is registered"),
        ("request", "No request has come yet"),
        ("prefix", "No prompt with a full block"),
        ("operation", "Nothing was asked for yet"),
    ):
        await page.until(f"document.querySelector('#{table}-table').innerText.includes({said!r})")


async def test_an_empty_cluster_says_so_and_fills(tmp_path: Path) -> None:
    async with telling_cluster() as cluster, browser(tmp_path / "profile") as page:
        served = await console(cluster)
        await page.open(served.url)
        await emptiness(page)
        worker = await cluster.worker("p0", worker_pb2.ROLE_PREFILL)
        await page.until("document.querySelector('#worker-table').innerText.includes('p0')")
        worker.says.running = 17
        await page.until("document.querySelector('#worker-table').innerText.includes('17')")
        await cluster.servers["p0"].stop(0)
        await page.until("document.querySelector('#worker-table').innerText.includes('unreachable')")
        assert "17" in await page.text("#worker-table"), "what it said last"
        assert page.complaints == []
        await served.stop()


async def test_what_others_wrote_is_shown_as_text(tmp_path: Path) -> None:
    async with telling_cluster() as cluster, browser(tmp_path / "profile") as page:
        router = await cluster.router("r0")
        one = telemetry_pb2.RequestSummary(
            client_id=NASTY, state=NASTY, tenant=NASTY, model=NASTY, cause=NASTY
        )
        one.hops.add(name='prefill"><script>x()</script>')
        router.requests = [one]
        router.prefixes = [telemetry_pb2.HotPrefix(block_hash=bytes(16), blocks=1, model=NASTY)]
        cluster.operations = [pb.Operation(id=NASTY, error=NASTY, pool=NASTY)]
        served = await console(cluster)
        await page.open(served.url)
        for table in ("request", "prefix", "operation"):
            await page.until(f"document.querySelector('#{table}-table').innerText.includes({NASTY!r})")
        assert await page.run("document.querySelectorAll('img, script:not([src])').length") == 0
        assert page.complaints == []
        await served.stop()


async def test_a_lost_connection_is_seen_and_comes_back(tmp_path: Path) -> None:
    async with telling_cluster() as cluster, browser(tmp_path / "profile") as page:
        await cluster.worker("p0", worker_pb2.ROLE_PREFILL)
        served = await console(cluster)
        await page.open(served.url)
        await page.until(LIVE)
        await page.until("document.querySelector('#main').dataset.stale === 'false'")
        await served.stop()
        await page.until("document.querySelector('#link').dataset.state === 'lost'")
        assert await page.run("document.querySelector('#main').dataset.stale") == "true"
        assert "trying again" in await page.text("#link")
        assert "p0" in await page.text("#worker-table"), "the last view stays"
        again = await console(cluster, int(served.url.rstrip("/").rpartition(":")[2]))
        await page.until(LIVE)
        await again.stop()


@pytest.mark.parametrize("width", [360, 1360])
async def test_the_page_is_never_wider_than_the_screen(tmp_path: Path, width: int) -> None:
    async with telling_cluster() as cluster, browser(tmp_path / "profile") as page:
        for at in range(3):
            await cluster.worker(f"a-worker-with-a-long-name-{at}", worker_pb2.ROLE_DECODE)
        served = await console(cluster)
        for dark in (False, True):
            await page.open(served.url)
            await page.picture(tmp_path / "page.png", width=width, height=900, dark=dark)
            await page.until("document.querySelectorAll('#worker-table tbody tr').length === 3")
            assert await page.run("document.documentElement.scrollWidth") <= width
        await served.stop()
