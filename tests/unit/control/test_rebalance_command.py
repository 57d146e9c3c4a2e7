# SPDX-License-Identifier: Apache-2.0
"""`twinpool rebalance` against a ControlService over gRPC."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.unit.control.rebalancing_pool import Pool, desk_of, loop_of
from twinpool import rpc
from twinpool.config import RpcConfig
from twinpool.control.cli.main import app
from twinpool.control.rebalance.desk import RebalanceDesk
from twinpool.control.service import SERVICE, ControlServicer
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import control_pb2_grpc


class Operations:
    """Runs the steps of what is submitted, and answers for it."""

    def __init__(self, around: Pool) -> None:
        self._around = around
        self.steps: dict[str, Any] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def submit(self, operation: pb.Operation) -> pb.Operation:
        self._around.operations.append(operation)
        self.tasks.append(asyncio.create_task(self._run(operation)))
        return operation

    def get(self, name: str) -> pb.Operation:
        return self._around.get(name)

    async def _run(self, operation: pb.Operation) -> None:
        for step in self.steps.values():
            await step(operation)
        operation.state = pb.OPERATION_STATE_SUCCEEDED


@asynccontextmanager
async def serving(around: Pool, *, rebalances: bool = True) -> AsyncIterator[str]:
    operations = Operations(around)
    made = desk_of(around, loop_of(around), operations.submit)
    operations.steps = dict(made.steps)
    desk: RebalanceDesk | None = made if rebalances else None
    server = rpc.Server(RpcConfig())
    servicer = ControlServicer(cast(Any, None), cast(Any, operations), rebalance=desk)
    server.add(SERVICE, control_pb2_grpc.add_ControlServiceServicer_to_server, servicer)
    port = server.bind("127.0.0.1")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0.0)
        await asyncio.gather(*operations.tasks, return_exceptions=True)


async def run(endpoint: str, *arguments: str) -> Result:
    command = ["rebalance", *arguments, "--control", endpoint]
    return await asyncio.to_thread(CliRunner().invoke, app, command)


async def test_flips_to_the_numbers_that_were_asked_for() -> None:
    around = Pool(at_once=True)
    async with serving(around) as endpoint:
        done = await run(endpoint, "default", "--prefill", "5", "--wait", "--yes", "-o", "json")
        assert done.exit_code == 0, done.output
        answer = json.loads(done.stdout)
        assert [move["worker"] for move in answer["moves"]] == ["decode-0", "decode-1"]
        assert (answer["prefill"], answer["decode"], answer["added"]) == (5, 1, 0)
        assert answer["operation"]["state"] == "succeeded"
        assert answer["operation"]["kind"] == "rebalance"
    assert around.count("prefill") == 5


async def test_a_dry_run_shows_the_plan_and_begins_nothing() -> None:
    around = Pool()
    async with serving(around) as endpoint:
        done = await run(endpoint, "--decode", "4", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "prefill-0" in done.output
    assert "2:4 was asked for" in done.output
    assert around.operations == []


async def test_auto_is_switched() -> None:
    around = Pool()
    async with serving(around) as endpoint:
        done = await run(endpoint, "default", "--auto", "off", "-o", "json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["auto"] is False
        assert not around.spec.auto
        await run(endpoint, "default", "--auto", "on")
        assert around.spec.auto


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--prefill", "2"), 2, "pass --yes"),
        (("--prefill", "2", "--auto", "on"), 2, "exclude one another"),
        (("--prefill", "6", "--yes"), 2, "outside of the bounds"),
        (("elsewhere", "--prefill", "2", "--yes"), 2, "there are: default"),
        (("--yes",), 2, "not known yet"),
    ],
)
async def test_says_what_can_not_be(arguments: tuple[str, ...], code: int, said: str) -> None:
    around = Pool()
    async with serving(around) as endpoint:
        done = await run(endpoint, *arguments)
    assert done.exit_code == code, done.output
    assert said in done.output
    assert around.operations == []


async def test_a_control_process_without_a_rebalancer_says_so() -> None:
    async with serving(Pool(), rebalances=False) as endpoint:
        done = await run(endpoint, "--prefill", "2", "--yes")
    assert done.exit_code == 1
    assert "UNIMPLEMENTED" in done.output
