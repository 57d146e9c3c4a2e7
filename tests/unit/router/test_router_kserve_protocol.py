# SPDX-License-Identifier: Apache-2.0
"""The definition of the Open Inference Protocol is the public one."""

from typing import Any

from twinpool.router.kserve.service import SERVICE
from twinpool.v1.kserve import open_inference_pb2 as kserve

NUMBERS: dict[str, dict[str, int]] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": 1},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": 1},
    "ModelReadyRequest": {"name": 1, "version": 2},
    "ModelReadyResponse": {"ready": 1},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {"name": 1, "version": 2, "extensions": 3},
    "ModelMetadataRequest": {"name": 1, "version": 2},
    "ModelMetadataResponse": {"name": 1, "versions": 2, "platform": 3, "inputs": 4, "outputs": 5},
    "ModelMetadataResponse.TensorMetadata": {"name": 1, "datatype": 2, "shape": 3},
    "InferParameter": {
        "bool_param": 1, "int64_param": 2, "string_param": 3, "double_param": 4, "uint64_param": 5,
    },
    "InferTensorContents": {
        "bool_contents": 1, "int_contents": 2, "int64_contents": 3, "uint_contents": 4,
        "uint64_contents": 5, "fp32_contents": 6, "fp64_contents": 7, "bytes_contents": 8,
    },
    "ModelInferRequest": {
        "model_name": 1, "model_version": 2, "id": 3, "parameters": 4, "inputs": 5, "outputs": 6,
        "raw_input_contents": 7,
    },
    "ModelInferRequest.InferInputTensor": {
        "name": 1, "datatype": 2, "shape": 3, "parameters": 4, "contents": 5,
    },
    "ModelInferRequest.InferRequestedOutputTensor": {"name": 1, "parameters": 2},
    "ModelInferResponse": {
        "model_name": 1, "model_version": 2, "id": 3, "parameters": 4, "outputs": 5, "raw_output_contents": 6,
    },
    "ModelInferResponse.InferOutputTensor": {
        "name": 1, "datatype": 2, "shape": 3, "parameters": 4, "contents": 5,
    },
    "ModelStreamInferResponse": {"error_message": 1, "infer_response": 2},
}  # fmt: skip
"""Of the public definition: a number that differs is a client that misreads."""


def test_fields_have_the_numbers_of_the_public_definition() -> None:
    found: dict[str, dict[str, int]] = {}

    def walk(message: Any) -> None:
        if not message.GetOptions().map_entry:
            name = message.full_name.removeprefix("inference.")
            found[name] = {field.name: field.number for field in message.fields}
            for nested in message.nested_types:
                walk(nested)

    for message in kserve.DESCRIPTOR.message_types_by_name.values():
        walk(message)
    assert found == NUMBERS
    assert SERVICE == "inference.GRPCInferenceService"
