# SPDX-License-Identifier: Apache-2.0
"""One client must not silence a server for all others, whatever it sends, before it has shown who it is."""

import asyncio
import socket
import struct
import sys
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.transports import TRANSPORTS
from twinpool import rpc
from twinpool.config import RpcConfig
from twinpool.rpc.transport import CORE_MIN

FILES_MAX = 128
FLOOD = 2 * FILES_MAX
HEADER_BYTES = 24_000_000
FRAME_BYTES = 16_000
_SERVER = f"""
import asyncio, resource, sys
from twinpool import rpc
from twinpool.config import RpcConfig

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES_MAX},) * 2)
    server = rpc.Server(RpcConfig(), native=sys.argv[1] == "native")
    port = server.bind("127.0.0.1")
    await server.start()
    print(port, flush=True)
    await server.wait()

asyncio.run(main())
"""


@pytest.fixture(params=TRANSPORTS)
async def port(request: pytest.FixtureRequest) -> AsyncIterator[int]:
    """Of a server in a process of its own, which may open FILES_MAX files."""
    if request.param == "native":
        transport = pytest.importorskip("twinpool._transport", reason="built without gRPC's C headers")
        if int(transport.core_version().partition(".")[0]) < CORE_MIN:
            pytest.skip("this gRPC can be silenced, and is taken only where it is asked for")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SERVER, request.param, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    yield int(await process.stdout.readline())
    process.kill()
    await process.wait()


async def answers(port: int, seconds: float = 30) -> bool:
    """Whether a client that comes now is served within so many seconds."""
    async with rpc.channel(f"127.0.0.1:{port}", RpcConfig()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds, wait_for_ready=True)
        except grpc.aio.AioRpcError:
            return False
    return True


async def test_more_connections_than_files_do_not_end_accepting(port: int) -> None:
    held = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(FLOOD)]
    assert not await answers(port, 2), "the flood holds all files"
    for each in held:
        each.close()
    assert await answers(port)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


async def test_a_header_without_end_leaves_other_clients_served(port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
    # A literal header "x-y" whose value is said to be 1 GiB long, in HPACK's integers.
    writer.write(_frame(1, 0, 1, b"\0\3x-y\x7f\x81\xff\xff\xff\3"))

    async def flood() -> None:
        for _ in range(HEADER_BYTES // FRAME_BYTES):
            writer.write(_frame(9, 0, 1, b"a" * FRAME_BYTES))
            await writer.drain()

    flooding = asyncio.create_task(flood())
    await asyncio.wait({flooding}, timeout=1)
    assert await answers(port)
    flooding.cancel()
    await asyncio.gather(flooding, return_exceptions=True)
    writer.close()
