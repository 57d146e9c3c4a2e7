# SPDX-License-Identifier: Apache-2.0
"""Commands against a control process and a router "inside Kubernetes": services come from a real kubectl, the port is forwarded by
a stand-in for it, and the processes are real."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import trustme

from tests.support.kube_api import KubeApi
from tests.support.waiting import until_sync
from tests.support.worker_client import start_router
from tests.unit.base.test_base_tls import Pki
from twinpool.config import load_config, to_env
from twinpool.control.kube.forward import PortForward
from twinpool.control.kube.kubectl import Kubectl
from twinpool.engine.tiny import write_tiny
from twinpool.store import Keys, StoreServer, connect_store, start_store
from twinpool.v1.control_pb2 import RouterRecord

pytestmark = [pytest.mark.chart, pytest.mark.slow]

COMMAND = [sys.executable, "-m", "twinpool.control.cli.main"]
STAND_IN = Path(__file__).parents[1] / "support" / "stand_in_kubectl.py"
START_SECONDS = 120.0
LABELS = {"app.kubernetes.io/name": "twinpool", "app.kubernetes.io/instance": "rel"}
CONTROL, ROUTER = "rel-twinpool-control", "rel-twinpool-router"


def issue(directory: Path, component: str, ca: trustme.CA) -> dict[str, object]:
    """Files with the names that the chart's certificates hold, and no address."""
    directory.mkdir()
    pki = Pki(directory, ca)
    leaf = ca.issue_cert(f"rel-twinpool-{component}.llm.svc")
    chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
    pki.write(chain, leaf.private_key_pem.bytes())
    return {f"tls.{name}": getattr(pki.tls, name) for name in ("cert_file", "key_file", "ca_file")}


class Processes:
    """A store, a control process and a router without workers, with mutual TLS."""

    def __init__(self, home: Path) -> None:
        self.ca, self.home = trustme.CA(), home
        self.server: StoreServer = start_store(home / "store")
        model = home / "model"
        write_tiny(model, "llama", seed=1)
        control = {"cluster.name": "test", "cluster.etcd_endpoints": self.server.endpoint, "control.http_port": 0,
                   "pools.prefill_workers": 0, "pools.decode_workers": 0, "log.format": "json"}  # fmt: skip
        env = {key: value for key, value in os.environ.items() if not key.startswith("TWINPOOL_")}
        config = load_config(None, control | issue(home / "control", "control", self.ca), env={})
        with (home / "control.log").open("ab") as out:
            self.control = subprocess.Popen(
                [*COMMAND, "serve", "control"],
                env=env | to_env(config),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.router = start_router(
            model, self.server.endpoint, home, issue(home / "router", "router", self.ca)
        )
        self.targets = {
            f"service/{CONTROL}": self._control_endpoint(),
            f"pod/{ROUTER}-0": self._router_endpoint(),
        }
        self.operator = issue(home / "operator", "operator", self.ca)

    def _control_endpoint(self) -> str:
        """From its log, once it serves."""

        def told() -> str:
            assert self.control.poll() is None, (self.home / "control.log").read_text()[-3000:]
            lines = [
                json.loads(line)
                for line in (self.home / "control.log").read_text().splitlines()
                if line.startswith("{")
            ]
            return next((line["endpoint"] for line in lines if line["event"] == "control_serving"), "")

        return until_sync(told, START_SECONDS)

    def _router_endpoint(self) -> str:
        store = connect_store(
            load_config(None, {"cluster.etcd_endpoints": self.server.endpoint}, env={}).cluster
        )

        def told() -> str:
            assert self.router.poll() is None, (self.home / "router.log").read_text()[-3000:]
            item = store.get(Keys("test").router("router-0"))
            return RouterRecord.FromString(item.value).endpoint if item is not None else ""

        try:
            return until_sync(told, START_SECONDS)
        finally:
            store.close()

    def stop(self) -> None:
        for process in (self.control, self.router):
            process.terminate()
        for process in (self.control, self.router):
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.server.stop()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    made = Processes(tmp_path_factory.mktemp("inside"))
    yield made
    made.stop()


class Commands:
    """The command line of an operator outside the cluster."""

    def __init__(self, api: KubeApi, processes: Processes, kubectl: str, tools: Path) -> None:
        self.api, self.targets = api, dict(processes.targets)
        (tools / "kubectl").unlink()
        (tools / "kubectl").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" "$@"\n')
        (tools / "kubectl").chmod(0o755)
        self.flags = [word for name, path in processes.operator.items()
                      for word in (f"--{name.partition('.')[2].replace('_', '-')}", str(path))]  # fmt: skip
        self._kubectl = kubectl

    @property
    def env(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("TWINPOOL_")}
        return kept | {
            "TWINPOOL_TEST_TARGETS": json.dumps(self.targets),
            "TWINPOOL_TEST_KUBECTL": self._kubectl,
        }

    def run(self, *arguments: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*COMMAND, *arguments, *self.flags],
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert not forwards(), "no kubectl outlives its command"
        return done


def forwards() -> list[psutil.Process]:
    """Port-forwards of this test's commands that are still there."""
    return [one for one in psutil.process_iter(["cmdline"]) if str(STAND_IN) in (one.info["cmdline"] or ())]


@pytest.fixture
def commands(api: KubeApi, processes: Processes, kubectl: str, tmp_path: Path) -> Commands:
    api.put(
        "pods",
        f"{ROUTER}-0",
        "llm",
        LABELS | {"app.kubernetes.io/component": "router"},
        status={"phase": "Running"},
    )
    return Commands(api, processes, kubectl, tmp_path / "bin")


def test_the_control_process_is_reached_by_context_and_namespace(commands: Commands) -> None:
    asked = ["get", "operations", "-o", "json"]
    assert json.loads(commands.run(*asked, "-n", "llm").stdout) == []
    assert json.loads(commands.run(*asked, "--kube-context", "here").stdout) == []
    assert (
        json.loads(
            commands.run(*asked, "--kube-context", "other", "--namespace", "llm", "--release", "rel").stdout
        )
        == []
    )
    # An address that is only in the environment gives way to flags that name a release.
    commands.run(*asked, "--kube-context", "here", TWINPOOL_CONTROL="127.0.0.1:1")
    commands.run(*asked, TWINPOOL_CLIENT__NAMESPACE="llm")
    given = commands.targets[f"service/{CONTROL}"]
    named = ["--server-name", f"{CONTROL}.llm.svc"]
    commands.run(*asked, "-n", "nowhere", "--control-address", given, *named)


def test_a_release_in_a_file(commands: Commands, tmp_path: Path) -> None:
    file = tmp_path / "client.yaml"
    file.write_text(f"client: {{kubeconfig: {commands.api.kubeconfig}, namespace: llm}}\n")
    commands.run("get", "workers", TWINPOOL_CONFIG=str(file), KUBECONFIG="/dev/null")


def test_every_router_is_asked(commands: Commands) -> None:
    assert commands.run("get", "prefixes", "-n", "llm", "-o", "json").stdout.strip() == "[]"
    unknown = commands.run("trace", "nobody", "-n", "llm", code=2).stderr
    assert "no router has a request 'nobody'" in unknown


def test_the_clock_of_the_control_process(commands: Commands) -> None:
    rows: list[dict[str, Any]] = json.loads(
        commands.run("doctor", "--for", "router", "-n", "llm", "-o", "json").stdout
    )
    (clock,) = (row for row in rows if row["name"] == "clock control")
    assert clock["status"] == "ok"
    assert "this machine's (to " in clock["detail"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--kube-context", "nowhere"], 2, "KUBE_CONTEXT_UNKNOWN"),
        (["-n", "empty"], 2, "KUBE_SERVICE_NOT_FOUND: namespace empty has no Service"),
        (["-n", "llm", "--release", "other"], 2, "KUBE_SERVICE_NOT_FOUND"),
        (["--kubeconfig", "/none"], 2, "KUBE_CONTEXT_UNKNOWN"),
    ],
)
def test_what_is_wrong_is_said(commands: Commands, arguments: list[str], code: int, said: str) -> None:
    assert said in commands.run("get", "workers", *arguments, code=code).stderr


def test_refusals_have_their_own_status(commands: Commands, tmp_path: Path) -> None:
    del commands.targets[f"service/{CONTROL}"]
    assert "KUBE_FORWARD_FAILED" in commands.run("get", "workers", "-n", "llm", code=3).stderr
    commands.targets[f"service/{CONTROL}"] = "pending"
    assert "Current status=Pending" in commands.run("get", "workers", "-n", "llm", code=3).stderr
    commands.api.denied.add("services")
    assert "KUBE_FORBIDDEN" in commands.run("get", "workers", "-n", "llm", code=4).stderr
    assert "KUBECTL_MISSING" in commands.run("get", "workers", "-n", "llm", code=3, PATH=str(tmp_path)).stderr


def test_a_killed_command_leaves_no_kubectl(commands: Commands) -> None:
    follow = subprocess.Popen(
        [*COMMAND, "events", "-f", "-n", "llm", "--since", "1h", *commands.flags], env=commands.env,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    (forward,) = until_sync(forwards, START_SECONDS)
    assert forward.ppid() == follow.pid
    follow.kill()
    follow.communicate()
    until_sync(lambda: not forwards(), START_SECONDS)


def test_a_forward_that_has_ended_is_begun_anew_on_its_port(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in commands.env.items():
        monkeypatch.setenv(name, value)
    made = PortForward(Kubectl(), f"service/{CONTROL}", 50053)
    try:
        before = made.endpoint
        (process,) = until_sync(forwards)
        process.kill()
        until_sync(lambda: not forwards())
        made.ensure()
        assert made.endpoint == before
        host, _, port = before.rpartition(":")
        socket.create_connection((host, int(port)), 10).close()
    finally:
        made.close()
    assert not forwards()
    made.close()
