# SPDX-License-Identifier: Apache-2.0
import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.transports import each_rpc_transport  # noqa: F401
from tests.support.waiting import until
from twinpool import rpc
from twinpool.config import RpcConfig, TlsConfig
from twinpool.errors import ConfigError

CONFIG = RpcConfig()
WHO = "/twinpool.test.PeerService/Who"


class Pki:
    """A CA and files of one party."""

    def __init__(self, directory: Path, ca: trustme.CA) -> None:
        self.ca = ca
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.tls = TlsConfig(
            cert_file=str(directory / "cert.pem"),
            key_file=str(directory / "key.pem"),
            ca_file=str(directory / "ca.pem"),
        )
        ca.cert_pem.write_to_path(self.tls.ca_file)
        self.issue("one")

    def issue(self, common_name: str, ca: trustme.CA | None = None) -> None:
        """Writes a new pair by renaming, as certificate tools do."""
        leaf = (ca or self.ca).issue_cert("127.0.0.1", common_name=common_name)
        chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
        for path, content in ((self.tls.key_file, leaf.private_key_pem.bytes()), (self.tls.cert_file, chain)):
            Path(path + ".new").write_bytes(content)
            os.replace(path + ".new", path)

    def pair(self) -> tuple[bytes, bytes]:
        """Certificate chain and key."""
        return Path(self.tls.cert_file).read_bytes(), Path(self.tls.key_file).read_bytes()

    def write(self, cert: bytes | None, key: bytes) -> None:
        """Overwrites the files in place; None removes the certificate."""
        if cert is None:
            Path(self.tls.cert_file).unlink()
        else:
            Path(self.tls.cert_file).write_bytes(cert)
        Path(self.tls.key_file).write_bytes(key)


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path / "a", trustme.CA())


@pytest.fixture
async def port(pki: Pki) -> AsyncIterator[int]:
    server = rpc.Server(CONFIG, pki.tls)
    bound = server.bind("127.0.0.1")
    await server.start()
    yield bound
    await server.stop(0)


async def check(port: int, tls: TlsConfig | None) -> None:
    async with rpc.channel(f"127.0.0.1:{port}", CONFIG, tls) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)


async def test_both_sides_with_certificates_of_the_ca_connect(pki: Pki, port: int) -> None:
    await check(port, pki.tls)


async def test_a_client_without_or_with_a_foreign_certificate_is_refused(
    pki: Pki, port: int, tmp_path: Path
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(port, None)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    foreign = Pki(tmp_path / "b", trustme.CA())
    pki.ca.cert_pem.write_to_path(foreign.tls.ca_file)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(port, foreign.tls)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_of_a_foreign_ca_is_refused(port: int, tmp_path: Path) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(port, Pki(tmp_path / "b", trustme.CA()).tls)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def served_name(port: int, pki: Pki) -> str:
    context = ssl.create_default_context(cafile=pki.tls.ca_file)
    context.load_cert_chain(pki.tls.cert_file, pki.tls.key_file)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), 5) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1") as tls,
    ):
        subject = (tls.getpeercert() or {})["subject"]
    return next(value for group in subject for name, value in group if name == "commonName")  # type: ignore[union-attr,misc]


async def test_renewed_files_are_served_without_a_restart(pki: Pki, port: int) -> None:
    assert served_name(port, pki) == "one"
    pki.issue("two")
    assert served_name(port, pki) == "two"
    await check(port, pki.tls)


class Peer(grpc.GenericRpcHandler):
    """Tells a caller by which connection it came."""

    def service(self, details: grpc.HandlerCallDetails):  # type: ignore[no-untyped-def]
        async def call(request: bytes, context: grpc.aio.ServicerContext) -> bytes:  # type: ignore[type-arg]
            return context.peer().encode()

        return grpc.unary_unary_rpc_method_handler(call) if details.method == WHO else None


async def test_renewals_under_load_fail_no_call_and_end_no_connection(pki: Pki) -> None:
    server = rpc.Server(CONFIG, pki.tls)
    server.raw.add_generic_rpc_handlers((Peer(),))
    port = server.bind("127.0.0.1")
    await server.start()
    client = Pki(pki.directory.parent / "client", pki.ca)
    peers: list[set[bytes]] = [set(), set()]
    calls = [0, 0]
    over = False

    async def ask(channel: grpc.aio.Channel, kind: int) -> None:
        peers[kind].add(await channel.unary_unary(WHO)(b"", timeout=60))
        calls[kind] += 1

    async def by_one_connection() -> None:
        async with rpc.channel(f"127.0.0.1:{port}", CONFIG, client.tls) as channel:
            while not over:
                await ask(channel, 0)

    async def each_by_another() -> None:
        while not over:
            async with rpc.channel(f"127.0.0.1:{port}", CONFIG, client.tls) as channel:
                await ask(channel, 1)

    load = [asyncio.create_task(each()) for each in (by_one_connection, each_by_another, each_by_another)]
    for name in ("two", "three", "four"):
        before = calls[:]
        pki.issue(name)
        assert await asyncio.to_thread(served_name, port, client) == name
        await until(
            lambda before=before: (  # type: ignore[misc]
                all(now >= then + 10 for now, then in zip(calls, before, strict=True))
                or any(task.done() for task in load)
            )
        )
    over = True
    await asyncio.gather(*load)
    assert len(peers[0]) == 1, "a connection from before the first renewal goes on"
    assert len(peers[1]) >= 30
    await server.stop(0)


async def test_a_renewed_ca_decides_of_new_connections(pki: Pki, port: int) -> None:
    """A CA that is left out of the file is no longer trusted, by who connects from now on."""
    client = Pki(pki.directory.parent / "client", pki.ca)
    async with rpc.channel(f"127.0.0.1:{port}", CONFIG, client.tls) as before:
        health = health_pb2_grpc.HealthStub(before)
        await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        trustme.CA().cert_pem.write_to_path(pki.tls.ca_file)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(port, client.tls)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
    pki.ca.cert_pem.write_to_path(pki.tls.ca_file)
    await check(port, client.tls)


async def test_a_half_written_renewal_keeps_the_old_pair(pki: Pki, port: int) -> None:
    client = Pki(pki.directory.parent / "client", pki.ca)
    old = pki.pair()
    other = pki.ca.issue_cert("127.0.0.1", common_name="two")
    pki.write(old[0], other.private_key_pem.bytes())
    assert served_name(port, client) == "one"
    pki.write(None, other.private_key_pem.bytes())
    assert served_name(port, client) == "one"
    pki.write(*old)
    assert served_name(port, client) == "one"


async def test_missing_and_unpaired_files_are_config_errors(pki: Pki, tmp_path: Path) -> None:
    other = Pki(tmp_path / "b", pki.ca)
    unpaired = pki.tls.model_copy(update={"key_file": other.tls.key_file})
    with pytest.raises(ConfigError, match="do not form a pair"):
        rpc.Server(CONFIG, unpaired).bind("127.0.0.1")
    missing = pki.tls.model_copy(update={"ca_file": str(tmp_path / "none.pem")})
    with pytest.raises(ConfigError, match=r"tls\.ca_file: cannot read"):
        rpc.Server(CONFIG, missing).bind("127.0.0.1")


async def test_a_name_can_stand_for_the_host(pki: Pki) -> None:
    leaf = pki.ca.issue_cert("worker.twinpool.internal")
    pki.write(b"".join(blob.bytes() for blob in leaf.cert_chain_pems), leaf.private_key_pem.bytes())
    server = rpc.Server(CONFIG, pki.tls)
    port = server.bind("127.0.0.1")
    await server.start()
    with pytest.raises(grpc.aio.AioRpcError):
        await check(port, pki.tls)
    await check(port, pki.tls.model_copy(update={"server_name": "worker.twinpool.internal"}))
    await server.stop(0)
