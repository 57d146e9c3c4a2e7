# SPDX-License-Identifier: Apache-2.0
"""Triton's own client, run by a Python that has it: ``python triton_client.py HOST:PORT``.

It asks as the samples of Triton's vLLM backend do, and prints what it got, with the numbers of the fields that it knows.
"""

import asyncio
import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2

PARAMETERS = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "100"}


def tensor(name: str, datatype: str, values: list[Any]) -> triton.InferInput:
    kinds = {"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32, "FP32": np.float32}
    made = triton.InferInput(name, [len(values)], datatype)
    made.set_data_from_numpy(np.array(values, dtype=kinds[datatype]))
    return made


def request(prompt: str, name: str, *, stream: bool) -> dict[str, Any]:
    """Sampling parameters twice: as a tensor and as parameters."""
    return {
        "model_name": "fake",
        "inputs": [
            tensor("text_input", "BYTES", [prompt.encode()]),
            tensor("stream", "BOOL", [stream]),
            tensor("sampling_parameters", "BYTES", [json.dumps(PARAMETERS).encode()]),
        ],
        "outputs": [triton.InferRequestedOutput("text_output")],
        "request_id": name,
        "parameters": PARAMETERS,
    }


def whole(client: triton.InferenceServerClient) -> dict[str, Any]:
    """One request with ids, all outputs."""
    inputs = [tensor("input_ids", "INT32", list(b"Rain?")), tensor("max_tokens", "INT32", [8])]
    result = client.infer("fake", inputs, request_id="whole", priority=1, timeout=60_000_000)
    return {
        "text": result.as_numpy("text_output")[0].decode(),
        "ids": result.as_numpy("output_ids").tolist(),
        "finish": result.as_numpy("finish_reason")[0].decode(),
        "counts": [int(result.as_numpy(name)[0]) for name in ("num_input_tokens", "num_output_tokens")],
        "id": result.get_response().id,
    }


def streamed(client: triton.InferenceServerClient) -> dict[str, Any]:
    """Two requests and one that is refused, by callback on one stream."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    for name in ("one", "two"):
        client.async_stream_infer(**request("Rain?", name, stream=True), enable_empty_final_response=True)
    client.async_stream_infer("other", [tensor("text_input", "BYTES", [b"x"])])
    texts = {"one": "", "two": ""}
    errors, last = [], 0
    while last < 2 or not errors:
        result, error = answers.get(timeout=120)
        if error is not None:
            errors.append(str(error))
            continue
        response = result.get_response()
        texts[response.id] += result.as_numpy("text_output")[0].decode()
        last += response.parameters["triton_final_response"].bool_param
    client.stop_stream()
    return {"texts": texts, "errors": errors}


async def sample(address: str) -> dict[str, str]:
    """As the sample does: each line of a stream's answer gathered by its request's id."""
    found = {"0": "", "1": ""}

    async def requests() -> Any:
        for name, stream in (("0", False), ("1", True)):
            yield request("Rain?", name, stream=stream)

    async with triton_aio.InferenceServerClient(address) as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            for text in result.as_numpy("text_output"):
                found[result.get_response().id] += text.decode()
    return found


def numbers() -> dict[str, dict[str, list[int]]]:
    """Number and type of each field of each message, by names."""
    found: dict[str, dict[str, list[int]]] = {}

    def walk(message: Any) -> None:
        found[message.full_name] = {field.name: [field.number, field.type] for field in message.fields}
        for nested in message.nested_types:
            walk(nested)

    for message in service_pb2.DESCRIPTOR.message_types_by_name.values():
        walk(message)
    return found


def main() -> None:
    client = triton.InferenceServerClient(sys.argv[1])
    metadata = client.get_model_metadata("fake")
    print(
        json.dumps(
            {
                "live": [client.is_server_live(), client.is_server_ready()],
                "models": [client.is_model_ready(name) for name in ("fake", "other")],
                "server": client.get_server_metadata().name,
                "inputs": sorted(tensor.name for tensor in metadata.inputs)[:3],
                "whole": whole(client),
                "streamed": streamed(client),
                "sample": asyncio.run(sample(sys.argv[1])),
                "numbers": numbers(),
            }
        )
    )


main()
