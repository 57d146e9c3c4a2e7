# SPDX-License-Identifier: Apache-2.0
"""Who may call what, by certificates on real TLS connections."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import trustme
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.transports import each_rpc_transport  # noqa: F401
from twinpool import rpc
from twinpool.config import RpcConfig, TlsConfig
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.rpc.roles import ROLES, PeerRole, check_process, roles_in

CONFIG = RpcConfig()
DOMAIN = "pool.twinpool.internal"
METHODS = {
    "WorkerService/Session": {"router"},
    "WorkerService/TakeOver": {"router"},
    "WorkerService/TakePrefixes": {"worker"},
    "WorkerService/PinPrefix": {"router"},
    "WorkerService/ReleasePrefix": {"router"},
    "WorkerService/Inspect": {"router", "control", "operator"},
    "WorkerService/Drain": {"router", "control", "operator"},
    "WorkerService/ChangeRole": {"control", "operator"},
    "HandoffService/Connect": {"worker"},
    "HandoffService/Exchange": {"worker"},
    "RouterService/HandOver": {"router"},
    "RouterService/ListRouterRequests": {"control"},
    "RouterService/GetTelemetry": {"router", "control", "operator"},
    "ControlService/GetOverview": {"control", "operator"},
    "RouterService/InspectRouter": {"router", "control", "operator"},
    "ControlService/ListWorkers": {"router", "worker", "control", "operator"},
    "ControlService/DrainWorker": {"control", "operator"},
    "ControlService/FlipWorker": {"control", "operator"},
    "InferenceService/Generate": {*ROLES, "stranger"},
    "ChatService/Chat": {*ROLES, "stranger"},
}


class Pki:
    """A CA that gives out certificates of any names."""

    def __init__(self, directory: Path) -> None:
        self.ca, self.directory = trustme.CA(), directory
        self.ca.cert_pem.write_to_path(directory / "ca.pem")

    def tls(self, *names: str) -> TlsConfig:
        leaf = self.ca.issue_cert("127.0.0.1", *names)
        stem = self.directory / "-".join(names or ("none",))
        leaf.private_key_pem.write_to_path(f"{stem}.key")
        Path(f"{stem}.pem").write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        return TlsConfig(
            cert_file=f"{stem}.pem",
            key_file=f"{stem}.key",
            ca_file=str(self.directory / "ca.pem"),
            role_domain=DOMAIN,
        )

    def of(self, role: str, name: str = "") -> TlsConfig:
        if role not in ROLES:
            return self.tls(f"{role}.elsewhere.internal")
        return self.tls(f"{name}.{role}.{DOMAIN}" if name else f"{role}.{DOMAIN}")


class Everything(grpc.GenericRpcHandler):
    """Serves every method: one stream each way or a call, by the name; both end at once."""

    def service(self, details: grpc.HandlerCallDetails):  # type: ignore[no-untyped-def]
        if not details.method.startswith("/twinpool.v1."):
            return None

        async def call(request: bytes, context: object) -> bytes:
            return b""

        return grpc.unary_unary_rpc_method_handler(call)


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


@pytest.fixture
async def port(pki: Pki) -> AsyncIterator[int]:
    server = rpc.Server(CONFIG, pki.of("worker"))
    server.raw.add_generic_rpc_handlers((Everything(),))
    bound = server.bind("127.0.0.1")
    await server.start()
    await server.set_serving(True)
    yield bound
    await server.stop(0)


async def refusal(
    port: int, tls: TlsConfig, method: str, role: PeerRole | None = "worker"
) -> TwinpoolError | None:
    async with rpc.channel(f"127.0.0.1:{port}", CONFIG, tls, role=role) as channel:
        try:
            await channel.unary_unary(f"/twinpool.v1.{method}")(Empty().SerializeToString(), timeout=60)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
    return None


@pytest.mark.parametrize("role", [*ROLES, "stranger"])
async def test_a_role_may_call_what_is_for_it_and_nothing_else(pki: Pki, port: int, role: str) -> None:
    tls = pki.of(role)
    for method, allowed in METHODS.items():
        error = await refusal(port, tls, method)
        assert (error is None) is (role in allowed), (method, error)
        if error is not None:
            assert (error.reason, error.code) == ("PERMISSION_DENIED", grpc.StatusCode.PERMISSION_DENIED)
            assert method in error.message


async def test_health_is_for_all_that_the_ca_signed(pki: Pki, port: int) -> None:
    async with rpc.channel(f"127.0.0.1:{port}", CONFIG, pki.of("stranger"), role="worker") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_server_of_another_role_is_not_spoken_to(pki: Pki, port: int) -> None:
    error = await refusal(port, pki.of("router"), "WorkerService/Session", role="router")
    assert error is not None
    assert error.code is grpc.StatusCode.UNAVAILABLE


async def test_a_process_has_the_role_of_its_name(pki: Pki, port: int) -> None:
    assert await refusal(port, pki.of("router", "r-0"), "WorkerService/Session") is None
    error = await refusal(port, pki.of("worker", "w-0"), "WorkerService/Session")
    assert error is not None
    assert "names worker" in error.message


def test_roles_are_labels_before_the_domain() -> None:
    assert roles_in([f"worker.{DOMAIN}", f"a.router.{DOMAIN}", "127.0.0.1"], DOMAIN) == {"worker", "router"}
    for name in (
        f"xworker.{DOMAIN}",
        f"worker.x.{DOMAIN}",
        f"worker{DOMAIN}",
        DOMAIN,
        f"worker.{DOMAIN}.evil",
        "worker",
    ):
        assert roles_in([name], DOMAIN) == frozenset(), name


class Shown:
    """A call by somebody with these names."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_subject_alternative_name": [name.encode() for name in self.names]}


def test_a_named_process_is_nobody_else() -> None:
    own = Shown(f"w-0.worker.{DOMAIN}")
    check_process(own, DOMAIN, "worker", "w-0")  # type: ignore[arg-type]
    with pytest.raises(TwinpoolError, match="it is worker 'w-1'; its certificate names w-0"):
        check_process(own, DOMAIN, "worker", "w-1")  # type: ignore[arg-type]
    check_process(Shown(f"worker.{DOMAIN}"), DOMAIN, "worker", "w-1")  # type: ignore[arg-type]
    check_process(own, "", "worker", "w-1")  # type: ignore[arg-type]
