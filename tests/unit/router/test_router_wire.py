# SPDX-License-Identifier: Apache-2.0
"""What travels beside the request itself: compression, limits of size, deadlines, by gRPC and by HTTP."""

import gzip
import json
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest

from tests.support.chat_world import chat_cluster, write_chat_model
from tests.support.fake_cluster import FakeCluster, collect, generate
from tests.support.transports import each_transport  # noqa: F401
from twinpool.v1 import inference_pb2_grpc

LIMIT = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


def channel(cluster: FakeCluster, compression: grpc.Compression) -> grpc.aio.Channel:
    options = [("grpc.max_send_message_length", -1)]
    return grpc.aio.insecure_channel(cluster.router.endpoint, options, compression=compression)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_compressed_request_by_grpc(model: Path, compression: grpc.Compression) -> None:
    async with (
        chat_cluster(model, "abc", max_message_bytes=LIMIT) as cluster,
        channel(cluster, compression) as compressed,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(compressed)
        answer = await collect(stub.Generate(generate(text="x" * 2000, max_tokens=9)))
        assert answer.text() == "abc"
        # Small as it is sent, and 64 times the limit as it is read.
        bomb = await collect(stub.Generate(generate(text="x" * (64 * LIMIT))))
        assert (bomb.code, bomb.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
        assert (await collect(stub.Generate(generate(max_tokens=9)))).text() == "abc"


async def test_a_compressed_request_by_http(model: Path) -> None:
    async with (
        chat_cluster(model, "abc", max_message_bytes=LIMIT) as cluster,
        aiohttp.ClientSession(f"http://{cluster.router.apis.http_endpoint}") as session,
    ):

        async def ask(prompt: str) -> tuple[int, dict[str, object]]:
            body = gzip.compress(json.dumps({"model": "fake", "prompt": prompt, "max_tokens": 9}).encode())
            headers = {
                "Content-Encoding": "gzip",
                "Content-Type": "application/json",
                "Accept-Encoding": "gzip",
            }
            async with session.post("/v1/completions", data=body, headers=headers) as answer:
                return answer.status, await answer.json()

        status, found = await ask("x" * 2000)
        assert status == 200
        assert found["choices"][0]["text"] == "abc"  # type: ignore[index]
        status, found = await ask("x" * (64 * LIMIT))
        assert (status, found["error"]["code"]) == (429, "MESSAGE_TOO_LARGE")  # type: ignore[index]
        assert f"the limit is {LIMIT} bytes" in found["error"]["message"]  # type: ignore[index]
        body = {"model": "fake", "prompt": "x" * (LIMIT + 1)}
        async with session.post("/v1/completions", json=body) as answer:
            assert f"the limit is {LIMIT} bytes" in (await answer.json())["error"]["message"]


async def test_a_damaged_compressed_body_is_refused(model: Path) -> None:
    async with (
        chat_cluster(model, "abc") as cluster,
        aiohttp.ClientSession(f"http://{cluster.router.apis.http_endpoint}") as session,
    ):
        headers = {"Content-Encoding": "gzip"}
        async with session.post("/v1/completions", data=b"no gzip", headers=headers) as answer:
            assert answer.status == 400
        async with session.get("/health") as answer:
            assert answer.status == 200


async def test_a_client_s_deadline_reaches_both_workers(model: Path) -> None:
    async with chat_cluster(model, "abc") as cluster:
        await cluster.ask(generate(max_tokens=9), timeout=50.0)
        prefill, decode = cluster.workers["p0"].prefills[-1], cluster.workers["d0"].decodes[-1]
        left = [command.deadline.ToNanoseconds() / 1e9 for command in (decode, prefill)]
        assert 0 < left[1] <= left[0] <= 50.0, "what is left when each is told"
        await cluster.ask(generate(max_tokens=9), timeout=None)
        assert not cluster.workers["p0"].prefills[-1].HasField("deadline")
        assert not cluster.workers["d0"].decodes[-1].HasField("deadline")
