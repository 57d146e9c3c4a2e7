# SPDX-License-Identifier: Apache-2.0
"""Starting and stopping store processes; TLS and passwords of a real etcd."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import etcd3.etcdrpc as pb
import grpc
import psutil
import pytest
import trustme

from tests.support.stores import KINDS, launch, port_of
from tests.support.watching import Recorder, wait_until
from twinpool.config import ClusterConfig, ConfigError
from twinpool.errors import TwinpoolError
from twinpool.store import EtcdStore, connect_store, find_etcd, start_store
from twinpool.store.embedded import EmbeddedEtcd


@pytest.mark.parametrize("kind", KINDS)
def test_stop_leaves_no_process_and_frees_the_port(kind: str, tmp_path: Path) -> None:
    server = launch(kind, tmp_path)
    assert server.kind == kind
    assert psutil.pid_exists(server.pid)
    port = port_of(server)
    server.stop()
    server.stop()
    assert not psutil.pid_exists(server.pid)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


@pytest.mark.slow
def test_etcd_keeps_its_data_over_a_restart_on_another_port(tmp_path: Path) -> None:
    values = []
    for number in range(2):
        server = launch("etcd", tmp_path)
        store = EtcdStore([server.endpoint])
        item = store.get("/k")
        values.append(item and item.value)
        store.put("/k", b"%d" % number)
        store.close()
        server.stop()
    assert values == [None, b"0"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_taken_port_is_told(kind: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(TwinpoolError) as caught:
            launch(kind, tmp_path, taken.getsockname()[1])
    assert caught.value.reason == "PORT_UNAVAILABLE"


def test_without_a_binary_the_embedded_store_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_etcd() is None
    server = start_store(tmp_path / "d")
    assert server.kind == "embedded"
    server.stop()


def fake_etcd(directory: Path, script: str) -> None:
    binary = directory / "etcd"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)


def test_an_etcd_that_does_not_start_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_etcd(tmp_path, "echo 'the disk is on fire'; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(TwinpoolError, match="the disk is on fire") as caught:
        start_store(tmp_path / "d")
    assert caught.value.reason == "STORE_UNAVAILABLE"


def test_a_lost_race_for_a_port_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = find_etcd()
    if real is None:
        pytest.skip("no etcd binary")
    fake_etcd(
        tmp_path,
        f'[ -e {tmp_path}/tried ] && exec {real} "$@"; touch {tmp_path}/tried; echo "bind: address already in use"; exit 1',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    server = start_store(tmp_path / "d")
    assert (tmp_path / "tried").exists()
    server.stop()


def test_an_embedded_server_in_this_process_ends_its_streams() -> None:
    server = EmbeddedEtcd()
    server.start()
    store = EtcdStore([server.endpoint], timeout_seconds=1)
    recorder = Recorder(store, "/t/").synced()
    store.put("/t/k", b"1")
    wait_until(recorder.seen)
    with pytest.raises(TwinpoolError, match="cannot listen"):
        EmbeddedEtcd(port=int(server.endpoint.rpartition(":")[2]))
    server.stop()
    server.stop()
    wait_until(lambda: not recorder.watch.connected)
    recorder.close()
    store.close()


def test_what_the_embedded_store_lacks_is_unimplemented() -> None:
    server = EmbeddedEtcd()
    server.start()
    with grpc.insecure_channel(server.endpoint) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            pb.MaintenanceStub(channel).Defragment(pb.DefragmentRequest(), timeout=60)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        status = pb.MaintenanceStub(channel).Status(pb.StatusRequest(), timeout=60)
        assert status.version.endswith("embedded")
    server.stop()


# --- a real etcd with certificates and passwords -------------------------------------------


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    binary = find_etcd()
    if binary is None:
        pytest.skip("no etcd binary")
    directory = tmp_path_factory.mktemp("tls")
    ca = trustme.CA()
    files = {name: str(directory / f"{name}.pem") for name in ("ca", "cert", "key")}
    # A client certificate with a common name would stand for a user of that name.
    leaf = ca.issue_cert("127.0.0.1")
    ca.cert_pem.write_to_path(files["ca"])
    leaf.private_key_pem.write_to_path(files["key"])
    Path(files["cert"]).write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(2):
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    client, peer = (f"127.0.0.1:{port}" for port in ports)
    process = subprocess.Popen(
        [
            binary,
            f"--data-dir={directory / 'data'}",
            f"--listen-client-urls=https://{client}",
            f"--advertise-client-urls=https://{client}",
            f"--listen-peer-urls=http://{peer}",
            "--client-cert-auth",
            f"--trusted-ca-file={files['ca']}",
            f"--cert-file={files['cert']}",
            f"--key-file={files['key']}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield {"endpoint": client, **files}
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def cluster(secured: dict[str, str], tmp_path: Path) -> ClusterConfig:
    password = tmp_path / "password"
    password.write_text("hunter2\n")
    return ClusterConfig(
        etcd_endpoints=(secured["endpoint"],),
        etcd_ca_file=secured["ca"],
        etcd_cert_file=secured["cert"],
        etcd_key_file=secured["key"],
        etcd_password_file=str(password),
    )


def test_certificates_then_a_password(cluster: ClusterConfig, tmp_path: Path) -> None:
    store = connect_store(cluster)
    wait_until(lambda: _reached(store), 10)
    plain = EtcdStore(cluster.etcd_endpoints, timeout_seconds=1)
    with pytest.raises(TwinpoolError, match="cannot be reached"):
        plain.get("/k")
    plain.close()
    _enable_passwords(store, "root", "hunter2")
    with pytest.raises(TwinpoolError) as caught:
        store.put("/k", b"1")
    assert caught.value.reason in ("UNAUTHENTICATED", "PERMISSION_DENIED", "INVALID_ARGUMENT", "INTERNAL")
    store.close()

    user = connect_store(cluster.model_copy(update={"etcd_user": "root"}))
    user.put("/t/k", b"1")
    recorder = Recorder(user, "/t/").synced()
    # What an expired token looks like: the next call logs in again.
    user._client.metadata = (("token", "nonsense.1"),)
    user.put("/t/k", b"2")
    assert user._client.metadata != (("token", "nonsense.1"),)
    wait_until(lambda: recorder.seen() == [("k", "1"), ("k", "2")])
    recorder.close()
    user.close()

    (tmp_path / "password").write_text("wrong")
    wrong = connect_store(cluster.model_copy(update={"etcd_user": "root"}))
    with pytest.raises(TwinpoolError, match="refused user 'root'") as caught:
        wrong.get("/k")
    assert caught.value.reason == "UNAUTHENTICATED"
    assert "wrong" not in caught.value.message
    wrong.close()


def _reached(store: EtcdStore) -> bool:
    try:
        store.get("/k")
    except TwinpoolError:
        return False
    return True


def _enable_passwords(store: EtcdStore, user: str, password: str) -> None:
    stub = pb.AuthStub(store._client.channel)
    stub.UserAdd(pb.AuthUserAddRequest(name=user, password=password), timeout=60)
    stub.RoleAdd(pb.AuthRoleAddRequest(name="root"), timeout=60)
    stub.UserGrantRole(pb.AuthUserGrantRoleRequest(user=user, role="root"), timeout=60)
    stub.AuthEnable(pb.AuthEnableRequest(), timeout=60)


def test_unreadable_files_are_config_errors(cluster: ClusterConfig, tmp_path: Path) -> None:
    for change in (
        {"etcd_ca_file": str(tmp_path / "no")},
        {"etcd_user": "u", "etcd_password_file": str(tmp_path / "no")},
    ):
        with pytest.raises(ConfigError, match="cannot read"):
            connect_store(cluster.model_copy(update=change))
