# SPDX-License-Identifier: Apache-2.0
"""Requests of the Open Inference Protocol as its clients make them, and their answers as Python values."""

import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import numpy as np

from tests.support.fake_cluster import FakeCluster
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.router.kserve.service import SERVICE
from twinpool.v1.kserve import open_inference_pb2 as kserve
from twinpool.v1.kserve.open_inference_pb2_grpc import GRPCInferenceServiceStub

FIELDS = {
    "BOOL": "bool_contents", "INT32": "int_contents", "INT64": "int64_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
DTYPES = {
    "BOOL": "?", "INT32": "<i4", "INT64": "<i8", "UINT32": "<u4", "UINT64": "<u8", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip

Tensor = tuple[str, str, Sequence[Any]]
"""Name, datatype, elements."""


def text(value: str, name: str = "text_input") -> Tensor:
    return name, "BYTES", [value.encode()]


def ids(values: Sequence[int], datatype: str = "INT64") -> Tensor:
    return "input_ids", datatype, values


def infer(
    *tensors: Tensor, raw: bool = False, outputs: Sequence[str] = (), parameters: Mapping[str, Any] | None = None, **fields: Any
) -> kserve.ModelInferRequest:  # fmt: skip
    """A request; typed contents, or raw ones."""
    request = kserve.ModelInferRequest(**fields)
    for name, datatype, values in tensors:
        tensor = request.inputs.add(name=name, datatype=datatype, shape=[len(values)])
        if raw:
            request.raw_input_contents.append(packed(datatype, values))
        else:
            getattr(tensor.contents, FIELDS[datatype]).extend(values)
    for name in outputs:
        request.outputs.add(name=name)
    for name, value in (parameters or {}).items():
        put(request.parameters[name], value)
    return request


def put(parameter: kserve.InferParameter, value: Any) -> None:
    """By the type of the value, as Triton's client does."""
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    setattr(parameter, kinds[type(value)], value)


def packed(datatype: str, values: Sequence[Any]) -> bytes:
    """Raw contents."""
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(value)) + value for value in values)
    return np.asarray(values, DTYPES[datatype]).tobytes()


def read(response: kserve.ModelInferResponse) -> dict[str, Any]:
    """The outputs by name, in their shapes; BYTES as text."""
    found: dict[str, Any] = {}
    for at, tensor in enumerate(response.outputs):
        if response.raw_output_contents:
            raw = response.raw_output_contents[at]
            values = (
                _unpacked(raw)
                if tensor.datatype == "BYTES"
                else np.frombuffer(raw, DTYPES[tensor.datatype]).tolist()
            )
        else:
            values = list(getattr(tensor.contents, FIELDS[tensor.datatype]))
        if tensor.datatype == "BYTES":
            values = [value.decode() for value in values]
        found[tensor.name] = np.array(values, dtype=object).reshape(tuple(tensor.shape)).tolist()
    return found


def _unpacked(raw: bytes) -> list[bytes]:
    values = []
    while raw:
        (size,) = struct.unpack_from("<I", raw)
        values.append(raw[4 : 4 + size])
        raw = raw[4 + size :]
    return values


def told(response: kserve.ModelInferResponse) -> dict[str, Any]:
    """The parameters of a response as Python values."""
    return {
        name: getattr(value, str(value.WhichOneof("parameter_choice")))
        for name, value in response.parameters.items()
    }


def stub(cluster: FakeCluster) -> GRPCInferenceServiceStub:
    return GRPCInferenceServiceStub(cluster.channel)


async def refused(
    cluster: FakeCluster, request: kserve.ModelInferRequest, **call: Any
) -> TwinpoolError | None:
    """Why a request is refused; None if it is not."""
    try:
        await stub(cluster).ModelInfer(request, timeout=120, **call)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    return None


class Stream:
    """A stream under way."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, *requests: Any) -> None:
        for request in requests:
            data = request if isinstance(request, bytes) else request.SerializeToString()
            await self.call.write(data)

    async def receive(self) -> kserve.ModelStreamInferResponse | None:
        """The next response; None: there is none any more."""
        found = await self.call.read()
        return None if found is grpc.aio.EOF else kserve.ModelStreamInferResponse.FromString(found)

    async def rest(self) -> list[kserve.ModelStreamInferResponse]:
        """All responses that still come."""
        found = []
        while (response := await self.receive()) is not None:
            found.append(response)
        return found

    async def until_final(self) -> list[kserve.ModelStreamInferResponse]:
        """All responses up to the first one that says that its request has ended."""
        found = []
        while (response := await self.receive()) is not None:
            found.append(response)
            if told(response.infer_response)["triton_final_response"]:
                return found
        raise AssertionError("the stream has ended before")


@asynccontextmanager
async def streaming(
    cluster: FakeCluster, channel: grpc.aio.Channel | None = None, **call: Any
) -> AsyncIterator[Stream]:
    """A stream, of bytes: also of those that are no request. ``channel``: instead of the cluster's own."""
    opened: Any = (channel or cluster.channel).stream_stream(f"/{SERVICE}/ModelStreamInfer")(
        timeout=120, **call
    )
    try:
        yield Stream(opened)
    finally:
        opened.cancel()
