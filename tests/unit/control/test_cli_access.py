# SPDX-License-Identifier: Apache-2.0
"""How commands take their way to a cluster: options, environment and file; which command has which; completion in the shell."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
import typer.main
from typer.testing import CliRunner

from tests.support.addresses import beside_the_loopback
from tests.unit.base.test_base_tls import Pki
from twinpool import rpc
from twinpool.config import ClientTls, ConfigError, RpcConfig, TlsConfig, TwinpoolConfig, load_config
from twinpool.control.cli.access import Access
from twinpool.control.cli.main import app
from twinpool.control.state import LocalState
from twinpool.errors import TwinpoolError
from twinpool.rpc.probe import why_unreachable

REACHING = {
    "ca_file",
    "cert_file",
    "key_file",
    "server_name",
    "tls",
    "kube_context",
    "namespace",
    "kubeconfig",
    "release",
}
NOT_REACHING = {
    "demo",
    "up",
    "down",
    "config",
    "simulate",
    "key",
    "kernels",
    "version",
    "serve",
    "model",
    "replay",
}


def commands(command: Any, *path: str) -> dict[str, dict[str, Any]]:
    """Parameters of all commands, by the words that a user types."""
    below = getattr(command, "commands", None)
    if below is None:
        return {" ".join(path): {one.name: one for one in command.params}}
    return {key: value for name, one in below.items() for key, value in commands(one, *path, name).items()}


def test_every_command_that_asks_a_process_has_the_options() -> None:
    found = commands(typer.main.get_command(app))
    asking = {name for name, parameters in found.items() if {"endpoint", "control"} & set(parameters)}
    assert {
        "generate",
        "chat",
        "trace",
        "get requests",
        "get workers",
        "drain",
        "top",
        "describe pool",
        "doctor",
    } <= asking
    for name in asking:
        assert set(found[name]) >= REACHING, name
        assert ("api_key_file" in found[name]) == ("endpoint" in found[name]), name
    assert {
        name.partition(" ")[0] for name in set(found) - asking - {"health", "core replay"}
    } <= NOT_REACHING
    assert set(found["health"]) >= REACHING - {"kube_context", "namespace", "kubeconfig", "release"}
    assert "kube_context" not in found["health"]


def test_no_two_options_of_a_command_share_a_flag() -> None:
    for name, parameters in commands(typer.main.get_command(app)).items():
        flags = [flag for one in parameters.values() for flag in one.opts if flag.startswith("-")]
        assert len(flags) == len(set(flags)), name


def test_no_option_takes_a_key_itself() -> None:
    for name, parameters in commands(typer.main.get_command(app)).items():
        assert not [one for one in parameters if one in ("key", "api_key", "token", "password")], name


def way(given: dict[str, Any] | None = None, typed: bool = False, **sections: dict[str, object]) -> Access:
    return Access(TwinpoolConfig.model_validate(sections), given, typed=typed)


def test_flags_go_before_the_file_and_the_client_before_the_cluster() -> None:
    tls = {"cert_file": "c", "key_file": "k", "ca_file": "a"}
    assert way().tls("h:1", "router") is None
    cluster = way(tls=tls | {"role_domain": "d"}).tls("h:1", "router")
    assert cluster == ClientTls(**tls, server_name="router.d")
    filed = way(tls=tls, client={"ca_file": "mine"}).tls("h:1", "control")
    assert filed == ClientTls(ca_file="mine")
    typed = way({"ca_file": "flag", "server_name": "n"}, client={"ca_file": "mine"}).tls("h:1", "control")
    assert typed == ClientTls(ca_file="flag", server_name="n")
    assert way({"tls": True}).tls("h:1", "router") == ClientTls()


def test_the_state_of_a_local_cluster_says_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"cert_file": "c", "key_file": "k", "ca_file": "a", "server_name": "s", "role_domain": ""}
    found = LocalState("one", 1, 0.0, "m", "etcd", "e", "h:5", ["h:6", "h:7"], tls=files)
    monkeypatch.setattr("twinpool.control.state.read", lambda name: found if name == "one" else None)
    monkeypatch.setattr(LocalState, "alive", lambda self: True)
    local = way()
    assert local.control("one", "") == "h:5"
    assert local.routers("one", "") == ["h:6", "h:7"]
    assert local.routers("one", "", every=False) == ["h:6"]
    assert local.tls("h:5", "control") == ClientTls(cert_file="c", key_file="k", ca_file="a", server_name="s")
    other = way({"ca_file": "flag"})
    other.control("one", "")
    assert other.tls("h:5", "control") == ClientTls(ca_file="flag", server_name="s")


def test_an_address_of_the_environment_gives_way_to_a_typed_release() -> None:
    assert way(client={"control": "h:1", "namespace": "n"}).control("local", "") == "h:1"
    chosen = way({"namespace": "n"}, typed=True, client={"control": "h:1"})
    assert chosen._given("h:2", "h:1") == ""


def test_half_a_pair_is_no_pair() -> None:
    with pytest.raises(ConfigError, match="--key-file must be given"):
        way({"cert_file": "c"})
    with pytest.raises(ConfigError, match=r"client\.cert_file: must be set"):
        load_config(None, {"client.key_file": "k"}, env={})


def test_the_key_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINPOOL_KEY", "tp-env")
    assert way().api_key() == "tp-env"
    (tmp_path / "key").write_text("tp-file\n")
    assert way({"api_key_file": str(tmp_path / "key")}).api_key() == "tp-file"
    (tmp_path / "key").write_text("two keys")
    with pytest.raises(ConfigError, match="does not hold one key"):
        way({"api_key_file": str(tmp_path / "key")}).api_key()
    with pytest.raises(ConfigError, match="cannot read"):
        way({"api_key_file": str(tmp_path)}).api_key()


@pytest.mark.parametrize(
    ("reason", "status"),
    [("INVALID_ARGUMENT", 2), ("CONFIG_INVALID", 2), ("SERVER_UNREACHABLE", 3), ("UNAUTHENTICATED", 4), ("KUBE_FORBIDDEN", 4),
     ("CERTIFICATE_REQUIRED", 4), ("KUBECTL_MISSING", 3), ("KUBE_CONTEXT_UNKNOWN", 2), ("INTERNAL", 1)],
)  # fmt: skip
def test_exit_status(reason: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Access, cluster: str, given: str) -> str:
        raise TwinpoolError(reason, "[not markup] said")

    monkeypatch.setattr(Access, "control", refuse)
    result = CliRunner().invoke(app, ["get", "workers"])
    assert result.exit_code == status
    assert f"{reason}: [not markup] said" in result.output


async def test_a_refused_certificate_says_what_the_file_tells(tmp_path: Path) -> None:
    ca = trustme.CA()
    pki = Pki(tmp_path / "own", ca)
    server = rpc.Server(RpcConfig(), pki.tls)
    port = server.bind("127.0.0.1")
    await server.start()
    expired = Pki(tmp_path / "expired", ca)
    ended = datetime.now(UTC) - timedelta(days=1)
    leaf = ca.issue_cert("127.0.0.1", not_before=ended - timedelta(days=1), not_after=ended)
    expired.write(b"".join(blob.bytes() for blob in leaf.cert_chain_pems), leaf.private_key_pem.bytes())
    try:
        endpoint = f"127.0.0.1:{port}"
        asked = Access(TwinpoolConfig(tls=expired.tls))
        asked.dial(endpoint, "router")
        said = str(await asyncio.to_thread(asked.explained, TwinpoolError("SERVER_UNREACHABLE")))
        assert "CERTIFICATE_REFUSED" in said
        assert f"expired at {ended:%Y-%m-%d}" in said
        assert await asyncio.to_thread(why_unreachable, endpoint, pki.tls) is None
        bare = await asyncio.to_thread(why_unreachable, endpoint, ClientTls(ca_file=pki.tls.ca_file))
        assert bare is not None
        assert bare.reason == "CERTIFICATE_REQUIRED"
        plain = await asyncio.to_thread(why_unreachable, endpoint, TlsConfig())
        assert plain is not None
        assert plain.reason == "TLS_EXPECTED"
    finally:
        await server.stop(0)


def test_a_plain_server_and_nobody_at_all() -> None:
    gone = why_unreachable("127.0.0.1:1")
    assert gone is not None
    assert gone.message == "127.0.0.1:1: nobody listens there"
    unknown = why_unreachable("no-such-host.invalid:1")
    assert unknown is not None
    assert "the name no-such-host.invalid is not known" in unknown.message


def test_the_shell_completes_options() -> None:
    env = {
        "_TWINPOOL_COMPLETE": "complete_bash",
        "COMP_WORDS": "twinpool get workers --kube",
        "COMP_CWORD": "3",
    }
    result = CliRunner().invoke(app, [], env=env, prog_name="twinpool")
    assert result.output.split() == ["--kube-context", "--kubeconfig"]


async def test_a_server_on_a_pod_s_address_is_reached_by_a_port_forward() -> None:
    """kubectl connects to the loopback inside the pod."""
    own = beside_the_loopback()
    server = rpc.Server(RpcConfig())
    port = server.bind(own)
    assert await asyncio.to_thread(why_unreachable, f"127.0.0.1:{port}") is not None
    server.bind_loopback(own, port)
    server.bind_loopback("127.0.0.1", port)
    server.bind_loopback("0.0.0.0", port)
    await server.start()
    try:
        for host in (own, "127.0.0.1"):
            assert await asyncio.to_thread(why_unreachable, f"{host}:{port}") is None
    finally:
        await server.stop(0)
