# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol: what its methods answer, with workers that only pretend."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import twinpool
from tests.support.byte_tokenizer import EOS
from tests.support.chat_world import chat_cluster, prompt_text, write_chat_model
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_worker import Job
from tests.support.kserve_asking import Tensor, ids, infer, read, refused, stub, text, told
from tests.support.waiting import until
from twinpool.router.kserve.service import SERVICE
from twinpool.rpc import digest_of
from twinpool.v1.kserve import open_inference_pb2 as kserve

RED = "tp-red-key"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


@asynccontextmanager
async def served(model: Path, written: str = "Grün!", **settings: object) -> AsyncIterator[FakeCluster]:
    async with chat_cluster(model, written, **settings) as cluster:
        yield cluster
        await cluster.assert_quiescent()


# --- the server and its models ------------------------------------------------------------------


async def test_health_and_readiness_say_the_same(model: Path) -> None:
    async with served(model) as cluster:
        own, probe = stub(cluster), health_pb2_grpc.HealthStub(cluster.channel)

        async def health() -> bool:
            answer = await probe.Check(health_pb2.HealthCheckRequest(service=SERVICE))
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        assert (await own.ServerLive(kserve.ServerLiveRequest())).live
        assert (await own.ServerReady(kserve.ServerReadyRequest())).ready
        assert await health()
        for made in cluster.workers.values():
            cluster.router.fleet.remove(made.record())
        assert (await own.ServerLive(kserve.ServerLiveRequest())).live
        assert not (await own.ServerReady(kserve.ServerReadyRequest())).ready
        await cluster.router._show_health()
        assert not await health()


async def test_metadata(model: Path) -> None:
    async with served(model) as cluster:
        own = stub(cluster)
        server = await own.ServerMetadata(kserve.ServerMetadataRequest())
        assert (server.name, server.version) == ("twinpool", twinpool.__version__)
        for name in ("fake", ""):
            found = await own.ModelMetadata(kserve.ModelMetadataRequest(name=name, version="1"))
            assert (found.name, list(found.versions), found.platform) == ("fake", ["1"], "twinpool")
        inputs = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in found.inputs}
        assert inputs["text_input"] == ("BYTES", [1])
        assert inputs["input_ids"] == ("INT64", [-1])
        assert inputs["stream"] == ("BOOL", [1])
        # What the metadata name is what an answer has.
        answer = await own.ModelInfer(infer(text("a"), parameters={"max_tokens": 2, "logprobs": 0}))
        assert [(tensor.name, tensor.datatype) for tensor in found.outputs] == [
            (tensor.name, tensor.datatype) for tensor in answer.outputs
        ]
        for name, version in (("other", ""), ("fake", "7")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await own.ModelMetadata(kserve.ModelMetadataRequest(name=name, version=version))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_model_readiness(model: Path) -> None:
    async with served(model) as cluster:

        async def ready(name: str, version: str = "") -> bool:
            request = kserve.ModelReadyRequest(name=name, version=version)
            return (await stub(cluster).ModelReady(request)).ready

        assert await ready("fake")
        assert await ready("fake", "1")
        assert not await ready("fake", "2")
        assert not await ready("other")
        cluster.router.fleet.remove(cluster.workers["d0"].record())
        assert not await ready("fake")


async def test_reflection_lists_it(model: Path) -> None:
    async with served(model) as cluster:
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        reflection = reflection_pb2_grpc.ServerReflectionStub(cluster.channel)
        async for answer in reflection.ServerReflectionInfo(iter([asked])):
            assert SERVICE in {service.name for service in answer.list_services_response.service}


# --- a request ----------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [False, True])
async def test_text_to_text(model: Path, raw: bool) -> None:
    async with served(model) as cluster:
        request = infer(
            text("Rain?"), raw=raw, id="mine, or yours", model_name="fake", parameters={"max_tokens": 20}
        )
        response = await stub(cluster).ModelInfer(request)
        assert prompt_text(cluster) == "Rain?"
        tokens = [*"Grün!".encode(), EOS]
        assert read(response) == {
            "text_output": ["Grün!"],
            "output_ids": [tokens],
            "finish_reason": ["stop"],
            "num_input_tokens": [5],
            "num_output_tokens": [len(tokens)],
        }
        assert bool(response.raw_output_contents) is raw, "the answer is packed as its request was"
        assert (response.id, response.model_name, response.model_version) == ("mine, or yours", "fake", "1")
        counts = told(response)
        assert counts.pop("request_id")
        assert counts == {"prompt_tokens": 5, "completion_tokens": len(tokens), "cached_tokens": 0}


@pytest.mark.parametrize("datatype", ["INT32", "INT64"])
@pytest.mark.parametrize("raw", [False, True])
async def test_token_ids(model: Path, datatype: str, raw: bool) -> None:
    async with served(model) as cluster:
        for shape in ([3], [1, 3]):
            request = infer(ids([82, 97, 63], datatype), raw=raw, parameters={"max_tokens": 2})
            request.inputs[0].shape[:] = shape
            response = await stub(cluster).ModelInfer(request)
            assert prompt_text(cluster) == "Ra?"
            assert read(response)["output_ids"] == [list(b"Gr")]
            assert read(response)["finish_reason"] == ["length"]


async def test_choices_stand_in_rows(model: Path) -> None:
    def token(job: Job, choice: int, offset: int) -> int:
        return 97 + choice if offset < 2 + choice else EOS

    async with served(model) as cluster:
        for made in cluster.workers.values():
            made.script.token = token
        response = await stub(cluster).ModelInfer(infer(text("x"), parameters={"n": 2, "max_tokens": 4}))
        found = read(response)
        assert found["text_output"] == ["aa", "bbb"]
        assert found["output_ids"] == [[97, 97, EOS, -1], [98, 98, 98, EOS]]
        assert found["num_output_tokens"] == [3, 4]
        assert found["finish_reason"] == ["stop", "stop"]


JSON_PARAMETERS = {
    "temperature": "0.5", "top_p": 0.25, "top_k": "5", "min_p": 0.125, "seed": -1, "max_tokens": "7", "min_tokens": 1,
    "presence_penalty": 1, "frequency_penalty": "-1.5", "repetition_penalty": 1.5, "logit_bias": {"66": -100, "67": 2},
    "stop": ["q", "5"], "stop_token_ids": [9], "ignore_eos": "true", "n": 2, "logprobs": 3,
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "temperature": 0.5, "top_p": "0.25", "top_k": 5, "min_p": 0.125, "seed": -1, "max_tokens": 7, "min_tokens": "1",
    "presence_penalty": 1, "frequency_penalty": -1.5, "repetition_penalty": 1.5,
    "logit_bias": '{"66": -100, "67": 2}', "stop": "5", "stop_token_ids": "[9]", "ignore_eos": True, "n": "2",
    "logprobs": 3,
}  # fmt: skip
TENSORS: list[Tensor] = [
    ("temperature", "FP32", [0.5]), ("top_p", "FP64", [0.25]), ("top_k", "INT32", [5]), ("min_p", "FP32", [0.125]),
    ("random_seed", "INT64", [-1]), ("max_tokens", "UINT32", [7]), ("min_tokens", "INT32", [1]),
    ("presence_penalty", "FP32", [1]), ("frequency_penalty", "FP32", [-1.5]), ("repetition_penalty", "FP32", [1.5]),
    ("stop_words", "BYTES", [b"q", b"5"]), ("stop_token_ids", "INT32", [9]), ("ignore_eos", "BOOL", [True]),
    ("n", "UINT64", [2]), ("logprobs", "INT32", [3]), ("beam_width", "INT32", [1]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "bias"),
    [
        pytest.param(infer(text("x"), parameters=PLAIN), True, id="parameters"),
        pytest.param(infer(text("x"), text(json.dumps(JSON_PARAMETERS), "sampling_parameters")), True, id="json"),
        pytest.param(infer(text("x"), *TENSORS), False, id="tensors"),
        pytest.param(infer(text("x"), *TENSORS, raw=True), False, id="raw-tensors"),
        pytest.param(
            infer(text("x"), *TENSORS, text('{"temperature": "0.5", "n": 2}', "sampling_parameters"), parameters={"top_k": 5}),
            False, id="said-twice",
        ),
    ],
)  # fmt: skip
async def test_parameters_reach_the_workers(
    model: Path, request_: kserve.ModelInferRequest, bias: bool
) -> None:
    async with served(model) as cluster:
        await stub(cluster).ModelInfer(request_)
        draw = cluster.workers["d0"].decodes[0].draw
        sampling = draw.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 5, 0.125)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.5)
        assert (sampling.repetition_penalty, sampling.seed) == (1.5, (1 << 64) - 1)
        biases = [(66, -100.0), (67, 2.0)] if bias else []
        assert [(entry.token_id, entry.bias) for entry in sampling.logit_bias] == biases
        assert (draw.stop.max_tokens, draw.stop.min_tokens, draw.stop.ignore_eos) == (7, 1, True)
        assert list(draw.stop_token_ids) == [9], "the end of the text is ignored"
        assert (draw.n, draw.logprobs) == (2, 3)


async def test_a_stop_text_may_look_like_a_number(model: Path) -> None:
    async with served(model, "a5b") as cluster:
        response = await stub(cluster).ModelInfer(
            infer(text("x"), parameters={"stop": "5", "max_tokens": 9, "top_k": -1})
        )
        assert read(response)["text_output"] == ["a"]
        assert read(response)["finish_reason"] == ["stop"]


async def test_a_timeout_in_microseconds_is_a_deadline(model: Path) -> None:
    async with served(model, "x" * 400) as cluster:
        cluster.workers["d0"].script.hold_after_tokens = 20
        error = await refused(cluster, infer(text("x"), parameters={"max_tokens": 300, "timeout": 300_000}))
        assert error is not None
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        # Not the call's own, which is later.
        assert cluster.workers["d0"].decodes[0].deadline.ToMilliseconds() <= 300


@pytest.mark.parametrize(("given", "ours"), [(0, 0), (1, 100), (101, 0), (201, -100)])
async def test_priorities_count_from_one_downwards(model: Path, given: int, ours: int) -> None:
    async with served(model) as cluster:
        request = infer(text("x"), parameters={"max_tokens": 2})
        request.parameters["priority"].uint64_param = given
        await stub(cluster).ModelInfer(request)
        assert cluster.workers["d0"].decodes[0].priority == ours


async def test_a_repeated_request_gets_the_answer_of_the_first(model: Path) -> None:
    async with served(model) as cluster:
        request = infer(
            text("x"), parameters={"max_tokens": 9, "idempotency_key": "once", "request_id": "r-1"}
        )
        answers = [await stub(cluster).ModelInfer(request) for _ in range(2)]
        assert read(answers[0]) == read(answers[1])
        assert told(answers[0])["request_id"] == "r-1"
        assert len(cluster.workers["p0"].prefills) == 1
        request.parameters["seed"].int64_param = 5
        error = await refused(cluster, request)
        assert error is not None
        assert error.reason == "IDEMPOTENCY_MISMATCH"


async def test_a_client_that_leaves_cancels_its_request(model: Path) -> None:
    async with served(model, "x" * 400) as cluster:
        cluster.workers["d0"].script.hold_after_tokens = 20
        call = stub(cluster).ModelInfer(infer(text("x"), parameters={"max_tokens": 300}))
        waiting = asyncio.ensure_future(call)
        await until(cluster.held)
        waiting.cancel()
        await until(lambda: not cluster.held())


# --- what is in an answer -----------------------------------------------------------------------


async def test_only_what_was_asked_for_is_sent(model: Path) -> None:
    async with served(model) as cluster:

        async def names(*tensors: Tensor, outputs: tuple[str, ...] = ()) -> list[str]:
            request = infer(text("x"), *tensors, outputs=outputs, parameters={"max_tokens": 2})
            return [tensor.name for tensor in (await stub(cluster).ModelInfer(request)).outputs]

        assert await names(outputs=("finish_reason", "text_output")) == ["finish_reason", "text_output"]
        no = [(f"return_{name}", "BOOL", [False]) for name in ("finish_reason", "num_input_tokens")]
        assert await names(*no) == ["text_output", "output_ids", "num_output_tokens"]
        assert await names(("return_logprobs", "BOOL", [True])) == [
            "text_output", "output_ids", "finish_reason", "num_input_tokens", "num_output_tokens",
            "cumulative_logprob", "logprobs",
        ]  # fmt: skip
        assert await names(outputs=("cumulative_logprob",)) == ["cumulative_logprob"]


async def test_log_probabilities(model: Path) -> None:
    async with served(model, "é!") as cluster:
        request = infer(
            text("x"), outputs=("logprobs", "cumulative_logprob"), parameters={"max_tokens": 3, "logprobs": 2}
        )
        found = read(await stub(cluster).ModelInfer(request))
        assert found["cumulative_logprob"] == [-1.5]
        positions = json.loads(found["logprobs"][0])
        assert [list(position) for position in positions] == [["195", "196"], ["169", "170"], ["33", "34"]]
        assert positions[2]["34"] == {"logprob": -2.0, "decoded_token": '"'}


async def test_the_prompt_comes_first_where_it_is_asked_for(model: Path) -> None:
    async with served(model) as cluster:
        for exclude, found in ((False, "Rain?Grün!"), (True, "Grün!")):
            request = infer(
                text("Rain?"),
                ("exclude_input_in_output", "BOOL", [exclude]),
                parameters={"max_tokens": 9, "n": 2},
            )
            assert read(await stub(cluster).ModelInfer(request))["text_output"] == [found, found]


# --- tenants ------------------------------------------------------------------------------------


async def test_tenants_are_who_their_keys_say(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    tenants = [
        {"name": "red", "keys": [digest_of(RED)]},
        {"name": "blue", "keys": [digest_of("b")], "models": ["other"]},
    ]
    path.write_text(yaml.safe_dump({"tenants": tenants}))
    async with served(model, tenants_file=str(path)) as cluster:
        own = stub(cluster)
        red: Any = (("authorization", f"Bearer {RED}"),)
        blue: Any = (("x-api-key", "b"),)
        request = infer(text("x"), model_name="other", parameters={"max_tokens": 2})
        error = await refused(cluster, request)
        assert error is not None
        assert error.reason == "UNAUTHENTICATED"
        assert "fake" not in error.message, "nothing is told of the models"
        request.model_name = "fake"
        error = await refused(cluster, request, metadata=blue)
        assert error is not None
        assert (error.reason, error.field) == ("PERMISSION_DENIED", "model")
        other = infer(text("x"), parameters={"max_tokens": 2, "tenant": "blue"})
        error = await refused(cluster, other, metadata=red)
        assert error is not None
        assert (error.reason, error.field) == ("PERMISSION_DENIED", "tenant")
        assert not cluster.workers["p0"].prefills
        assert await refused(cluster, request, metadata=red) is None
        assert cluster.router.usage.totals("red").requests == 1
        for metadata, ready in ((red, True), (blue, False)):
            answer = await own.ModelReady(kserve.ModelReadyRequest(name="fake"), metadata=metadata)
            assert answer.ready is ready
        for call in (
            own.ModelReady(kserve.ModelReadyRequest(name="fake")),
            own.ModelMetadata(kserve.ModelMetadataRequest(name="fake")),
            own.ServerMetadata(kserve.ServerMetadataRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await own.ServerReady(kserve.ServerReadyRequest())).ready, "a probe shows no key"
