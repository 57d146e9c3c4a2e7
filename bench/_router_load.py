# SPDX-License-Identifier: Apache-2.0
"""Clients of router benchmarks: the same prompts over gRPC to Twinpool and over HTTP to other routers."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import inference_pb2_grpc

OUTPUT_TOKENS = 16
_MESSAGE_BYTES = 64 << 20

Send = Callable[[bytes], Awaitable[float]]
"""Sends an encoded request, reads the whole answer, returns the seconds to its first token."""


@dataclass(frozen=True)
class Load:
    """What a run of requests took."""

    requests: int
    wall_seconds: float
    cpu_seconds: float
    """Of the router's process."""
    latency_seconds: list[float]
    first_seconds: list[float]


def cpu_seconds(pid: int) -> float:
    """On-CPU time of all threads of a process that still run; threads that ended are left out."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total / 1e9


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


async def drive(send: Send, bodies: Sequence[bytes], concurrency: int, pid: int) -> Load:
    """Sends all bodies, so many at a time."""
    waiting = list(reversed(bodies))
    latency: list[float] = []
    first: list[float] = []

    async def client() -> None:
        while waiting:
            body = waiting.pop()
            began = time.perf_counter()
            first.append(await send(body))
            latency.append(time.perf_counter() - began)

    before, began = cpu_seconds(pid), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    wall = time.perf_counter() - began
    return Load(len(bodies), wall, cpu_seconds(pid) - before, latency, first)


class GrpcClient:
    """Twinpool's protocol. ``channels`` connections, so that routers that share a port all get some."""

    def __init__(self, endpoint: str, channels: int = 1) -> None:
        options = [
            ("grpc.max_send_message_length", _MESSAGE_BYTES),
            ("grpc.max_receive_message_length", _MESSAGE_BYTES),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._channels = [grpc.aio.insecure_channel(endpoint, options) for _ in range(channels)]
        path = f"/{pb.DESCRIPTOR.services_by_name['InferenceService'].full_name}/Generate"
        self._calls = [
            channel.unary_stream(
                path, request_serializer=None, response_deserializer=pb.GenerateResponse.FromString
            )
            for channel in self._channels
        ]
        self._turn = 0

    @staticmethod
    def body(prompt: str | Sequence[int], stream: bool) -> bytes:
        """An encoded request. All answers of this protocol are streams."""
        request = pb.GenerateRequest()
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        request.stop.max_tokens = OUTPUT_TOKENS
        request.stop.ignore_eos = True
        return request.SerializeToString()

    async def send(self, body: bytes) -> float:
        """See ``Send``. Raises RuntimeError for an answer that is not whole."""
        began, first, tokens = time.perf_counter(), 0.0, 0
        self._turn += 1
        async for event in self._calls[self._turn % len(self._calls)](body):
            if event.WhichOneof("event") == "tokens":
                first = first or time.perf_counter() - began
                tokens += len(event.tokens.token_ids)
        if tokens != OUTPUT_TOKENS:
            raise RuntimeError(f"{tokens} tokens of {OUTPUT_TOKENS}")
        return first

    async def close(self) -> None:
        """Ends the connections."""
        for channel in self._channels:
            await channel.close()

    @property
    def stub(self) -> "inference_pb2_grpc.InferenceServiceAsyncStub":
        """For calls other than Generate."""
        return inference_pb2_grpc.InferenceServiceStub(self._channels[0])  # type: ignore[return-value]


class HttpClient:
    """SGLang's ``/generate`` over HTTP/1.1 with kept connections."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host, int(port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    @staticmethod
    def body(prompt: str | Sequence[int], stream: bool) -> bytes:
        """An encoded request."""
        sampling = {"max_new_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True}
        request: dict[str, object] = {"model": "mock", "sampling_params": sampling, "stream": stream}
        request["text" if isinstance(prompt, str) else "input_ids"] = prompt
        return json.dumps(request).encode()

    async def send(self, body: bytes) -> float:
        """See ``Send``. Raises RuntimeError for a status other than 200."""
        while self._idle:
            try:
                return await self._exchange(*self._idle.pop(), body)
            except (ConnectionError, asyncio.IncompleteReadError):
                continue  # the router has closed it meanwhile
        return await self._exchange(*await asyncio.open_connection(self._host, self._port), body)

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes
    ) -> float:
        began = time.perf_counter()
        head = (
            f"POST /generate HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        lowered = answer.lower()
        if b"transfer-encoding: chunked" in lowered:
            first = await self._chunks(reader, began)
        else:
            length = int(lowered.split(b"content-length:")[1].split(b"\r\n")[0])
            content = await reader.readexactly(length)
            first = time.perf_counter() - began
            if not answer.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"{answer.splitlines()[0]!r} {content[:300]!r}")
        self._idle.append((reader, writer))
        return first

    async def _chunks(self, reader: asyncio.StreamReader, began: float) -> float:
        first = 0.0
        while size := int(await reader.readline(), 16):
            await reader.readexactly(size + 2)
            first = first or time.perf_counter() - began
        await reader.readline()
        return first

    async def close(self) -> None:
        """Ends the connections."""
        for _, writer in self._idle:
            writer.close()
