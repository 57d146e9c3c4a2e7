# SPDX-License-Identifier: Apache-2.0
"""A worker's sockets and who should not be there: other roles, other names, too many, too large, too slow. Real TLS, real streams."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
import trustme
from worker_pair import stack

from tests.support.quiescence import assert_quiescent, inspect
from tests.support.waiting import until
from twinpool import rpc
from twinpool.config import RpcConfig, TlsConfig, TwinpoolConfig
from twinpool.errors import from_rpc_error
from twinpool.ids import WorkerKey, new_incarnation
from twinpool.transfer.base import MemoryRegion, PeerDescriptor
from twinpool.transfer.descriptor import to_message
from twinpool.v1 import handoff_pb2, handoff_pb2_grpc, worker_pb2_grpc
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker import handoff_server, session
from twinpool.worker.commands import worker_id
from twinpool.worker.serving import Serving

DOMAIN = "pool.twinpool.internal"


class Pki:
    """Certificates of one CA."""

    def __init__(self, directory: Path) -> None:
        self.ca, self.directory = trustme.CA(), directory
        self.ca.cert_pem.write_to_path(directory / "ca.pem")

    def of(self, *names: str) -> TlsConfig:
        leaf, stem = self.ca.issue_cert("127.0.0.1", *names), str(self.directory / names[-1])
        leaf.private_key_pem.write_to_path(f"{stem}.key")
        Path(f"{stem}.pem").write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        files = {
            "cert_file": f"{stem}.pem",
            "key_file": f"{stem}.key",
            "ca_file": str(self.directory / "ca.pem"),
        }
        return TlsConfig(**files, role_domain=DOMAIN)


class World:
    """A prefill worker that serves."""

    def __init__(self, tls: TlsConfig | None = None, max_message_bytes: int = 64 << 20) -> None:
        self.config = TwinpoolConfig.model_validate(
            {
                "kv": {"num_blocks": 24, "block_tokens": 16},
                "transfer": {"backend": "loopback"},
                "rpc": {"max_message_bytes": max_message_bytes},
            }
            | ({"tls": tls.model_dump()} if tls is not None else {})
        )
        self.key = WorkerKey("p-0", new_incarnation())
        self.serving = Serving(self.config, "prefill", self.key, replace(stack(24), fingerprint="unit"))
        self.server = rpc.Server(self.config.rpc, self.config.tls)
        self.target = f"127.0.0.1:{self.server.bind('127.0.0.1')}"

    async def __aenter__(self) -> "World":
        await self.serving.start(self.server)
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.serving.close_streams()
        await self.server.stop(0.5)
        await self.serving.stop()

    def channel(self, tls: TlsConfig | None = None) -> grpc.aio.Channel:
        return rpc.channel(self.target, RpcConfig(), tls, role="worker")

    def hello(self, router: str = "r", **change: object) -> pb.SessionRequest:
        worker = worker_id(self.key)
        for name, value in change.items():
            setattr(worker, name, value)
        return pb.SessionRequest(hello=pb.Hello(router=router, incarnation=1, worker=worker))

    def reader(self, name: str, incarnation: int = 5) -> handoff_pb2.ConnectRequest:
        own = self.serving._readers._own
        key = WorkerKey(name, incarnation)
        peer = PeerDescriptor(
            key, own.fingerprint, MemoryRegion(4096, own.block_bytes * 8), own.block_bytes, 8,
            MemoryRegion(8192, 64), str(key), b"metadata",
        )  # fmt: skip
        return handoff_pb2.ConnectRequest(reader=to_message(peer), owner=worker_id(self.key))


@asynccontextmanager
async def session_of(channel: grpc.aio.Channel, *first: pb.SessionRequest) -> AsyncIterator[object]:
    """An open stream with its first answer, or the error that it ended with."""
    call = worker_pb2_grpc.WorkerServiceStub(channel).Session()
    try:
        for message in first:
            await call.write(message)
        yield await call.read()
    except grpc.aio.AioRpcError as error:
        yield from_rpc_error(error)
    finally:
        call.cancel()


async def refusal(channel: grpc.aio.Channel, *first: pb.SessionRequest) -> tuple[str, str]:
    """Reason and text with which a stream is refused."""
    call = worker_pb2_grpc.WorkerServiceStub(channel).Session()
    with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):  # noqa: PT012 - either says that it is over
        for message in first:
            await call.write(message)
        while await call.read() is not grpc.aio.EOF:
            pass
        raise asyncio.InvalidStateError
    error = from_rpc_error(
        grpc.aio.AioRpcError(
            await call.code(),
            await call.initial_metadata(),
            await call.trailing_metadata(),
            await call.details(),
        )
    )
    return error.reason, error.message


async def test_only_routers_have_sessions_and_only_workers_read(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    async with World(pki.of(f"worker.{DOMAIN}", f"p-0.worker.{DOMAIN}")) as world:
        router, worker = pki.of(f"router.{DOMAIN}"), pki.of(f"d-0.worker.{DOMAIN}")
        async with world.channel(worker) as channel:
            assert (await refusal(channel, world.hello()))[0] == "PERMISSION_DENIED"
            stub = handoff_pb2_grpc.HandoffServiceStub(channel)
            await stub.Connect(world.reader("d-0"), timeout=60)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Connect(world.reader("d-1"), timeout=60)
            assert "its certificate names d-0" in from_rpc_error(caught.value).message
            # Nor may it speak as a reader that has connected by right.
            async with world.channel(pki.of(f"d-1.worker.{DOMAIN}")) as other:
                hello = handoff_pb2.ExchangeRequest(reader=pb.WorkerId(name="d-0", incarnation=5))
                call = handoff_pb2_grpc.HandoffServiceStub(other).Exchange(iter([hello]))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await anext(aiter(call))
                assert from_rpc_error(caught.value).reason == "PERMISSION_DENIED"
        async with world.channel(router) as channel:
            async with session_of(channel, world.hello()) as answer:
                assert isinstance(answer, pb.SessionResponse)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await handoff_pb2_grpc.HandoffServiceStub(channel).Connect(world.reader("d-0"), timeout=60)
            assert from_rpc_error(caught.value).reason == "PERMISSION_DENIED"


async def test_who_asks_for_another_worker_is_refused_over_tls_too(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    served, router = pki.of(f"worker.{DOMAIN}"), pki.of(f"router.{DOMAIN}")
    async with World(served) as world, world.channel(router) as channel:
        for change in ({"incarnation": world.key.incarnation ^ 1}, {"name": "p-1"}):
            assert (await refusal(channel, world.hello(**change)))[0] == "INCARNATION_MISMATCH"


async def test_so_many_routers_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "SESSIONS_MAX", 2)
    async with World() as world, world.channel() as channel:
        async with session_of(channel, world.hello("a")) as a, session_of(channel, world.hello("b")) as b:
            assert isinstance(a, pb.SessionResponse)
            assert isinstance(b, pb.SessionResponse)
            assert await refusal(channel, world.hello("c")) == (
                "QUEUE_FULL",
                "2 routers are served; the limit is so many",
            )
            # One that dials anew takes its own place.
            async with session_of(channel, world.hello("a")) as again:
                assert isinstance(again, pb.SessionResponse)
        await until(lambda: world.serving._sessions.sessions == 0)


async def test_so_many_readers_are_known_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_server, "READERS_MAX", 3)
    async with World() as world, world.channel() as channel:
        stub = handoff_pb2_grpc.HandoffServiceStub(channel)
        for number in range(10):
            await stub.Connect(world.reader(f"d-{number}"), timeout=60)
        assert list(world.serving._readers._checked) == ["d-7", "d-8", "d-9"]


async def test_a_message_over_the_limit_ends_its_stream_alone() -> None:
    async with World(max_message_bytes=8 << 20) as world, world.channel() as channel:
        async with session_of(channel, world.hello("good")) as answer:
            assert isinstance(answer, pb.SessionResponse)
            huge = pb.SessionRequest(
                prefill=pb.PrefillCommand(prompt=pb.PromptSpec(token_ids=bytes((8 << 20) + 100)))
            )
            reason, text = await refusal(channel, world.hello("bad"), huge)
            assert reason == "MESSAGE_TOO_LARGE"
            assert str(8 << 20) in text
            assert (await inspect(world.target)).sessions == 1
        await assert_quiescent([world.target])


async def test_a_stream_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "HELLO_SECONDS", 0.1)
    monkeypatch.setattr(handoff_server, "INTRODUCTION_SECONDS", 0.1)
    async with World() as world, world.channel() as channel:
        reason, text = await refusal(channel)
        assert (reason, "no Hello" in text) == ("INVALID_ARGUMENT", True)
        call = handoff_pb2_grpc.HandoffServiceStub(channel).Exchange()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert "no reader named" in from_rpc_error(caught.value).message
        assert world.serving._readers.streams == 0


async def test_a_connection_that_never_speaks_is_closed_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes one by one, or none: neither keeps a place for long."""
    monkeypatch.setattr(rpc.options, "HANDSHAKE_SECONDS", 1)
    async with World() as world:
        host, port = world.target.split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
        silent[0][1].write(b"PRI * HTTP/2.0\r\n")
        async with world.channel() as channel, session_of(channel, world.hello()) as answer:
            assert isinstance(answer, pb.SessionResponse)
        for reader, writer in silent:
            # What the server says of itself first is no answer; then the end.
            async with asyncio.timeout(60):
                while await reader.read(1000):
                    pass
            writer.close()


async def test_calls_beyond_the_limit_of_a_connection_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc.options, "MAX_STREAMS", 3)
    async with World() as world, world.channel() as channel:
        async with AsyncExitStack() as held:
            for name in ("a", "b", "c"):
                answer = await held.enter_async_context(session_of(channel, world.hello(name)))
                assert isinstance(answer, pb.SessionResponse)
            fourth = worker_pb2_grpc.WorkerServiceStub(channel).Session()
            waiting = asyncio.create_task(fourth.write(world.hello("d")))
            # Another connection is served meanwhile, and by then the fourth would have been.
            async with world.channel() as other, session_of(other, world.hello("e")) as answer:
                assert isinstance(answer, pb.SessionResponse)
            assert not any("d@" in made.router for made in world.serving._sessions._sessions.values())
        assert isinstance(await fourth.read(), pb.SessionResponse), "there is room now"
        await waiting
        fourth.cancel()
