# SPDX-License-Identifier: Apache-2.0
"""The commands against a cluster of mutual TLS and tenants: right files work, whichever way they are given; others are told apart."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import trustme
from click.testing import Result
from typer.testing import CliRunner

from tests.integration.test_tenants import OPERATOR, QUIET, write_tenants
from tests.support.cluster import Cluster, running_cluster
from tests.unit.base.test_base_tls import Pki
from twinpool.control.cli.main import app

pytestmark = [pytest.mark.integration, pytest.mark.slow]

COMMAND = [sys.executable, "-m", "twinpool.control.cli.main"]
LIMIT_SECONDS = 120


@dataclass
class Secured:
    """A cluster, its certificates and those of nobody it knows."""

    cluster: Cluster
    pki: Pki
    foreign: Pki
    home: Path

    @property
    def router(self) -> str:
        return self.cluster.state.router_endpoints[0]

    @property
    def control(self) -> str:
        return self.cluster.state.control_endpoint

    def run(self, *arguments: str, code: int = 0, **env: str) -> Result:
        """A command with nothing but ``env`` and the given flags, in this process: a new one takes seconds to import all."""
        kept: dict[str, str | None] = {key: None for key in os.environ if key.startswith("TWINPOOL_")}
        kept |= {"TWINPOOL_HOME": str(self.home / "nobody")} | env
        result = CliRunner().invoke(app, list(arguments), env=kept)
        assert result.exit_code == code, f"{arguments}: {result.exit_code}\n{result.output}"
        return result


def flags(pki: Pki, ca: Pki | None = None) -> list[str]:
    return [
        "--ca-file",
        (ca or pki).tls.ca_file,
        "--cert-file",
        pki.tls.cert_file,
        "--key-file",
        pki.tls.key_file,
    ]


@pytest.fixture(scope="module")
def secured(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    home = tmp_path_factory.mktemp("secured")
    pki, foreign = Pki(home / "own", trustme.CA()), Pki(home / "foreign", trustme.CA())
    write_tenants(home / "tenants.yaml", QUIET)
    settings: dict[str, object] = {
        "router.tenants_file": str(home / "tenants.yaml"),
        "tls.ca_file": pki.tls.ca_file,
        "tls.cert_file": pki.tls.cert_file,
        "tls.key_file": pki.tls.key_file,
    }
    (home / "key").write_text(f"{QUIET}\n")
    (home / "operator").write_text(OPERATOR)
    with running_cluster(home / "cluster", checkpoints["llama"], settings) as running:
        yield Secured(running, pki, foreign, home)


def test_requests_find_their_way_by_flags_environment_and_file(secured: Secured) -> None:
    key = ["--api-key-file", str(secured.home / "key")]
    ask = ["generate", "hello", "--max-tokens", "3", "-o", "json", "--endpoint", secured.router]
    by_flags = json.loads(secured.run(*ask, *key, *flags(secured.pki)).stdout)
    assert by_flags["finished"]["usage"]["completion_tokens"]
    env = {
        f"TWINPOOL_CLIENT__{name.upper()}": getattr(secured.pki.tls, name)
        for name in ("ca_file", "cert_file", "key_file")
    }
    secured.run(*ask, *key, **env)
    file = secured.home / "client.yaml"
    lines = [f"  {name}: {getattr(secured.pki.tls, name)}" for name in ("ca_file", "cert_file", "key_file")]
    file.write_text(
        "\n".join(
            ["client:", f"  api_key_file: {secured.home / 'key'}", f"  endpoint: {secured.router}", *lines]
        )
    )
    secured.run("generate", "hello", "--max-tokens", "3", TWINPOOL_CONFIG=str(file))
    named = by_flags["started"]["request_id"]
    trace = ["trace", named, "--endpoint", secured.router, "--api-key-file", str(secured.home / "operator")]
    assert named in secured.run(*trace, *flags(secured.pki)).stdout


def test_a_local_cluster_tells_its_files_by_its_state(secured: Secured) -> None:
    home = {"TWINPOOL_HOME": str(secured.cluster.home), "TWINPOOL_CLUSTER__NAME": "test"}
    workers = json.loads(secured.run("get", "workers", "-o", "json", **home).stdout)
    assert {worker["role"] for worker in workers} == {"prefill", "decode"}
    assert json.loads(secured.run("get", "requests", "-o", "json", **home).stdout) is not None
    secured.run("generate", "hello", "--max-tokens", "2", TWINPOOL_KEY=QUIET, **home)
    talk = subprocess.run(
        [*COMMAND, "chat", "--max-tokens", "2"], input="hi\n", env=os.environ | home | {"TWINPOOL_KEY": QUIET},
        capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    # A tiny model has a chat template or not; either way the router was reached.
    assert "SERVER_UNREACHABLE" not in talk.stderr
    assert "CERTIFICATE" not in talk.stderr


@pytest.mark.parametrize("command", ["generate", "control"])
def test_what_is_wrong_with_tls_is_said(secured: Secured, command: str) -> None:
    ask = (
        ["generate", "hello", "--endpoint", secured.router]
        if command == "generate"
        else ["get", "workers", "--control", secured.control]
    )
    address = ask[-1]
    plain = secured.run(*ask, code=4).stderr
    assert f"TLS_EXPECTED: {address} speaks TLS" in plain
    assert "--ca-file" in plain
    bare = secured.run(*ask, "--ca-file", secured.pki.tls.ca_file, code=4).stderr
    assert "CERTIFICATE_REQUIRED" in bare
    strange = secured.run(*ask, *flags(secured.foreign), code=4).stderr
    assert "SERVER_NOT_TRUSTED" in strange
    assert secured.foreign.tls.ca_file in strange
    unknown = secured.run(*ask, *flags(secured.foreign, ca=secured.pki), code=4).stderr
    assert "CERTIFICATE_REFUSED" in unknown
    assert secured.foreign.tls.cert_file in unknown
    misnamed = secured.run(*ask, *flags(secured.pki), "--server-name", "elsewhere", code=4).stderr
    assert "SERVER_NOT_TRUSTED" in misnamed
    assert "'elsewhere'" in misnamed
    half = secured.run(*ask, "--cert-file", secured.pki.tls.cert_file, code=2).stderr
    assert "--key-file must be given" in half
    missing = secured.run(*ask, "--ca-file", str(secured.home / "none.pem"), code=2).stderr
    assert "none.pem" in missing


def test_a_key_is_needed_and_never_on_a_command_line(secured: Secured) -> None:
    ask = ["generate", "hello", "--endpoint", secured.router, *flags(secured.pki)]
    assert "UNAUTHENTICATED" in secured.run(*ask, code=4).stderr
    empty = secured.home / "empty"
    empty.write_text("\n")
    assert "does not hold one key" in secured.run(*ask, "--api-key-file", str(empty), code=2).stderr
    family = psutil.Process(secured.cluster.process.pid)
    lines = [" ".join(one.cmdline()) for one in [family, *family.children(recursive=True)]]
    assert not [line for line in lines if QUIET in line or OPERATOR in line]


def test_who_is_not_there_is_told_from_who_refuses(secured: Secured) -> None:
    gone = secured.run("get", "workers", "--control", "127.0.0.1:1", *flags(secured.pki), code=3).stderr
    assert "127.0.0.1:1: nobody listens there" in gone
