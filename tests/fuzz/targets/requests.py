# SPDX-License-Identifier: Apache-2.0
"""What clients and operators send, over real sockets: the bytes of every call to a router with workers behind it.

A call is refused with a row of the error table or answered, whatever its bytes are; workers' own check takes every command that
comes of it; and nothing of it is left.
"""

import asyncio
import json
import random
import tempfile
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio

from tests.fuzz.shake import json_mutator, message_mutator
from tests.fuzz.target import Target
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.fake_cluster import FakeCluster, fake_cluster
from twinpool.errors import TABLE, from_rpc_error
from twinpool.router.openai.errors import STATUS
from twinpool.v1 import chat_pb2, router_pb2
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import worker_pb2 as worker
from twinpool.worker.commands import Limits, parse_command

BLOCK, BLOCKS, CONTEXT, VOCABULARY = 16, 64, 512, 258
LIMITS = Limits(BLOCK, BLOCKS, CONTEXT, 8, VOCABULARY)
METHODS: list[tuple[str, type]] = [
    ("InferenceService/Generate", pb.GenerateRequest),
    ("InferenceService/Tokenize", pb.TokenizeRequest),
    ("InferenceService/Resume", pb.ResumeRequest),
    ("InferenceService/Cancel", pb.CancelRequest),
    ("InferenceService/ListModels", pb.ListModelsRequest),
    ("RouterService/LookupPrefix", router_pb2.LookupPrefixRequest),
    ("RouterService/TraceRequest", router_pb2.TraceRequestRequest),
    ("RouterService/HandOver", router_pb2.HandOverRequest),
    ("ChatService/Chat", chat_pb2.ChatRequest),
    ("InferenceService/Detokenize", pb.DetokenizeRequest),
    ("InferenceService/Warm", pb.WarmRequest),
    ("InferenceService/GetUsage", pb.GetUsageRequest),
    ("RouterService/InspectRouter", router_pb2.InspectRouterRequest),
    ("RouterService/FetchRecording", router_pb2.FetchRecordingRequest),
    ("ChatService/Resume", chat_pb2.ChatServiceResumeRequest),
    ("InferenceService/Release", pb.ReleaseRequest),
    ("RouterService/GetTelemetry", router_pb2.GetTelemetryRequest),
    ("RouterService/ListRouterRequests", router_pb2.ListRouterRequestsRequest),
    ("RouterService/ListHotPrefixes", router_pb2.ListHotPrefixesRequest),
]
KINDS = [kind for _, kind in METHODS]
STREAMS = {"Generate", "Resume", "Chat", "FetchRecording"}
CALL_SECONDS = 60.0


class World:
    """A router with two workers, for the life of the process."""

    def __init__(self) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="twinpool-fuzz-")
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        self.cluster: FakeCluster = self.loop.run_until_complete(self._start())

    async def _start(self) -> FakeCluster:
        path = write_byte_tokenizer(Path(self.directory.name))
        sizes = {"num_blocks": BLOCKS, "max_context_tokens": CONTEXT, "vocab_size": VOCABULARY}
        settings: dict[str, object] = {"http_port": 0, "record_bytes": 1 << 16}
        return await self.stack.enter_async_context(fake_cluster(path, settings=settings, **sizes))

    async def call(self, method: str, data: bytes) -> grpc.aio.AioRpcError | None:
        channel, path = self.cluster.channel, f"/twinpool.v1.{method}"
        plain: Any = {"request_serializer": None, "response_deserializer": None}
        try:
            if method.partition("/")[2] in STREAMS:
                async for _ in channel.unary_stream(path, **plain)(data, timeout=CALL_SECONDS):
                    pass
            else:
                await channel.unary_unary(path, **plain)(data, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            return error
        return None

    def commands(self) -> list[worker.SessionRequest]:
        """What the workers were told since they were last asked."""
        told = []
        for made in self.cluster.workers.values():
            told += [worker.SessionRequest(prefill=command) for command in made.prefills]
            told += [worker.SessionRequest(decode=command) for command in made.decodes]
            made.prefills.clear()
            made.decodes.clear()
        return told


@cache
def world() -> World:
    return World()


def close() -> None:
    """Ends the router and its workers, with their threads."""
    if world.cache_info().currsize:
        made = world()
        world.cache_clear()
        made.loop.run_until_complete(made.stack.aclose())
        made.loop.run_until_complete(made.loop.shutdown_asyncgens())
        made.loop.close()
        made.directory.cleanup()


def run(data: bytes) -> None:
    method, kind = METHODS[data[0] % len(METHODS) if data else 0]
    made = world()
    error = made.loop.run_until_complete(made.call(method, data[1:]))
    if error is not None:
        known = from_rpc_error(error)
        parses = True
        try:
            kind.FromString(data[1:])  # type: ignore[attr-defined]
        except Exception:
            parses = False
        # gRPC's own answer to bytes that are no message, where the service does not look itself.
        assert not parses or error.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), known
        assert known.reason in TABLE
        assert len(known.message) < 2000, "a message of the size of its request"
        assert error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED, known
    check_workers(made)


def check_workers(made: World) -> None:
    """What workers were told they can do, and nothing is left."""
    for command in made.commands():
        # What compiles grammars has tests of its own.
        getattr(command, str(command.WhichOneof("message"))).draw.ClearField("grammar")
        parse_command(command, LIMITS)
    assert made.cluster.router.core.stats()["reservations"] == 0


def seeds() -> list[bytes]:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hé")])
    call = pb.ToolCall(id="1", name="f", arguments_json="{}")
    tools = pb.ChatMessages(
        messages=[pb.ChatMessage(role="assistant", tool_calls=[call])],
        tools=[pb.Tool(name="f", description="d", parameters_json=json.dumps({"type": "object"}))],
        variables_json='{"a": 1}',
    )
    few = pb.StopConditions(max_tokens=4)
    pinned = pb.WarmRequest(request=pb.GenerateRequest(text="hello" * 20, session_id="s"))
    pinned.pin.FromSeconds(5)
    requests: list[Any] = [
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(40)), stop=few),
        pb.GenerateRequest(
            text="hello",
            stop=pb.StopConditions(max_tokens=9, min_tokens=1, stop_strings=["x"], stop_token_ids=[3]),
            sampling=pb.SamplingParams(temperature=0.5, top_p=0.9, top_k=5, seed=3),
            n=2,
            logprobs=2,
            request_id="r",
            priority=3,
            tenant="t",
        ),
        pb.GenerateRequest(chat=chat, model="fake", stop=few),
        pb.GenerateRequest(chat=tools, stop=few),
        pb.TokenizeRequest(text="abc"),
        pb.TokenizeRequest(chat=chat),
        pb.ResumeRequest(token=b"\x01" + bytes(40), next_index=[3]),
        pb.CancelRequest(token=b"\x01" + bytes(40)),
        pb.ListModelsRequest(),
        router_pb2.LookupPrefixRequest(text="abc"),
        router_pb2.TraceRequestRequest(request_id="r"),
        router_pb2.HandOverRequest(stream_id="s"),
        chat_pb2.ChatRequest(request=pb.GenerateRequest(chat=chat, model="fake", stop=few)),
        chat_pb2.ChatRequest(
            request=pb.GenerateRequest(chat=tools, stop=few), tool_name="f", single_call=True
        ),
        pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=[72, 195, 169, 257]), keep_special_tokens=True),
        pb.WarmRequest(request=pb.GenerateRequest(text="hello", priority=1)),
        pinned,
        pb.ReleaseRequest(session_id="s"),
        pb.ReleaseRequest(pin_id="0" * 32),
        pb.ReleaseRequest(request=pb.GenerateRequest(text="hello" * 20)),
        pb.GetUsageRequest(tenant="t"),
        router_pb2.InspectRouterRequest(),
        router_pb2.FetchRecordingRequest(),
        chat_pb2.ChatServiceResumeRequest(
            token=b"\x01" + bytes(40), positions=[chat_pb2.ChatPosition(next_index=3, told=2, checksum=1)]
        ),
    ]
    return [bytes([KINDS.index(type(made))]) + made.SerializeToString() for made in requests]


# --- the OpenAI-compatible API

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


async def post(made: World, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of the answer."""
    url = f"http://{made.cluster.router.apis.http_endpoint}{path}"
    timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer,
    ):
        return answer.status, await answer.read()


def run_http(data: bytes) -> None:
    """The first byte says which path; the rest is the body."""
    made = world()
    path = PATHS[data[0] % len(PATHS) if data else 0]
    status, body = made.loop.run_until_complete(post(made, path, data[1:]))
    if status >= 400:
        said = json.loads(body)["error"]
        assert said["code"] in TABLE, said
        assert status == STATUS.get(TABLE[said["code"]].code, 500), said
        assert len(said["message"]) < 2000
        assert status < 500 or said["code"] != "INTERNAL", said
    else:
        assert b'"INTERNAL"' not in body, body[:500]
        assert b"internal error" not in body
    check_workers(made)


def http_seeds() -> list[bytes]:
    ask = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hé"}]}]
    form: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    function = {"name": "f", "description": "d", "parameters": form}
    few = {"model": "fake", "max_tokens": 4}
    bodies: list[tuple[int, dict[str, Any]]] = [
        (0, few | {"messages": ask, "n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["x"], "seed": 1}),
        (0, few | {"messages": ask, "stream": True, "stream_options": {"include_usage": True}}),
        (0, few | {"messages": ask, "tools": [{"type": "function", "function": function}], "temperature": 0.5}),
        (0, few | {"messages": ask, "response_format": {"type": "json_object"}, "logit_bias": {"65": 1.5}}),
        (1, few | {"prompt": ["hello", "x"], "echo": True, "logprobs": 1, "top_p": 0.5}),
        (1, few | {"prompt": list(range(40)), "stream": True, "presence_penalty": 0.5, "user": "u"}),
        (2, {"model": "fake", "input": "hé", "max_output_tokens": 4, "instructions": "be"}),
        (2, {"model": "fake", "input": ask, "max_output_tokens": 4, "stream": True, "temperature": 0.5}),
    ]  # fmt: skip
    return [bytes([which]) + json.dumps(body).encode() for which, body in bodies]


def mutate_http(data: bytes, source: random.Random) -> bytes:
    """Keeps the path, as a rule."""
    which = data[:1] if source.random() < 0.9 else bytes([source.randrange(len(PATHS))])
    return which + json_mutator(data[1:], source)


TARGETS = {
    "http": Target("http", run_http, http_seeds, mutate_http, close),
    "inference": Target("inference", run, seeds, message_mutator(KINDS), close),
}
