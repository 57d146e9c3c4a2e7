# SPDX-License-Identifier: Apache-2.0
"""ModelStreamInfer: answers in pieces, requests side by side, failures that leave the stream alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import grpc
import grpc.aio
import pytest
import yaml

from tests.support.byte_tokenizer import EOS
from tests.support.chat_world import chat_cluster, write_chat_model
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_worker import Job
from tests.support.kserve_asking import infer, read, streaming, text, told
from tests.support.transports import each_transport  # noqa: F401
from tests.support.waiting import until
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.router.kserve.stream import InferStream, Send
from twinpool.v1.kserve import open_inference_pb2 as kserve

FINAL = "triton_final_response"
STREAM = ("stream", "BOOL", [True])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


@asynccontextmanager
async def served(model: Path, written: str = "Grün!", **settings: object) -> AsyncIterator[FakeCluster]:
    async with chat_cluster(model, written, **settings) as cluster:
        yield cluster
        await cluster.assert_quiescent()


def asked(name: str, prompt: str = "x", **parameters: object) -> kserve.ModelInferRequest:
    """A streamed request with that id."""
    return infer(text(prompt), STREAM, id=name, parameters={"max_tokens": 300, **parameters})


class Gate(asyncio.Event):
    """Knows how many wait for it."""

    waiting = 0

    async def wait(self) -> Literal[True]:
        self.waiting += 1
        return await super().wait()


# --- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [False, True])
async def test_a_response_a_delta_and_the_last_one_says_so(model: Path, raw: bool) -> None:
    def token(job: Job, choice: int, offset: int) -> int:
        return 97 + choice if offset < 2 + choice else EOS

    async with served(model) as cluster, streaming(cluster) as stream:
        for made in cluster.workers.values():
            made.script.token = token
        await stream.send(infer(text("x"), STREAM, raw=raw, id="a", parameters={"n": 2, "max_tokens": 9}))
        found = await stream.until_final()
        assert {response.error_message for response in found} == {""}
        pieces = [response.infer_response for response in found]
        assert {(piece.id, piece.model_name) for piece in pieces} == {("a", "fake")}
        assert [told(piece)[FINAL] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert len(pieces) > 2
        outputs = [read(piece) for piece in pieces]
        for choice, whole in ((0, "aa"), (1, "bbb")):
            assert "".join(piece["text_output"][choice] for piece in outputs) == whole
            tokens = [token for piece in outputs for token in piece["output_ids"][choice] if token >= 0]
            assert tokens == [*whole.encode(), EOS]
            assert sum(piece["num_output_tokens"][choice] for piece in outputs) == len(tokens)
        assert {reason for piece in outputs[:-1] for reason in piece["finish_reason"]} == {""}
        assert outputs[-1] == {
            "text_output": ["", ""],
            "output_ids": [[], []],
            "finish_reason": ["stop", "stop"],
            "num_input_tokens": [1],
            "num_output_tokens": [0, 0],
        }
        counts = told(pieces[-1])
        assert (counts["prompt_tokens"], counts["completion_tokens"]) == (1, 7)


async def test_an_answer_that_is_not_to_come_in_pieces(model: Path) -> None:
    async with served(model) as cluster, streaming(cluster) as stream:
        await stream.send(infer(text("x"), id="a", outputs=["text_output"], parameters={"max_tokens": 20}))
        (response,) = await stream.until_final()
        assert read(response.infer_response) == {"text_output": ["Grün!"]}
        assert told(response.infer_response)["completion_tokens"] == 7


async def test_requests_go_side_by_side(model: Path) -> None:
    async with served(model) as cluster, streaming(cluster) as stream:
        gate = cluster.workers["p0"].script.prefill_gate = Gate()
        await stream.send(asked("first"))
        await until(lambda: gate.waiting)
        cluster.workers["p0"].script.prefill_gate = None
        await stream.send(asked("second"))
        assert {response.infer_response.id for response in await stream.until_final()} == {"second"}
        gate.set()
        assert {response.infer_response.id for response in await stream.until_final()} == {"first"}
        await stream.call.done_writing()
        assert await stream.receive() is None
        assert await stream.call.code() is grpc.StatusCode.OK


async def test_more_than_the_limit_wait_to_be_read(model: Path) -> None:
    async with served(model, max_stream_requests=1) as cluster, streaming(cluster) as stream:
        gate = cluster.workers["p0"].script.prefill_gate = asyncio.Event()
        await stream.send(asked("first"), asked("second"))
        await until(cluster.held)
        async with streaming(cluster) as other:
            # By when another stream's request is there, this one's second would be as well.
            await other.send(asked("other"))
            await until(lambda: len(cluster.workers["p0"].prefills) == 2)
            gate.set()
            await other.until_final()
        found = [(await stream.until_final())[-1].infer_response.id for _ in range(2)]
        assert found == ["first", "second"], "one after the other"
        assert len(cluster.workers["p0"].prefills) == 3


async def test_a_client_that_has_sent_all_gets_all(model: Path) -> None:
    async with served(model) as cluster, streaming(cluster) as stream:
        gate = cluster.workers["p0"].script.prefill_gate = asyncio.Event()
        await stream.send(asked("first"), asked("second"))
        await stream.call.done_writing()
        await until(lambda: len(cluster.workers["p0"].prefills) == 2)
        gate.set()
        found = {(await stream.until_final())[-1].infer_response.id for _ in range(2)}
        assert found == {"first", "second"}
        assert await stream.receive() is None
        assert await stream.call.code() is grpc.StatusCode.OK


# --- failures -----------------------------------------------------------------------------------


async def test_a_refused_request_leaves_the_stream_alone(model: Path) -> None:
    async with served(model) as cluster, streaming(cluster) as stream:
        await stream.send(asked("bad", surprise=1))
        (bad,) = await stream.until_final()
        assert bad.error_message == "UNSUPPORTED_FIELD: parameters.surprise is not supported"
        assert bad.infer_response.id == "bad"
        assert told(bad.infer_response) == {
            FINAL: True,
            "error_reason": "UNSUPPORTED_FIELD",
            "error_field": "parameters.surprise",
        }
        await stream.send(b"\xff\xff")
        (broken,) = await stream.until_final()
        assert broken.error_message.startswith("INVALID_ARGUMENT: the request of 2 bytes")
        await stream.send(asked("good"))
        found = await stream.until_final()
        assert "".join(read(piece.infer_response)["text_output"][0] for piece in found) == "Grün!"


async def test_an_answer_that_fails_later_says_so(model: Path) -> None:
    async with served(model, "x" * 400, max_resumes=0) as cluster, streaming(cluster) as stream:
        cluster.workers["d0"].script.fail_after_tokens = 20
        await stream.send(asked("failing"))
        found = await stream.until_final()
        assert "scripted" in found[-1].error_message
        assert len(found) > 2, "what there was came before"
        cluster.workers["d0"].script.fail_after_tokens = None
        await stream.send(asked("good"))
        assert (await stream.until_final())[-1].error_message == ""


async def test_a_timeout_ends_its_own_request(model: Path) -> None:
    async with served(model, "x" * 400) as cluster, streaming(cluster) as stream:
        cluster.workers["d0"].script.hold_after_tokens = 20
        await stream.send(asked("late", timeout=300_000))
        assert told((await stream.until_final())[-1].infer_response)["error_reason"].startswith("DEADLINE_")
        await until(lambda: not cluster.held())
        cluster.workers["d0"].script.hold_after_tokens = None
        await stream.send(asked("good"))
        assert (await stream.until_final())[-1].error_message == ""


async def test_a_client_that_leaves_cancels_all_its_requests(model: Path) -> None:
    async with served(model, "x" * 400) as cluster:
        cluster.workers["d0"].script.hold_after_tokens = 20
        async with streaming(cluster) as stream:
            await stream.send(asked("first"), asked("second"))
            await until(lambda: len(cluster.held().get("d0", ())) == 2)
        await until(lambda: not cluster.held())


async def test_who_is_no_tenant_has_no_stream(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(yaml.safe_dump({"tenants": []}))
    async with served(model, tenants_file=str(path)) as cluster, streaming(cluster) as stream:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.receive()
        assert from_rpc_error(caught.value).reason == "UNAUTHENTICATED"


async def test_a_router_that_leaves_ends_streams_with_their_last_request(model: Path) -> None:
    async with served(model) as cluster, streaming(cluster) as busy, streaming(cluster) as idle:
        gate = cluster.workers["p0"].script.prefill_gate = asyncio.Event()
        await idle.send(asked("bad", surprise=1))
        await idle.until_final()
        await busy.send(asked("running"))
        await until(cluster.held)
        stopping = asyncio.create_task(cluster.router.stop(60.0))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await idle.receive()
        assert from_rpc_error(caught.value).reason == "DRAINING"
        gate.set()
        assert (await busy.until_final())[-1].error_message == ""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await busy.receive()
        assert from_rpc_error(caught.value).reason == "DRAINING"
        await stopping


# --- a client that does not read ----------------------------------------------------------------


async def test_nothing_follows_a_message_that_was_given_up() -> None:
    written: list[str] = []
    waiting: list[str] = []

    async def write(response: kserve.ModelStreamInferResponse) -> None:
        waiting.append(response.infer_response.id)
        await asyncio.Event().wait()
        written.append(response.infer_response.id)

    async def serve(request: str, send: Send) -> None:
        await send(kserve.ModelInferResponse(id=request))

    async def requests() -> AsyncIterator[str]:
        for name in ("a", "b", "c"):
            yield name
        await asyncio.Event().wait()

    stream = InferStream(serve, write, max_requests=3, stall_seconds=0.05)
    with pytest.raises(TwinpoolError) as caught:
        await stream.run(requests(), asyncio.Event())
    assert caught.value.reason == "CLIENT_TOO_SLOW"
    assert (waiting, written) == (["a"], []), "gRPC was given no second message"


async def test_a_client_that_does_not_read_loses_its_stream(model: Path) -> None:
    """Its window is full of an answer that it does not take: the stream ends, and so do the others on it."""
    # A window that does not grow.
    options = [("grpc.http2.bdp_probe", 0)]
    async with (
        served(model, "x" * 4000, client_stall_seconds=0.2) as cluster,
        grpc.aio.insecure_channel(cluster.router.endpoint, options) as channel,
        streaming(cluster, channel) as stream,
    ):
        # Each delta bears its id, which fills the window.
        for number in range(30):
            await stream.send(asked(f"{number:0>128}", max_tokens=3000))
        await until(lambda: cluster.workers["p0"].prefills)
        await until(lambda: not cluster.router.admission.active)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.rest()
        assert from_rpc_error(caught.value).reason == "CLIENT_TOO_SLOW"
