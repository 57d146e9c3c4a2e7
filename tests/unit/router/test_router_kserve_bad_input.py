# SPDX-License-Identifier: Apache-2.0
"""What the Open Inference Protocol's service refuses: by name, with the limit, before any work starts."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.support.chat_world import chat_cluster, write_chat_model
from tests.support.fake_cluster import FakeCluster
from tests.support.kserve_asking import ids, infer, packed, refused, text
from twinpool.errors import from_rpc_error
from twinpool.router.kserve.service import SERVICE
from twinpool.v1.kserve import open_inference_pb2 as kserve

Change = Callable[[kserve.ModelInferRequest], object]
SECRET = "Rain in Bern"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[FakeCluster]:
    async with chat_cluster(model, "x", max_message_bytes=20_000) as cluster:
        yield cluster
        assert not cluster.workers["p0"].prefills, "work was started"
        await cluster.assert_quiescent()


async def check(cluster: FakeCluster, request: kserve.ModelInferRequest, reason: str, field: str) -> None:
    error = await refused(cluster, request)
    assert error is not None
    assert (error.reason, error.field) == (reason, field), error
    assert SECRET not in error.message, "a refusal does not quote the prompt"
    assert len(error.message) < 500


@pytest.mark.parametrize(
    ("parameters", "reason", "field"),
    [
        ({"surprise": 1}, "UNSUPPORTED_FIELD", "parameters.surprise"),
        ({"model": "other"}, "UNSUPPORTED_FIELD", "parameters.model"),
        ({"sequence_id": 5}, "UNSUPPORTED_FIELD", "parameters.sequence_id"),
        ({"s" * 5000: 1}, "UNSUPPORTED_FIELD", f"parameters.{'s' * 64}…"),
        ({"temperature": "hot"}, "INVALID_ARGUMENT", "parameters.temperature"),
        ({"temperature": True}, "INVALID_ARGUMENT", "parameters.temperature"),
        ({"temperature": float("nan")}, "INVALID_SAMPLING", "sampling.temperature"),
        ({"temperature": 101}, "INVALID_SAMPLING", "sampling.temperature"),
        ({"max_tokens": 1.5}, "INVALID_ARGUMENT", "parameters.max_tokens"),
        ({"max_tokens": -1}, "INVALID_ARGUMENT", "parameters.max_tokens"),
        ({"max_tokens": 0}, "INVALID_STOP", "stop.max_tokens"),
        ({"max_tokens": "1" * 5000}, "INVALID_ARGUMENT", "parameters.max_tokens"),
        ({"top_k": -2}, "INVALID_ARGUMENT", "parameters.top_k"),
        ({"top_k": "[" * 5000}, "INVALID_ARGUMENT", "parameters.top_k"),
        ({"n": 0}, "INVALID_ARGUMENT", "parameters.n"),
        ({"n": 2_000_000_000}, "INVALID_N", "n"),
        ({"beam_width": 4}, "INVALID_ARGUMENT", "parameters.beam_width"),
        ({"stop_token_ids": "[1, -2]"}, "INVALID_ARGUMENT", "parameters.stop_token_ids[1]"),
        ({"stop_token_ids": "[9999]"}, "TOKEN_OUT_OF_VOCABULARY", "stop.stop_token_ids[0]"),
        ({"stop": ""}, "INVALID_STOP", "stop.stop_strings[0]"),
        ({"priority": 202}, "INVALID_ARGUMENT", "parameters.priority"),
        ({"priority": -1}, "INVALID_ARGUMENT", "parameters.priority"),
        ({"timeout": -1}, "INVALID_ARGUMENT", "parameters.timeout"),
        ({"request_id": "a b"}, "INVALID_REQUEST_ID", "request_id"),
        ({"adapter": "mine"}, "ADAPTER_NOT_FOUND", "adapter"),
        ({"idempotency_key": "k" * 200}, "INVALID_RESUME", "idempotency_key"),
        ({"logprobs": 99}, "INVALID_LOGPROBS", "logprobs"),
        ({"stream": True}, "INVALID_ARGUMENT", "stream"),
        ({"stream": 1}, "INVALID_ARGUMENT", "parameters.stream"),
    ],
)
async def test_parameters(cluster: FakeCluster, parameters: dict[str, Any], reason: str, field: str) -> None:
    await check(cluster, infer(text(SECRET), parameters=parameters), reason, field)


@pytest.mark.parametrize(
    ("request_", "reason", "field"),
    [
        (infer(), "EMPTY_PROMPT", "inputs"),
        (infer(text("")), "EMPTY_PROMPT", "text"),
        (infer(ids([])), "EMPTY_PROMPT", "token_ids.ids"),
        (infer(text(SECRET), ids([1])), "INVALID_ARGUMENT", "inputs"),
        (infer(text(SECRET), text(SECRET)), "INVALID_ARGUMENT", "inputs.text_input"),
        (infer(text(SECRET), text("x", "image")), "UNSUPPORTED_FIELD", "inputs.image"),
        (infer(text(SECRET), ("pad_id", "INT32", [0])), "UNSUPPORTED_FIELD", "inputs.pad_id"),
        (infer(("text_input", "BYTES", [b"\xff"])), "INVALID_TEXT", "inputs.text_input"),
        (infer(text(SECRET), ("stop", "BYTES", [b"\xff"])), "INVALID_TEXT", "inputs.stop"),
        (infer(ids([1, -2])), "TOKEN_OUT_OF_VOCABULARY", "inputs.input_ids[1]"),
        (infer(ids([1, 1 << 40])), "TOKEN_OUT_OF_VOCABULARY", "inputs.input_ids[1]"),
        (infer(ids([1, 9999])), "TOKEN_OUT_OF_VOCABULARY", "token_ids.ids[1]"),
        (infer(text(SECRET), ("temperature", "FP32", [101.0])), "INVALID_SAMPLING", "sampling.temperature"),
        (infer(text(SECRET), ("random_seed", "INT32", [1]), parameters={"seed": 2}), "INVALID_ARGUMENT", "inputs.random_seed"),
        (infer(text(SECRET), ("max_tokens", "INT32", [-5])), "INVALID_ARGUMENT", "inputs.max_tokens"),
        (infer(text(SECRET), text("[]", "sampling_parameters")), "INVALID_ARGUMENT", "inputs.sampling_parameters"),
        (infer(text(SECRET), text('{"a": "\\ud800"}', "sampling_parameters")), "INVALID_TEXT", "inputs.sampling_parameters"),
        (infer(text(SECRET), text('{"x": 1}', "sampling_parameters")), "UNSUPPORTED_FIELD", "inputs.sampling_parameters.x"),
        (infer(text(SECRET), text('{"stop": [1]}', "sampling_parameters")), "INVALID_ARGUMENT", "inputs.sampling_parameters.stop[0]"),
        (infer(text(SECRET), outputs=("text_output", "logits")), "UNSUPPORTED_FIELD", "outputs.logits"),
        (infer(text(SECRET), outputs=("text_output", "text_output")), "INVALID_ARGUMENT", "outputs.text_output"),
        (infer(ids([1]), parameters={"exclude_input_in_output": False}), "UNSUPPORTED_FIELD", "exclude_input_in_output"),
        (infer(text(SECRET), model_name="other"), "MODEL_NOT_FOUND", "model"),
        (infer(text(SECRET), model_version="2"), "MODEL_NOT_FOUND", "model_version"),
        (infer(text(SECRET), id="i" * 129), "INVALID_REQUEST_ID", "id"),
    ],
)  # fmt: skip
async def test_requests(
    cluster: FakeCluster, request_: kserve.ModelInferRequest, reason: str, field: str
) -> None:
    await check(cluster, request_, reason, field)


def reshape(*shape: int) -> Change:
    def change(request: kserve.ModelInferRequest) -> None:
        request.inputs[0].shape[:] = shape

    return change


def retype(datatype: str) -> Change:
    return lambda request: setattr(request.inputs[0], "datatype", datatype)


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        (reshape(), "inputs.text_input.shape", r"\[\]; the limit is \[1\] or \[1, 1\]"),
        (reshape(2), "inputs.text_input.shape", r"\[2\]"),
        (reshape(1, 1, 1), "inputs.text_input.shape", r"\[1, 1, 1\]"),
        (reshape(-1), "inputs.text_input.shape", r"\[-1\]"),
        (reshape(*[1] * 3000), "inputs.text_input.shape", "3000 dimensions"),
        (retype("FP32"), "inputs.text_input.datatype", "'FP32'; the limit is BYTES"),
        (retype(""), "inputs.text_input.datatype", "''; the limit is BYTES"),
        (retype("B" * 5000), "inputs.text_input.datatype", "the limit is BYTES"),
        (lambda r: r.inputs[0].contents.bytes_contents.append(b"y"), "inputs.text_input", "2 elements"),
        (lambda r: r.inputs[0].ClearField("contents"), "inputs.text_input", "0 elements"),
        (lambda r: r.inputs[0].contents.int_contents.append(5), "inputs.text_input.contents.int_contents", "bytes_contents"),
        (lambda r: r.raw_input_contents.append(packed("BYTES", [b"y"])), "inputs.text_input.contents", "raw_input_contents"),
        (lambda r: r.raw_input_contents.extend([b"", b""]), "raw_input_contents", "2 entries; the limit is one for each of 1"),
        (lambda r: r.parameters["seed"].Clear(), "parameters.seed", "no value"),
    ],
)  # fmt: skip
async def test_tensors(cluster: FakeCluster, change: Change, field: str, says: str) -> None:
    request = infer(text(SECRET))
    change(request)
    await check(cluster, request, "INVALID_ARGUMENT", field)
    error = await refused(cluster, request)
    assert error is not None
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(error.message)


@pytest.mark.parametrize(
    ("name", "datatype", "raw", "says"),
    [
        ("text_input", "BYTES", b"\x05\0\0\0ab", "end within element 0"),
        ("text_input", "BYTES", b"\x01\0\0\0a\x01\0", "end within element 1"),
        ("text_input", "BYTES", b"\xff\xff\xff\xffab", "end within element 0"),
        ("text_input", "BYTES", b"", "0 elements"),
        ("input_ids", "INT64", b"\x01\0\0\0\0\0\0", "7 bytes; the limit is a multiple of 8"),
        ("input_ids", "INT32", bytes(8), "2 elements; the limit is those of its shape, 1"),
    ],
)
async def test_raw_contents(cluster: FakeCluster, name: str, datatype: str, raw: bytes, says: str) -> None:
    request = kserve.ModelInferRequest(raw_input_contents=[raw])
    request.inputs.add(name=name, datatype=datatype, shape=[1])
    error = await refused(cluster, request)
    assert error is not None
    assert (error.reason, error.field) == ("INVALID_ARGUMENT", f"inputs.{name}")
    assert says in error.message


async def test_memory_is_not_shared(cluster: FakeCluster) -> None:
    request = infer(text(SECRET))
    request.inputs[0].parameters["shared_memory_region"].string_param = "mine"
    await check(cluster, request, "UNSUPPORTED_FIELD", "inputs.text_input.parameters.shared_memory_region")
    request = infer(text(SECRET), outputs=("text_output",))
    request.outputs[0].parameters["classification"].int64_param = 3
    await check(cluster, request, "UNSUPPORTED_FIELD", "outputs.text_output.parameters.classification")


@pytest.mark.parametrize(
    ("data", "reason", "field"),
    [
        (b"\xff\xff", "INVALID_ARGUMENT", None),
        (b"\x0a\x01\xff", "INVALID_TEXT", "model_name"),
        (b"\x2a\x03\x0a\x01\xff", "INVALID_TEXT", "inputs[0].name"),
        (infer(text(SECRET)).SerializeToString() + b"\xa0\x06\x01", "INVALID_ARGUMENT", None),
        (b"\x2a\x0f\x0a\x0atext_input\xa0\x06\x01", "INVALID_ARGUMENT", "inputs.text_input"),
    ],
)
async def test_bytes(cluster: FakeCluster, data: bytes, reason: str, field: str | None) -> None:
    call: Any = cluster.channel.unary_unary(f"/{SERVICE}/ModelInfer")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(data)
    error = from_rpc_error(caught.value)
    assert (error.reason, error.field) == (reason, field)


async def test_a_message_that_is_too_large(cluster: FakeCluster) -> None:
    error = await refused(cluster, infer(text("x" * 30_000)))
    assert error is not None
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_method_that_is_left_out(cluster: FakeCluster) -> None:
    call: Any = cluster.channel.unary_unary(f"/{SERVICE}/RepositoryModelLoad")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
