# SPDX-License-Identifier: Apache-2.0
"""The audit log: what is written of administrative calls, of refused ones too, and what happens if it cannot be."""

import io
import json
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from google.protobuf import message_factory
from google.protobuf.duration_pb2 import Duration

from tests.support.transports import each_rpc_transport  # noqa: F401
from tests.unit.base.test_base_roles import DOMAIN, Pki
from twinpool import logs, metrics, rpc
from twinpool.config import RpcConfig, TlsConfig
from twinpool.errors import ConfigError, TwinpoolError, from_rpc_error
from twinpool.rpc.audit import CHARS_MAX, METHODS, _shown
from twinpool.v1 import control_pb2, control_pb2_grpc, router_pb2, worker_pb2, worker_pb2_grpc

CONFIG = RpcConfig()
UNAUDITED = {
    # They say what the cluster is, and are asked again and again.
    "ControlService/GetConfig",
    "ControlService/ListWorkers",
    "ControlService/GetOperation",
    "ControlService/ListOperations",
    "ControlService/ListPools",
    "ControlService/DescribeWorker",
    "ControlService/ListEvents",
    "ControlService/WatchEvents",
    "ControlService/GetOverview",
    "ControlService/WatchOverview",
    "WorkerService/Inspect",
    "RouterService/GetTelemetry",
    "RouterService/ListHotPrefixes",
    # The control process alone may ask, and writes down who asked it.
    "RouterService/ListRouterRequests",
    # Work, and what processes of the cluster tell one another.
    "WorkerService/Session",
    "WorkerService/TakePrefixes",
    "WorkerService/TakeOver",
    "WorkerService/PinPrefix",
    "WorkerService/ReleasePrefix",
    "RouterService/HandOver",
}


class Control(control_pb2_grpc.ControlServiceServicer, worker_pb2_grpc.WorkerServiceServicer):
    """Does nothing, and counts what it is told to do."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def DrainWorker(
        self, request: control_pb2.DrainWorkerRequest, context: Any
    ) -> control_pb2.DrainWorkerResponse:
        self.told.append(request.worker)
        if request.worker == "nobody":
            raise TwinpoolError("WORKER_NOT_FOUND")
        return control_pb2.DrainWorkerResponse(operation=control_pb2.Operation(id=f"{request.worker}-1"))

    async def ListWorkers(
        self, request: control_pb2.ListWorkersRequest, context: Any
    ) -> control_pb2.ListWorkersResponse:
        return control_pb2.ListWorkersResponse()

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:
        self.told.append(request.worker.name)
        return worker_pb2.DrainResponse()


class World:
    def __init__(self, path: str, tls: TlsConfig | None = None) -> None:
        self.servicer = Control()
        self.server = rpc.Server(CONFIG, tls, audit=rpc.AuditLog(path, "control"))
        self.server.add(
            "twinpool.v1.ControlService",
            control_pb2_grpc.add_ControlServiceServicer_to_server,
            self.servicer,
        )
        self.server.add(
            "twinpool.v1.WorkerService", worker_pb2_grpc.add_WorkerServiceServicer_to_server, self.servicer
        )
        self.endpoint = f"127.0.0.1:{self.server.bind('127.0.0.1')}"

    async def drain(self, worker: str, tls: TlsConfig | None = None, key: str = "") -> str:
        """The id of the operation, or why there is none."""
        async with rpc.channel(
            self.endpoint, CONFIG, tls, role="control" if tls is not None else None, key=key
        ) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            wait = Duration(seconds=7, nanos=500_000_000)
            try:
                found = await stub.DrainWorker(
                    control_pb2.DrainWorkerRequest(worker=worker, timeout=wait), timeout=60
                )
            except grpc.aio.AioRpcError as error:
                return from_rpc_error(error).reason
            return found.operation.id


@asynccontextmanager
async def world(path: Path | str, tls: TlsConfig | None = None) -> AsyncIterator[World]:
    made = World(str(path), tls)
    await made.server.start()
    yield made
    await made.server.stop(0)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_method_is_audited_or_said_not_to_be() -> None:
    methods = {
        f"{service}/{method}"
        for file in (control_pb2, router_pb2, worker_pb2)
        for service, found in file.DESCRIPTOR.services_by_name.items()
        for method in found.methods_by_name
    }
    assert set(METHODS) | UNAUDITED == methods
    assert set(METHODS) & UNAUDITED == set()


def test_every_argument_can_be_shown() -> None:
    """Of whatever kind it is, set or not."""
    for file in (control_pb2, router_pb2, worker_pb2):
        for service, found in file.DESCRIPTOR.services_by_name.items():
            for name, method in found.methods_by_name.items():
                audited = METHODS.get(f"{service}/{name}")
                if audited is None:
                    continue
                kind = message_factory.GetMessageClass(method.input_type)
                for field in (*audited.arguments, *([audited.target] if audited.target else [])):
                    assert _shown(kind(), field) in ("", 0, False, "ROLE_UNSPECIFIED")
                    asked = kind()
                    part = method.input_type.fields_by_name[field]
                    if part.is_repeated:
                        assert _shown(_with_two(asked, field), field) in ("a, b", "a=1, b=2")
                    elif part.message_type is not None:
                        getattr(asked, field).SetInParent()
                        assert _shown(asked, field) != ""
                    elif part.type == part.TYPE_STRING:
                        setattr(asked, field, "x")
                        assert _shown(asked, field) == "x"
                    else:
                        setattr(asked, field, 1)
                        shown = part.enum_type.values_by_number[1].name if part.enum_type is not None else 1
                        assert _shown(asked, field) == shown


def _with_two(asked: Any, field: str) -> Any:
    if asked.DESCRIPTOR.fields_by_name[field].message_type is None:
        getattr(asked, field).extend(["a", "b"])
    else:
        for key, value in (("a", "1"), ("b", "2")):
            getattr(asked, field).add(key=key, value=value)
    return asked


async def test_a_change_has_a_line_before_and_one_after(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    async with world(path) as made:
        assert await made.drain("w0", key="tp-the-key") == "w0-1"
        assert await made.drain("nobody") == "WORKER_NOT_FOUND"
    begin, end, asked, failed = lines(path)
    for line in (begin, end):
        assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)
        assert (line["process"], line["method"], line["target"]) == (
            "control",
            "ControlService/DrainWorker",
            "w0",
        )
        assert line["arguments"] == {"timeout": 7.5}
        assert line["who"]["key"] == rpc.digest_of("tp-the-key")[:23]
        assert line["who"]["peer"].startswith("ipv4:127.0.0.1:")
    assert (begin["stage"], end["stage"]) == ("begin", "end")
    assert begin["id"] == end["id"] != asked["id"]
    assert (end["code"], end["reason"], end["operation"]) == ("OK", "", "w0-1")
    assert end["seconds"] >= 0
    assert (failed["stage"], failed["code"], failed["reason"]) == ("end", "NOT_FOUND", "WORKER_NOT_FOUND")
    assert failed["who"]["key"] == ""
    assert "tp-the-key" not in path.read_text(), "no key is ever written"


async def test_who_may_not_is_written_down_by_the_names_of_its_certificate(tmp_path: Path) -> None:
    path, pki = tmp_path / "audit.jsonl", Pki(tmp_path)
    async with world(path, pki.of("control")) as made:
        assert await made.drain("w0", pki.of("worker", "w-0")) == "PERMISSION_DENIED"
        assert made.servicer.told == []
        assert await made.drain("w0", pki.of("operator", "ann")) == "w0-1"
        async with rpc.channel(made.endpoint, CONFIG, pki.of("operator", "ann"), role="control") as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            await stub.ListWorkers(control_pb2.ListWorkersRequest(), timeout=60)
        async with rpc.channel(made.endpoint, CONFIG, pki.of("stranger"), role="control") as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.ListWorkers(control_pb2.ListWorkersRequest(), timeout=60)
    refused, begin, end, unlisted = lines(path)
    assert (refused["stage"], refused["code"]) == ("end", "PERMISSION_DENIED")
    assert f"w-0.worker.{DOMAIN}" in refused["who"]["names"]
    assert begin["stage"] == "begin"
    assert f"ann.operator.{DOMAIN}" in end["who"]["names"]
    assert (unlisted["method"], unlisted["reason"]) == ("ControlService/ListWorkers", "PERMISSION_DENIED")


async def test_a_worker_s_drain_names_the_worker(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    async with world(path) as made, rpc.channel(made.endpoint, CONFIG) as channel:
        request = worker_pb2.DrainRequest(worker=worker_pb2.WorkerId(name="w0", incarnation=5))
        await worker_pb2_grpc.WorkerServiceStub(channel).Drain(request, timeout=60)
    assert [(line["target"], line["arguments"]) for line in lines(path)] == [("w0/5", {})] * 2


async def test_what_a_caller_chooses_is_cut_and_stays_in_its_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    async with world(path) as made:
        await made.drain('x\n{"forged": true}\u2028' * 100)
    assert [len(line["target"]) for line in lines(path)] == [CHARS_MAX] * 2


async def test_a_file_that_was_renamed_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    async with world(path) as made:
        await made.drain("w0")
        path.rename(tmp_path / "audit.1")
        await made.drain("w1")
        path.unlink()
        path.write_text("")
        await made.drain("w2")
    assert [line["target"] for line in lines(tmp_path / "audit.1")] == ["w0", "w0"]
    assert [line["target"] for line in lines(path)] == ["w2", "w2"]
    assert (tmp_path / "audit.1").stat().st_mode & 0o077 == 0


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What the process logs."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    logs.setup("info", True, stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def logged(stream: io.StringIO, event: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, stream.getvalue().splitlines()) if line["event"] == event]


async def test_without_an_audit_log_nothing_is_changed(log: io.StringIO) -> None:
    before = metrics.AUDIT_WRITE_FAILURES._value.get()
    async with world("/dev/full") as made:
        assert await made.drain("w0") == "AUDIT_UNAVAILABLE"
        assert made.servicer.told == []
    assert metrics.AUDIT_WRITE_FAILURES._value.get() == before + 2
    assert [line["stage"] for line in logged(log, "audit")] == ["begin", "end"], "the log has them instead"
    assert logged(log, "audit")[1]["reason"] == "AUDIT_UNAVAILABLE"
    assert len(logged(log, "audit_write_failed")) == 2


async def test_a_change_whose_end_cannot_be_written_is_answered(tmp_path: Path, log: io.StringIO) -> None:
    path = tmp_path / "audit.jsonl"
    async with world(path) as made:
        inner = made.servicer.told

        class Told(list[str]):
            def append(self, worker: str) -> None:
                inner.append(worker)
                path.unlink()
                path.mkdir()

        made.servicer.told = Told()
        assert await made.drain("w0") == "w0-1"
    (line,) = logged(log, "audit")
    assert (line["stage"], line["code"], line["operation"]) == ("end", "OK", "w0-1")


async def test_without_a_file_the_log_has_the_lines(log: io.StringIO) -> None:
    async with world("") as made:
        await made.drain("w0", key="tp-the-key")
    assert [line["stage"] for line in logged(log, "audit")] == ["begin", "end"]
    assert "tp-the-key" not in log.getvalue()


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.jsonl"
    audit = rpc.AuditLog(str(path), "control")
    whole = os.write
    monkeypatch.setattr(os, "write", lambda file, data: whole(file, data[:10]))
    with pytest.raises(OSError, match="a part"):
        audit.write({"method": "a"})
    monkeypatch.setattr(os, "write", whole)
    audit.write({"method": "b"})
    audit.close()
    first, second = path.read_text().splitlines()
    assert len(first) == 10
    assert json.loads(second)["method"] == "b"


def test_a_file_that_cannot_be_appended_to_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "none" / "audit.jsonl", tmp_path / "pipe"):
        with pytest.raises(ConfigError, match=r"audit\.file: cannot append to"):
            rpc.AuditLog(str(path), "control")
