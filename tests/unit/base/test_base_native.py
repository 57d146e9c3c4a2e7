# SPDX-License-Identifier: Apache-2.0
"""gRPC's C core under the adapter: what the tests of servers do not ask of every transport."""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import until
from twinpool import rpc
from twinpool.config import RpcConfig
from twinpool.errors import ConfigError
from twinpool.rpc.guard import ErrorInterceptor
from twinpool.rpc.native.inflate import BrokenError, TooLargeError, inflated

pytest.importorskip("twinpool._transport", reason="built without gRPC's C headers")

MiB = 1 << 20
CONFIG = RpcConfig()
SERVICE = "twinpool.test.Bytes"
Handler = Callable[[Any, Any], Any]


class World:
    """A server of one handler, and a channel of gRPC for Python to it."""

    def __init__(self, kind: str, handler: Handler, *, native: bool = True) -> None:
        self.server = rpc.Server(CONFIG, native=native)
        made = getattr(grpc, f"{kind}_rpc_method_handler")(handler)
        table = grpc.method_handlers_generic_handler(SERVICE, {"Do": made})
        self.server.add(SERVICE, lambda _, server: server.add_generic_rpc_handlers((table,)), None)
        self.target = f"127.0.0.1:{self.server.bind('127.0.0.1')}"
        self.channel = rpc.channel(self.target, CONFIG)
        self.call = getattr(self.channel, kind)(f"/{SERVICE}/Do")

    async def __aenter__(self) -> "World":
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.stop(0)


class Waiting:
    """A handler that waits until it is cancelled."""

    def __init__(self) -> None:
        self.started, self.ended = asyncio.Event(), asyncio.Event()
        self.left: float | None = None
        self.over: list[bool] = []

    async def __call__(self, request: bytes, context: Any) -> None:
        self.left = context.time_remaining()
        context.add_done_callback(lambda done: self.over.append(done.cancelled()))
        await context.write(b"first")
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


async def leave_by_cancel(world: World, waiting: Waiting) -> None:
    call = world.call(b"")
    await waiting.started.wait()
    call.cancel()


async def leave_by_deadline(world: World, waiting: Waiting) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        [message async for message in world.call(b"", timeout=0.5)]
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert waiting.left is not None
    # gRPC rounds what it sends, and what it gets.
    assert 0 < waiting.left <= 0.6


async def leave_by_disconnect(world: World, waiting: Waiting) -> None:
    proxy = TcpProxy(world.target)
    async with rpc.channel(proxy.endpoint, CONFIG) as channel:
        call = channel.unary_stream(f"/{SERVICE}/Do")(b"")
        await waiting.started.wait()
        proxy.cut()
        with pytest.raises(grpc.aio.AioRpcError):
            [message async for message in call]
    await asyncio.to_thread(proxy.close)


@pytest.mark.parametrize("leave", [leave_by_cancel, leave_by_deadline, leave_by_disconnect])
async def test_a_client_that_leaves_ends_its_handler(
    leave: Callable[[World, Waiting], Awaitable[None]],
) -> None:
    waiting = Waiting()
    async with World("unary_stream", waiting) as world:
        await leave(world, waiting)
        await waiting.ended.wait()
        await until(lambda: waiting.over == [True])


async def test_a_call_without_deadline_has_none() -> None:
    waiting = Waiting()
    async with World("unary_stream", waiting) as world:
        await leave_by_cancel(world, waiting)
        await waiting.ended.wait()
    assert waiting.left is None


async def test_large_messages_pass_both_ways_whole() -> None:
    async def echo(request: bytes, context: Any) -> bytes:
        return request[::-1]

    async with World("unary_unary", echo) as world:
        sent = bytes(range(256)) * (8 * MiB // 256)
        assert await world.call(sent) == sent[::-1]


async def test_a_client_that_does_not_read_stops_the_writes_and_gets_all_in_the_end() -> None:
    count, size, written = 400, 16 * 1024, 0

    async def flood(request: bytes, context: Any) -> None:
        nonlocal written
        for number in range(count):
            await context.write(number.to_bytes(4, "big") * (size // 4))
            written += 1

    async with World("unary_stream", flood) as world:
        options = [("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(world.target, options) as channel:
            call: Any = channel.unary_stream(f"/{SERVICE}/Do")(b"")
            first = await call.read()
            at_rest = -1
            while written != at_rest:
                at_rest = written
                await asyncio.sleep(0.2)
            assert written < count // 2, "the window is 64 KiB, and what waits here is bounded"
            got = [first, *[await call.read() for _ in range(count - 1)]]
            assert await call.read() is grpc.aio.EOF
        assert [int.from_bytes(each[:4], "big") for each in got] == list(range(count))
        assert {len(each) for each in got} == {size}


async def test_a_thousand_streams_at_once_keep_apart() -> None:
    inside, all_here = 0, asyncio.Event()

    async def answer(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal inside
        inside += 1
        if inside == 1000:
            all_here.set()
        yield request + b"1"
        await all_here.wait()
        yield request + b"2"

    async with World("unary_stream", answer) as world:

        async def ask(number: int) -> None:
            name = str(number).encode()
            assert [message async for message in world.call(name)] == [name + b"1", name + b"2"]

        await asyncio.gather(*(ask(number) for number in range(1000)))


@pytest.mark.parametrize("native", [False, True])
async def test_what_goes_with_a_call_is_the_same_on_both_transports(native: bool) -> None:
    raw = bytes(range(256))

    async def end(request: bytes, context: Any) -> bytes:
        sent = [(key, value) for key, value in context.invocation_metadata() if key.startswith("x-")]
        assert sorted(sent) == [("x-bytes-bin", raw), ("x-text", "plain text")]
        assert context.peer().startswith("ipv4:127.0.0.1:")
        assert not [name for name in context.auth_context() if name.startswith("x509")]
        details = (("grpc-status-details-bin", raw), ("x-answer", "yes"))
        await context.abort(grpc.StatusCode.ABORTED, "100 % of it, ä", details)
        raise AssertionError

    async with World("unary_unary", end, native=native) as world:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await world.call(b"", metadata=(("x-text", "plain text"), ("x-bytes-bin", raw)))
        error = raised.value
        assert (error.code(), error.details()) == (grpc.StatusCode.ABORTED, "100 % of it, ä")
        assert dict(error.trailing_metadata() or ()) == {"grpc-status-details-bin": raw, "x-answer": "yes"}


@pytest.mark.parametrize("native", [False, True])
async def test_a_stream_to_another_process_talks_both_ways(native: bool) -> None:
    async def chat(requests: Any, context: Any) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            if request == b"refuse":
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no")
            if request == b"end":
                return
            await context.write(request * 2)

    async with (
        World("stream_stream", chat, native=native) as world,
        rpc.channel(world.target, CONFIG, native=True) as channel,
    ):

        def stream() -> Any:
            return channel.stream_stream(f"/{SERVICE}/Do", bytes, bytes)()

        call = stream()
        for number in range(300):
            await call.write(b"%d" % number)
        assert [await call.read() for _ in range(300)] == [b"%d" % number * 2 for number in range(300)]
        large = b"x" * (3 * MiB)
        await call.write(large)
        assert await call.read() == large * 2
        await call.write(b"end")
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        refused = stream()
        await refused.write(b"refuse")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await refused.read()
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "no")
        with pytest.raises(grpc.aio.AioRpcError):
            await refused.write(b"late")
        left = stream()
        await left.write(b"a")
        assert await left.read() == b"aa"
        assert left.cancel()
        assert await left.code() is grpc.StatusCode.CANCELLED


async def test_a_stream_to_nobody_says_so() -> None:
    async with World("unary_unary", lambda request, context: None) as world:
        target = world.target
    async with rpc.channel(target, CONFIG, native=True) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Do", bytes, bytes)()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_that_is_never_stopped_ends_no_process() -> None:
    rpc.Server(CONFIG, native=True).bind("127.0.0.1")
    gc.collect()
    await asyncio.sleep(0)


async def test_a_handler_is_wrapped_once_until_another_takes_its_place() -> None:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    interceptor = ErrorInterceptor()
    details: Any = SimpleNamespace(method=f"/{SERVICE}/Do")

    async def wrapped(handler: Any) -> Any:
        async def found(_: object) -> Any:
            return handler

        return await interceptor.intercept_service(found, details)

    one: Any = grpc.unary_unary_rpc_method_handler(echo)
    other: Any = grpc.unary_unary_rpc_method_handler(echo)
    first = await wrapped(one)
    assert await wrapped(one) is first
    assert await wrapped(other) is not first
    assert await wrapped(None) is None


def test_without_the_module_calls_go_over_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rpc.wants_native(RpcConfig(transport="native"))
    assert not rpc.wants_native(RpcConfig(transport="python"))
    monkeypatch.setitem(sys.modules, "twinpool._transport", None)
    assert not rpc.wants_native(RpcConfig(transport="auto"))
    with pytest.raises(ConfigError, match="libgrpc-dev"):
        rpc.wants_native(RpcConfig(transport="native"))


@pytest.mark.parametrize(("core", "taken"), [("29.0.0", False), ("47.9.9", False), ("48.0.0", True)])
def test_an_old_core_is_taken_only_where_it_is_asked_for(
    core: str, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinpool._transport.core_version", lambda: core)
    assert rpc.wants_native(RpcConfig()) == taken
    assert rpc.wants_native(RpcConfig(transport="native"))


def test_a_message_is_unpacked_up_to_the_limit() -> None:
    import gzip
    import zlib

    text = b"abc" * 1000
    assert inflated(text, 1) == text, "its size was seen by the core"
    assert inflated((1, zlib.compress(text)), 3000) == inflated((2, gzip.compress(text)), 3000) == text
    with pytest.raises(TooLargeError):
        inflated((2, gzip.compress(text)), 2999)
    for broken in ((2, b"no gzip"), (1, zlib.compress(text)[:-9]), (7, text)):
        with pytest.raises(BrokenError):
            inflated(broken, 3000)
