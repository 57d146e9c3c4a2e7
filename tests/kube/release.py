# SPDX-License-Identifier: Apache-2.0
"""The release that the tests install: by helm, looked at by kubectl, asked by clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, Self

import yaml

from tests.kube.cluster import Cluster
from tests.pods.asking import check
from tests.support.chart import CHART, ROOT
from tests.support.oracle import Oracle
from tests.support.waiting import until_sync

NAMESPACE: Final = "llm"
NAME: Final = "rel"
WAIT_SECONDS: Final = 600.0
IMAGE: Final = "localhost/twinpool"
TAG, NEXT_TAG = "0.1.0", "next"
MODEL_TEMPLATE: Final = "chatml_tools.jinja"
AGENT: Final = ROOT / "examples" / "agent"

VALUES: Final[dict[str, Any]] = {
    "image": {"repository": IMAGE, "tag": TAG, "pullPolicy": "Never"},
    # A hand-off each, and nothing measured before.
    "config": {"router": {"local_prefill": False}, "worker": {"calibration_seconds": 0}},
    "models": {"tiny": {"config": {"kv": {"num_blocks": 256}}}},
    "router": {
        "replicas": 2,
        "config": {"router": {"chat_template": f"/etc/twinpool/chat/{MODEL_TEMPLATE}"}},
        "extraVolumes": [{"name": "chat", "configMap": {"name": "chat"}}],
        "extraVolumeMounts": [{"name": "chat", "mountPath": "/etc/twinpool/chat", "readOnly": True}],
    },
    # So many start at once on a machine that may have few cores.
    "prefill": {"replicas": 2, "startTimeoutSeconds": 600},
    "decode": {"replicas": 2, "startTimeoutSeconds": 600},
    # An upgrade restarts etcd, too: its volume stays.
    "etcd": {"persistence": {"enabled": True, "size": "1Gi", "storageClassName": "local"}},
}


class Release:
    """Commands about the release, as an operator types them."""

    def __init__(self, cluster: Cluster, helm: str, kubectl: str, work: Path) -> None:
        self.cluster, self.helm_path, self.kubectl_path, self.work = cluster, helm, kubectl, work
        # Commands of the product find them in the PATH.
        tools = work / "bin"
        tools.mkdir()
        for name, path in (("kubectl", kubectl), ("helm", helm)):
            (tools / name).symlink_to(path)
        self.env = os.environ | {
            "KUBECONFIG": str(cluster.kubeconfig),
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HELM_CACHE_HOME": str(work / "helm"),
            "HELM_CONFIG_HOME": str(work / "helm"),
        }
        (work / "values.yaml").write_text(yaml.safe_dump(VALUES))

    def call(self, *command: str, within: float = WAIT_SECONDS, stdin: str | None = None) -> str:
        """What a command prints; fails with all that it said."""
        done = subprocess.run(
            command,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=within,
            check=False,
            input=stdin,
            cwd=ROOT,
        )
        assert done.returncode == 0, (
            f"{' '.join(command)}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{self.state()}"
        )
        return done.stdout

    def state(self) -> str:
        """What there is, for whoever reads a failure."""
        told = []
        for what in (("get", "pods", "-o", "wide"), ("get", "events", "--sort-by=.lastTimestamp")):
            command = [self.kubectl_path, "-n", NAMESPACE, *what]
            done = subprocess.run(
                command, env=self.env, capture_output=True, text=True, timeout=60, check=False
            )
            told.append(done.stdout[-4000:])
        return "\n".join(told)

    def kubectl(self, *arguments: str) -> str:
        """kubectl in the release's namespace."""
        return self.call(self.kubectl_path, "-n", NAMESPACE, *arguments)

    def helm(self, *arguments: str) -> str:
        """helm in the release's namespace; changes wait until all is ready."""
        return self.call(self.helm_path, "-n", NAMESPACE, *arguments)

    def change(self, verb: str, *more: str) -> str:
        """``helm install`` or ``upgrade`` with the values of the tests."""
        files = ("-f", str(CHART / "values-dev.yaml"), "-f", str(self.work / "values.yaml"))
        waits = ("--wait", "--timeout", f"{WAIT_SECONDS:.0f}s")
        return self.helm(verb, NAME, str(CHART), *files, *waits, *more)

    def twinpool(self, *arguments: str) -> str:
        """An operator's command, by kubectl's port-forward."""
        where = ("--kube-context", "here", "--namespace", NAMESPACE, "--release", NAME)
        return self.call(str(Path(sys.executable).with_name("twinpool")), *arguments, *where)

    def pods(self, component: str | None = None) -> list[dict[str, Any]]:
        """The pods that are not about to end."""
        selector = f"app.kubernetes.io/instance={NAME}"
        selector += f",app.kubernetes.io/component={component}" if component else ""
        items: list[dict[str, Any]] = json.loads(self.kubectl("get", "pods", "-l", selector, "-o", "json"))[
            "items"
        ]
        return [
            pod
            for pod in items
            if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] == "Running"
        ]

    def address(self, service: str) -> str:
        """The address of a Service."""
        return self.kubectl("get", "service", service, "-o", "jsonpath={.spec.clusterIP}").strip()


class Load:
    """Clients that ask without a pause on the first node. Use as a context manager; ``finish`` before its end."""

    def __init__(self, release: Release, name: str, streams: int, max_tokens: int) -> None:
        self.release, self.max_tokens, self.streams = release, max_tokens, streams
        self.log = release.work / f"load-{name}.log"
        self.errors = release.work / f"load-{name}.err"

    def __enter__(self) -> Self:
        endpoint = f"{self.release.address(f'{NAME}-twinpool-router')}:50051"
        asking = [
            sys.executable,
            "-m",
            "tests.pods.asking",
            endpoint,
            str(self.streams),
            str(self.max_tokens),
        ]
        with self.log.open("wb") as out, self.errors.open("wb") as err:
            self.process = subprocess.Popen(
                self.release.cluster.inside(*asking), stdout=out, stderr=err, env=self.release.env, cwd=ROOT
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def count(self) -> int:
        """How many answers have come."""
        return self.log.read_text().count("\n")

    def more(self, number: int) -> None:
        """Waits for so many further answers."""
        wanted = self.count() + number
        until_sync(lambda: self.count() >= wanted or self.process.poll() is not None, WAIT_SECONDS)
        assert self.process.poll() is None, self.errors.read_text()[-2000:]

    def finish(self) -> None:
        """Lets each client finish what it has asked."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(WAIT_SECONDS) == 0, self.errors.read_text()[-2000:]

    def check(self, oracle: Oracle) -> int:
        """Fails unless every stream came to its end with the tokens of the oracle; how often one was resumed."""
        return check(self.log.read_text(), oracle, self.max_tokens)
