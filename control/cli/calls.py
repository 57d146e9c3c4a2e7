# SPDX-License-Identifier: Apache-2.0
"""Calls of the ControlService. One that meets a control process which stands by goes on to the one that leads."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import grpc
import grpc.aio

from twinpool.control.cli.access import access
from twinpool.control.cli.output import err
from twinpool.control.cli.target import control_channel
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import control_pb2_grpc

if TYPE_CHECKING:
    from twinpool.v1.control_pb2_grpc import ControlServiceAsyncStub

    Stub: TypeAlias = ControlServiceAsyncStub
else:
    # The class exists for type checkers alone.
    Stub = control_pb2_grpc.ControlServiceStub

T = TypeVar("T")

CALL_SECONDS: Final = 10.0
"""Longest wait for an answer."""

POLL_SECONDS: Final = 0.1
"""Time between two looks at an operation."""

SILENCE_SECONDS: Final = 60.0
"""Longest wait for a control process that does not answer, which may be restarting or not lead yet."""

HOPS_MAX: Final = 3
"""So often a call goes on to another control process."""


async def ask(endpoint: str, call: Callable[[Stub], Awaitable[T]]) -> T:
    """What ``call`` makes of the leader's stub. Raises TwinpoolError."""
    for _ in range(HOPS_MAX):
        async with control_channel(endpoint) as connection:
            try:
                return await call(control_pb2_grpc.ControlServiceStub(connection))
            except grpc.RpcError as error:
                known = from_rpc_error(error)
                leader = known.metadata.get("leader", "") if known.reason == "NOT_LEADER" else ""
                if not leader or leader == endpoint:
                    raise known from error
                endpoint = access().reach(leader)
    raise TwinpoolError("NOT_LEADER", "the leadership moves from one control process to the next")


async def stream(endpoint: str, call: Callable[[Stub], AsyncIterator[T]]) -> AsyncIterator[T]:
    """As ``ask`` of a call that streams. Raises TwinpoolError."""
    for _ in range(HOPS_MAX):
        async with control_channel(endpoint) as connection:
            try:
                async for message in call(control_pb2_grpc.ControlServiceStub(connection)):
                    yield message
                return
            except grpc.RpcError as error:
                known = from_rpc_error(error)
                leader = known.metadata.get("leader", "") if known.reason == "NOT_LEADER" else ""
                if not leader or leader == endpoint:
                    raise known from error
                endpoint = access().reach(leader)


async def ended(endpoint: str, operation: pb.Operation) -> pb.Operation:
    """Follows an operation to its end, also over a restart of the control process and over its change. Says each step, and
    what it waits for."""
    said, heard_at = "", time.monotonic()
    about = operation.worker.name or operation.pool
    while operation.state == pb.OPERATION_STATE_RUNNING:
        await asyncio.sleep(POLL_SECONDS)
        try:
            asked = pb.GetOperationRequest(id=operation.id)
            answer = await ask(endpoint, lambda stub: stub.GetOperation(asked, timeout=CALL_SECONDS))  # noqa: B023
            operation, heard_at = answer.operation, time.monotonic()
            line = _shown(operation)
        except TwinpoolError as error:
            if not _passing(error) or time.monotonic() - heard_at > SILENCE_SECONDS:
                raise
            line = f"waiting ({error.reason}: {error.message})"
        if line and line != said:
            said = line
            err.print(f"{about}: {line}")
    return operation


def _passing(error: TwinpoolError) -> bool:
    return error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def _shown(operation: pb.Operation) -> str:
    if not operation.steps:
        return ""
    step = operation.steps[-1]
    return f"{step.name} ({step.detail})" if step.detail else step.name
