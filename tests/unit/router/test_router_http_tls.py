# SPDX-License-Identifier: Apache-2.0
"""The HTTP API over mutual TLS: who may connect, who a caller is, and certificates that are renewed."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import trustme

from tests.support.waiting import until
from tests.unit.base.test_base_tls import Pki
from twinpool.config import TwinpoolConfig
from twinpool.errors import ConfigError
from twinpool.router.call import Call
from twinpool.router.openai.server import HttpServer
from twinpool.rpc import Caller
from twinpool.text import Tokenizer
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb


class Callers:
    """A router that only remembers who called."""

    def __init__(self) -> None:
        self.seen: list[Caller] = []

    async def chat(self, request: chat.ChatRequest, call: Call[chat.ChatResponse]) -> None:
        self.seen.append(call.caller)

    async def generate(self, request: pb.GenerateRequest, call: Call[pb.GenerateResponse]) -> None:
        self.seen.append(call.caller)

    def models(self, caller: Caller) -> list[pb.Model]:
        self.seen.append(caller)
        return []

    def tokenizer(self, model: str) -> Tokenizer:
        raise AssertionError("nobody asks for text here")

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return True


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path / "server", trustme.CA())


@pytest.fixture
async def served(pki: Pki) -> AsyncIterator[tuple[HttpServer, Callers, int]]:
    callers = Callers()
    server = HttpServer(TwinpoolConfig(tls=pki.tls), callers)
    port = await server.start("127.0.0.1", 0)
    yield server, callers, port
    await server.stop()


def client(pki: Pki, name: str, ca: trustme.CA | None = None) -> ssl.SSLContext:
    """A client that trusts the server, with a certificate of its own."""
    context = ssl.create_default_context(cafile=pki.tls.ca_file)
    (ca or pki.ca).issue_cert(f"{name}.example", common_name=name).configure_cert(context)
    return context


async def test_a_client_is_known_by_its_certificate(
    served: tuple[HttpServer, Callers, int], pki: Pki
) -> None:
    _, callers, port = served
    connector = aiohttp.TCPConnector(ssl=client(pki, "agents"))
    async with (
        aiohttp.ClientSession(f"https://127.0.0.1:{port}", connector=connector) as session,
        session.get("/v1/models", headers={"Authorization": "Bearer tp-x"}) as answer,
    ):
        assert answer.status == 200
    assert callers.seen == [Caller("tp-x", ("agents", "agents.example"))]


async def test_nobody_else_may_connect(served: tuple[HttpServer, Callers, int], pki: Pki) -> None:
    _, callers, port = served
    stranger = client(pki, "agents", trustme.CA())
    nobody = ssl.create_default_context(cafile=pki.tls.ca_file)
    for context in (stranger, nobody):
        connector = aiohttp.TCPConnector(ssl=context)
        async with aiohttp.ClientSession(f"https://127.0.0.1:{port}", connector=connector) as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get("/v1/models")
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get("/v1/models")
    assert callers.seen == []


async def test_a_renewed_certificate_is_used_for_new_connections(
    served: tuple[HttpServer, Callers, int], pki: Pki
) -> None:
    server, _, port = served

    async def shown() -> bytes:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client(pki, "agents"))
        certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return certificate

    first = await shown()
    server.refresh_tls()
    assert await shown() == first
    pki.issue("two")
    server.refresh_tls()
    second = await shown()
    assert second != first
    pki.write(None, b"half")
    server.refresh_tls()
    assert await shown() == second, "a renewal that is half done changes nothing"


async def test_renewals_under_load_fail_no_request_and_end_no_connection(
    served: tuple[HttpServer, Callers, int], pki: Pki
) -> None:
    server, callers, port = served
    base, over, counts = f"https://127.0.0.1:{port}", False, [0, 0]

    async def ask(kind: int, keep: bool) -> None:
        connector = aiohttp.TCPConnector(ssl=client(pki, "agents"), limit=1, force_close=not keep)
        made = 0
        trace = aiohttp.TraceConfig()

        async def connected(*_: object) -> None:
            nonlocal made
            made += 1

        trace.on_connection_create_end.append(connected)
        async with aiohttp.ClientSession(base, connector=connector, trace_configs=[trace]) as session:
            while not over:
                async with session.get("/v1/models") as answer:
                    assert answer.status == 200
                counts[kind] += 1
        assert (made == 1) is keep, "a connection from before the first renewal goes on"

    load = [asyncio.create_task(ask(0, True)), asyncio.create_task(ask(1, False))]
    for name in ("two", "three"):
        before = counts[:]
        pki.issue(name)
        server.refresh_tls()
        await until(
            lambda before=before: (  # type: ignore[misc]
                all(now >= then + 10 for now, then in zip(counts, before, strict=True))
                or any(task.done() for task in load)
            )
        )
    over = True
    await asyncio.gather(*load)
    assert len(callers.seen) == sum(counts)


def test_files_that_do_not_fit_are_an_error_at_the_start(pki: Pki) -> None:
    pki.write(pki.pair()[0], trustme.CA().issue_cert("x.example").private_key_pem.bytes())
    with pytest.raises(ConfigError, match="do not form a pair"):
        HttpServer(TwinpoolConfig(tls=pki.tls), Callers())
