# SPDX-License-Identifier: Apache-2.0
"""`twinpool describe operation` against a ControlService over gRPC."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from click.testing import Result
from typer.testing import CliRunner

from twinpool import rpc
from twinpool.config import RpcConfig
from twinpool.control.cli.main import app
from twinpool.control.events import Filter
from twinpool.control.service import SERVICE, ControlServicer
from twinpool.errors import TABLE, TwinpoolError
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import control_pb2_grpc, worker_pb2

BEGAN = 1_700_000_000


def operation(name: str, **more: Any) -> pb.Operation:
    made = pb.Operation(id=name, state=pb.OPERATION_STATE_SUCCEEDED, pool="default", **more)
    made.created_at.seconds, made.ended_at.seconds = BEGAN, BEGAN + 9
    return made


def step(made: pb.Operation, name: str, began: int, done: int | None, detail: str = "") -> None:
    added = made.steps.add(name=name, detail=detail)
    added.began_at.seconds = BEGAN + began
    if done is not None:
        added.done_at.seconds = BEGAN + done


class Known:
    """Operations and events of the test's own, the newest first."""

    def __init__(self) -> None:
        self.parent = operation("rebalance-1", kind=pb.OPERATION_KIND_REBALANCE, reason="2:1 was asked for")
        self.done = operation(
            "w0-1", kind=pb.OPERATION_KIND_FLIP, parent="rebalance-1", target_role=worker_pb2.ROLE_PREFILL
        )
        self.done.worker.name, self.done.timeout.seconds = "w0", 30
        step(self.done, "ask", 0, 1)
        step(self.done, "drain", 1, 8)
        self.failed = operation("w1-1", kind=pb.OPERATION_KIND_FLIP, parent="rebalance-1")
        self.failed.created_at.seconds += 1
        self.failed.worker.name = "w1"
        self.failed.state, self.failed.error = pb.OPERATION_STATE_FAILED, "FLIP_FAILED: w1: [planted]"
        step(self.failed, "drain", 1, None, "what runs has not ended")

    def all(self) -> list[pb.Operation]:
        return [self.failed, self.done, self.parent]

    def get(self, name: str) -> pb.Operation:
        for each in self.all():
            if each.id == name:
                return each
        raise TwinpoolError("OPERATION_NOT_FOUND", f"there is no operation {name!r}")

    def check(self, *, changes: bool) -> None:
        pass

    def events(self, wanted: Filter) -> list[pb.Event]:
        every = [pb.Event(id="e1", operation="w1-1", reason="OperationFailed", message="it did not end")]
        return [event for event in every if wanted.takes(event)]


@pytest.fixture
async def endpoint() -> AsyncIterator[str]:
    known, server = cast(Any, Known()), rpc.Server(RpcConfig())
    servicer = ControlServicer(cast(Any, None), known, desk=known)
    server.add(SERVICE, control_pb2_grpc.add_ControlServiceServicer_to_server, servicer)
    port = server.bind("127.0.0.1")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0.0)


async def run(endpoint: str, *arguments: str) -> Result:
    command = ["describe", "operation", *arguments, "--control", endpoint]
    return await asyncio.to_thread(CliRunner().invoke, app, command)


async def described(endpoint: str, name: str) -> dict[str, Any]:
    done = await run(endpoint, name, "-o", "json")
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


async def test_steps_have_their_times(endpoint: str) -> None:
    found = await described(endpoint, "w0-1")
    assert found["steps"] == [
        {"step": "ask", "began": "2023-11-14T22:13:20.000Z", "done": "2023-11-14T22:13:21.000Z"}
        | {"seconds": 1.0, "waits_for": ""},
        {"step": "drain", "began": "2023-11-14T22:13:21.000Z", "done": "2023-11-14T22:13:28.000Z"}
        | {"seconds": 7.0, "waits_for": ""},
    ]
    assert (found["seconds"], found["timeout_seconds"], found["worker"], found["to"]) == (
        9.0,
        30.0,
        "w0",
        "prefill",
    )
    assert (found["parent"], found["children"], found["what_to_do"]) == ("rebalance-1", [], "")


async def test_what_failed_says_what_to_do_and_where_it_stood(endpoint: str) -> None:
    found = await described(endpoint, "w1-1")
    assert found["what_to_do"] == TABLE["FLIP_FAILED"].user_action
    assert [(each["step"], each["done"], each["waits_for"]) for each in found["steps"]] == [
        ("drain", None, "what runs has not ended")
    ]
    assert [event["reason"] for event in found["events"]] == ["OperationFailed"]


async def test_a_parent_shows_its_parts_in_their_order_and_a_part_its_parent(endpoint: str) -> None:
    found = await described(endpoint, "rebalance-1")
    assert [child["id"] for child in found["children"]] == ["w0-1", "w1-1"]
    assert found["reason"] == "2:1 was asked for"
    done = await run(endpoint, "w1-1")
    assert done.exit_code == 0, done.output
    for part in (
        "rebalance-1",
        "FLIP_FAILED: w1: [planted]",
        TABLE["FLIP_FAILED"].user_action,
        "it did not end",
    ):
        assert part in done.output


async def test_one_that_is_not_there(endpoint: str) -> None:
    done = await run(endpoint, "nothing")
    assert (done.exit_code, "OPERATION_NOT_FOUND" in done.output) == (2, True)
