# SPDX-License-Identifier: Apache-2.0
import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.tcp_proxy import TcpProxy
from tests.support.transports import each_rpc_transport  # noqa: F401
from twinpool import rpc
from twinpool.config import RpcConfig
from twinpool.errors import TwinpoolError, from_rpc_error

MiB = 1 << 20
CONFIG = RpcConfig()
SERVICE = "twinpool.test.EchoService"


class Echo:
    """Four arities; what it does is the first word of the request."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.started = asyncio.Event()

    async def unary(self, request: BytesValue, context: Any) -> BytesValue:
        return BytesValue(value=self._act(request))

    async def stream(self, request: BytesValue, context: Any) -> AsyncIterator[BytesValue]:
        try:
            yield BytesValue(value=b"first")
            self.started.set()
            if request.value == b"hang":
                await asyncio.Event().wait()
            yield BytesValue(value=self._act(request))
        finally:
            self.closed.set()

    async def written(self, request: BytesValue, context: Any) -> None:
        await context.write(BytesValue(value=b"first"))
        await context.write(BytesValue(value=self._act(request)))

    async def collect(self, requests: AsyncIterator[BytesValue], context: Any) -> BytesValue:
        async for request in requests:
            self._act(request)
        return BytesValue(value=b"done")

    async def chat(self, requests: AsyncIterator[BytesValue], context: Any) -> AsyncIterator[BytesValue]:
        async for request in requests:
            yield BytesValue(value=self._act(request))

    def _act(self, request: BytesValue) -> bytes:
        if request.value == b"refuse":
            raise TwinpoolError(
                "QUEUE_FULL", "the queue holds 3 of 3", retry_after=0.5, metadata={"limit": 3}
            )
        if request.value == b"crash":
            raise RuntimeError("the user's secret")
        return request.value


def register(servicer: Echo, server: Any) -> None:
    codec = {
        "request_deserializer": BytesValue.FromString,
        "response_serializer": BytesValue.SerializeToString,
    }
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(servicer.unary, **codec),
        "Stream": grpc.unary_stream_rpc_method_handler(servicer.stream, **codec),
        "Written": grpc.unary_stream_rpc_method_handler(servicer.written, **codec),
        "Collect": grpc.stream_unary_rpc_method_handler(servicer.collect, **codec),
        "Chat": grpc.stream_stream_rpc_method_handler(servicer.chat, **codec),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


class World:
    def __init__(self, config: RpcConfig = CONFIG, **options: Any) -> None:
        self.echo = Echo()
        self.server = rpc.Server(config, **options)
        self.server.add(SERVICE, register, self.echo)
        self.port = self.server.bind("127.0.0.1")
        self.target = f"127.0.0.1:{self.port}"
        self.channel = rpc.channel(self.target, config, **options)

    async def __aenter__(self) -> "World":
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.stop(0)

    def call(self, method: str) -> Any:
        kind = {"Unary": "unary_unary", "Collect": "stream_unary", "Chat": "stream_stream"}.get(
            method, "unary_stream"
        )
        return getattr(self.channel, kind)(
            f"/{SERVICE}/{method}",
            request_serializer=BytesValue.SerializeToString,
            response_deserializer=BytesValue.FromString,
        )


async def outcome(world: World, method: str, value: bytes) -> tuple[list[bytes], TwinpoolError | None]:
    request: Any = BytesValue(value=value)
    if method in ("Collect", "Chat"):
        request = iter([request])
    got: list[bytes] = []
    try:
        call = world.call(method)(request)
        if method in ("Unary", "Collect"):
            got.append((await call).value)
        else:
            async for answer in call:
                got.append(answer.value)
    except grpc.aio.AioRpcError as error:
        return got, from_rpc_error(error)
    return got, None


METHODS = ["Unary", "Stream", "Written", "Collect", "Chat"]


@pytest.mark.parametrize("method", METHODS)
async def test_calls_work_through_the_guard(method: str) -> None:
    async with World() as world:
        got, error = await outcome(world, method, b"ok")
        assert error is None
        assert got[-1] == (b"done" if method == "Collect" else b"ok")


@pytest.mark.parametrize("method", METHODS)
async def test_a_raised_error_arrives_with_details(method: str) -> None:
    async with World() as world:
        got, error = await outcome(world, method, b"refuse")
        assert error is not None
        assert (error.reason, error.code) == ("QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert (error.retry_after, error.metadata) == (0.5, {"limit": "3"})
        assert got == ([b"first"] if method in ("Stream", "Written") else [])


@pytest.mark.parametrize("method", METHODS)
async def test_a_crash_becomes_internal_without_its_text(
    method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with World() as world:
        _got, error = await outcome(world, method, b"crash")
        assert error is not None
        assert (error.reason, error.metadata) == ("INTERNAL", {"type": "RuntimeError"})
        assert "secret" not in error.message


async def test_a_cancelled_stream_closes_the_generator() -> None:
    async with World() as world:
        call = world.call("Stream")(BytesValue(value=b"hang"))
        assert (await call.read()).value == b"first"
        await asyncio.wait_for(world.echo.started.wait(), 60)
        call.cancel()
        await asyncio.wait_for(world.echo.closed.wait(), 60)


async def test_unknown_methods_are_unimplemented() -> None:
    async with World() as world:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.channel.unary_unary(f"/{SERVICE}/Nope")(b"")
        assert from_rpc_error(caught.value).reason == "UNIMPLEMENTED"


@pytest.mark.parametrize("size", [MiB, 4 * MiB - 1, 4 * MiB + 1, 16 * MiB])
async def test_messages_above_grpcs_default_pass_both_ways(size: int) -> None:
    async with World() as world:
        answer = await world.call("Unary")(BytesValue(value=bytes(size)))
        assert len(answer.value) == size


async def test_a_message_over_the_limit_is_refused_by_the_server() -> None:
    async with World(RpcConfig(max_message_bytes=MiB)) as world, rpc.channel(world.target, CONFIG) as channel:
        world.channel = channel
        _got, error = await outcome(world, "Unary", bytes(MiB + 100))
        assert error is not None
        assert error.reason == "MESSAGE_TOO_LARGE"
        assert str(MiB) in error.message


async def health(world: World, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(world.channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def test_health_follows_set_serving_for_process_and_service() -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with World() as world:
        assert [await health(world, name) for name in ("", SERVICE)] == [not_serving] * 2
        await world.server.set_serving(True)
        assert [await health(world, name) for name in ("", SERVICE)] == [serving] * 2
        await world.server.set_serving(False, SERVICE)
        assert [await health(world, name) for name in ("", SERVICE)] == [serving, not_serving]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(world, "no.such.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services() -> None:
    async with World() as world:
        stub = reflection_pb2_grpc.ServerReflectionStub(world.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [answer async for answer in stub.ServerReflectionInfo(iter([request]))]
        assert {service.name for service in answers[0].list_services_response.service} >= {
            SERVICE,
            "grpc.health.v1.Health",
        }


async def test_a_port_in_use_is_told_and_not_shared() -> None:
    async with World() as world:
        other = rpc.Server(CONFIG)
        with pytest.raises(TwinpoolError, match=str(world.port)) as caught:
            other.bind("127.0.0.1", world.port)
        assert caught.value.reason == "PORT_UNAVAILABLE"
        with pytest.raises(TwinpoolError):
            other.bind("192.0.2.1", 0)
        await other.stop(0)


async def test_wait_ready_ends_with_an_error_that_names_the_target() -> None:
    async with World() as world:
        await rpc.wait_ready(world.channel, world.target, 60)
        port = world.port
    async with rpc.channel(f"127.0.0.1:{port}", CONFIG) as channel:
        with pytest.raises(TwinpoolError, match=f"127.0.0.1:{port} within 0.2 s") as caught:
            await rpc.wait_ready(channel, f"127.0.0.1:{port}", 0.2)
        assert caught.value.reason == "SERVER_UNREACHABLE"


async def test_a_channel_finds_a_restarted_server_soon() -> None:
    async with World() as first:
        await first.call("Unary")(BytesValue(value=b"x"))
        await first.server.stop(0)
        with pytest.raises(grpc.aio.AioRpcError):
            await first.call("Unary")(BytesValue(value=b"x"))
        # Long enough down for the back-off to have grown to its limit.
        await asyncio.sleep(1.0)
        server = rpc.Server(CONFIG)
        server.add(SERVICE, register, first.echo)
        assert server.bind("127.0.0.1", first.port) == first.port
        await server.start()
        # The pause between attempts is a second at most; it would grow to two minutes if gRPC had its way.
        await rpc.wait_ready(first.channel, first.target, 60)
        await server.stop(0)


async def test_stop_lets_running_calls_end_within_the_grace() -> None:
    async with World() as world:
        gate = asyncio.Event()

        async def requests() -> AsyncIterator[BytesValue]:
            yield BytesValue(value=b"one")
            await gate.wait()
            yield BytesValue(value=b"two")

        call = world.call("Chat")(requests())
        assert (await call.read()).value == b"one"
        stopping = asyncio.create_task(world.server.stop(60))
        gate.set()
        assert (await call.read()).value == b"two"
        await asyncio.wait_for(stopping, 60)


async def test_stop_cancels_what_outlasts_the_grace() -> None:
    async with World() as world:
        call = world.call("Stream")(BytesValue(value=b"hang"))
        assert (await call.read()).value == b"first"
        await asyncio.wait_for(world.server.stop(0.2), 60)
        await asyncio.wait_for(world.echo.closed.wait(), 60)


async def test_a_peer_that_hangs_is_noticed_by_keep_alive() -> None:
    config = RpcConfig(keepalive_seconds=1, keepalive_timeout_seconds=0.5)
    async with World(config) as world:
        proxy = TcpProxy(world.target)
        async with rpc.channel(proxy.endpoint, config) as world.channel:
            call = world.call("Stream")(BytesValue(value=b"hang"))
            assert (await call.read()).value == b"first"
            proxy.stall()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(call.read(), 60)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        proxy.close()


async def test_silence_is_not_taken_for_a_hang() -> None:
    """Four pings and no data: neither side takes them for an attack."""
    config = RpcConfig(keepalive_seconds=1, keepalive_timeout_seconds=20)
    async with World(config) as world:
        call = world.call("Stream")(BytesValue(value=b"hang"))
        assert (await call.read()).value == b"first"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(call.read())), 4)
        assert not call.done()
        call.cancel()


def test_options_state_what_must_not_be_a_default() -> None:
    server = dict(rpc.server_options(CONFIG))
    client = dict(rpc.client_options(CONFIG, max_message_bytes=5, server_name="w"))
    assert server["grpc.so_reuseport"] == 0
    assert dict(rpc.server_options(CONFIG, reuse_port=True))["grpc.so_reuseport"] == 1
    assert server["grpc.max_receive_message_length"] == CONFIG.max_message_bytes
    assert client["grpc.max_send_message_length"] == 5
    assert client["grpc.enable_http_proxy"] == 0
    assert client["grpc.enable_retries"] == 0
    assert client["grpc.ssl_target_name_override"] == "w"
    # A server that tolerates fewer pings than its clients send would close their connections.
    assert int(server["grpc.http2.min_ping_interval_without_data_ms"]) < int(client["grpc.keepalive_time_ms"])


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:5"), ("::1", "[::1]:5"), ("[::1]", "[::1]:5"), ("h.x", "h.x:5")],
)
def test_join_address_brackets_ipv6(host: str, address: str) -> None:
    assert rpc.join_address(host, 5) == address
