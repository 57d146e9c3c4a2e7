# SPDX-License-Identifier: Apache-2.0
"""What the control process writes down of the changes that operators ask for, over a real store and real sockets."""

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.unit.control.test_control_operations import FakePools, Worker, sees, world
from twinpool import rpc
from twinpool.config import RpcConfig, TwinpoolConfig
from twinpool.control.overview.collect import Collector
from twinpool.control.service import ControlServer
from twinpool.errors import from_rpc_error
from twinpool.store import StoreServer, start_store
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import control_pb2_grpc


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    made = start_store(tmp_path_factory.mktemp("store"), prefer_embedded=True)
    yield made
    made.stop()


async def test_operations_are_written_down_and_not_begun_otherwise(
    server: StoreServer, tmp_path: Path
) -> None:
    path, full = tmp_path / "audit.jsonl", "/dev/full"
    async with world(server, "audited", FakePools(managed=True)) as made:
        worker = await Worker(made.store, "audited", 1).start()
        await sees(made, worker)

        async def ask(file: str, method: str) -> str:
            """The id of the operation, or why there is none."""
            config = TwinpoolConfig.model_validate({"audit": {"file": file}})
            collector = Collector(config, made.view, made.operations.all)
            control = ControlServer(config, made.view, made.operations, collector=collector)
            await control.start()
            async with rpc.channel(control.endpoint, RpcConfig()) as channel:
                stub = control_pb2_grpc.ControlServiceStub(channel)
                await stub.ListOperations(pb.ListOperationsRequest(), timeout=60)
                try:
                    if method == "DrainWorker":
                        request = pb.DrainWorkerRequest(worker="w0")
                        return (await stub.DrainWorker(request, timeout=60)).operation.id
                    restart = pb.RestartWorkerRequest(worker="nobody")
                    return (await stub.RestartWorker(restart, timeout=60)).operation.id
                except grpc.aio.AioRpcError as error:
                    return from_rpc_error(error).reason
                finally:
                    await control.stop()
                    await collector.close()

        assert await ask(full, "DrainWorker") == "AUDIT_UNAVAILABLE"
        assert made.operations.all() == []
        name = await ask(str(path), "DrainWorker")
        assert made.operations.get(name).kind == pb.OPERATION_KIND_DRAIN
        assert await ask(str(path), "RestartWorker") == "WORKER_NOT_FOUND"
        await made.ended(made.operations.get(name))
        await worker.stop()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["method"], line["target"], line.get("operation")) for line in lines] == [
        ("ControlService/DrainWorker", "w0", None),
        ("ControlService/DrainWorker", "w0", name),
        ("ControlService/RestartWorker", "nobody", None),
        ("ControlService/RestartWorker", "nobody", ""),
    ]
