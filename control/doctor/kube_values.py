# SPDX-License-Identifier: Apache-2.0
"""What the values of a release ask of the cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from twinpool.control.kube.kubectl import CALL_SECONDS, Kubectl

ROLES: Final = ("prefill", "decode")


class ValuesError(Exception):
    """The values cannot be had."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object by its resource, why it is wanted, and what follows where it is not known."""

    resource: str
    why: str
    needed: bool
    matters: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Values:
    """Values as helm takes them, and where they are from. What is not set has the chart's default, which asks for little."""

    tree: Mapping[str, Any]
    origin: str

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a dotted path."""
        found: Any = self.tree
        for part in path.split("."):
            if not isinstance(found, Mapping) or found.get(part) is None:
                return default
            found = found[part]
        return found

    def pools(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """POOL-ROLE and the block of values of each role of a pool: a model's own pool, and those of its `pools`."""
        for key, model in self.get("models", {}).items():
            further = (model or {}).get("pools") or {}
            blocks = {key: {}} | {f"{key}-{name}": own for name, own in further.items() if own is not None}
            for pool, own in blocks.items() if model else ():
                for role in ROLES:
                    block = merged(self.get(role, {}), model.get(role) or {})
                    yield f"{pool}-{role}", merged(block, own.get(role) or {})

    def devices(self) -> dict[str, list[tuple[str, int, int]]]:
        """By name of a resource of nodes: (pool, workers, devices a worker) of those that want some."""
        wanted: dict[str, list[tuple[str, int, int]]] = {}
        for pool, block in self.pools():
            for device, default in (("gpu", "nvidia.com/gpu"), ("rdma", "rdma/hca_shared_devices_a")):
                asked = block.get(device) or {}
                if count := int(asked.get("count") or 0):
                    name = str(asked.get("resource") or default)
                    wanted.setdefault(name, []).append((pool, int(block.get("replicas", 1)), count))
        return wanted

    def kinds(self) -> list[Kind]:
        """Kinds of operators of others that the objects of the release are of."""
        found = list(self._ray_kinds())
        if self.get("tls.enabled") and self.get("tls.certManager.enabled", True):
            found += [
                _needed(
                    f"{name}.cert-manager.io",
                    "tls.certManager.enabled",
                    "install cert-manager, or set tls.secrets",
                )
                for name in ("certificates", "issuers")
            ]
        prometheus = "install the Prometheus operator"
        for value, name in (("serviceMonitor", "servicemonitors"), ("rules", "prometheusrules")):
            if self.get(f"monitoring.{value}.enabled"):
                path = f"monitoring.{value}.enabled"
                found.append(_needed(f"{name}.monitoring.coreos.com", path, f"{prometheus}, or unset {path}"))
        scaled = [(name, block.get("autoscaling") or {}) for name, block in self.pools()]
        scaled.append(("router", self.get("router.autoscaling", {})))
        if any(one.get("enabled") and one.get("type") == "keda" for _, one in scaled):
            found.append(
                _needed(
                    "scaledobjects.keda.sh", "autoscaling.type keda", "install KEDA, or set the type to hpa"
                )
            )
        if self.get("gateway.enabled"):
            found += [
                _needed(f"{name}.gateway.networking.k8s.io", "gateway.enabled", "install the Gateway API")
                for name in ("grpcroutes", "httproutes")
            ]
        if any((block.get("rdma") or {}).get("networks") for _, block in self.pools()):
            name = "network-attachment-definitions.k8s.cni.cncf.io"
            found.append(_needed(name, "rdma.networks", "install Multus"))
        return found

    def _ray_kinds(self) -> Iterator[Kind]:
        mode = self.get("ray.mode", "")
        if mode == "statefulset":
            return
        yield Kind(
            "rayclusters.ray.io",
            f"ray.mode {mode}" if mode else "for pools that Ray runs",
            mode == "raycluster",
            "the workers of a RayCluster cannot be installed; StatefulSets run them where ray.mode lets them",
            "install KubeRay, or leave the workers to StatefulSets",
        )


def _needed(resource: str, value: str, remedy: str) -> Kind:
    return Kind(resource, value, True, "helm refuses to install or upgrade the release", remedy)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Maps are merged, everything else is taken from ``over``, as helm does."""
    made = dict(base)
    for key, value in over.items():
        before = made.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        made[key] = merged(before, value) if both else value  # type: ignore[arg-type]
    return made


def read_values(kubectl: Kubectl, release: str, files: list[Path]) -> Values:
    """From files; else what helm has of the release; else nothing. Raises ValuesError."""
    if files:
        tree: dict[str, Any] = {}
        for file in files:
            tree = merged(tree, _parsed(file))
        return Values(tree, ", ".join(map(str, files)))
    helm = shutil.which("helm")
    if not release or helm is None:
        return Values(
            {}, "the chart's defaults" + ("" if helm or not release else ": there is no helm in the PATH")
        )
    options = [
        ("--kubeconfig", kubectl.kubeconfig),
        ("--kube-context", kubectl.context),
        ("-n", kubectl.namespace),
    ]
    given = [word for name, value in options if value for word in (name, value)]
    command = [helm, "get", "values", release, "--all", "-o", "json", *given]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise ValuesError(f"helm took more than {CALL_SECONDS:g} s") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        # Reading a release needs the right to read Secrets, which not every operator has.
        return Values({}, f"the chart's defaults: helm get values: {said}")
    return Values(json.loads(done.stdout) or {}, "helm get values")


def _parsed(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValuesError(f"{file}: {error}") from error
    if not isinstance(tree, dict | None):
        raise ValuesError(f"{file} holds no map of values")
    return tree or {}
