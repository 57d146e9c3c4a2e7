# SPDX-License-Identifier: Apache-2.0
"""What KubeRay's operator makes of a RayCluster, as far as pods see it: their command, environment, labels and names in DNS.

After its sources (ray-project/kuberay, ray-operator/controllers/ray/common, Apache-2.0), which need a cluster to run; nothing is copied.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jsonschema
import yaml

Doc = dict[str, Any]
CRD: Final = Path(__file__).parents[1] / "chart" / "data" / "rayclusters.crd.yaml"
BOOLEAN_OPTIONS: Final = frozenset({"log-color", "include-dashboard", "include-log-monitor"})
"""Options of `ray start` whose "true" and "false" are passed on; of others "true" is a flag and "false" is nothing."""
NAME_MAX: Final = 53
"""Longest name of a RayCluster."""


@dataclass(frozen=True)
class Group:
    """The head, or a group of workers."""

    cluster: Doc
    name: str
    params: Mapping[str, str]
    template: Doc
    replicas: int

    @property
    def is_head(self) -> bool:
        """Whether it is the head."""
        return self.name == "headgroup"

    @property
    def doc(self) -> Doc:
        """Stands for a workload of its own among those of Kubernetes."""
        name = f"{self.cluster['metadata']['name']}-{self.name}"
        metadata = {"name": name, "labels": self.cluster["metadata"]["labels"]}
        return {"kind": "RayGroup", "metadata": metadata, "spec": {"replicas": self.replicas}}


def groups(cluster: Doc) -> Iterator[Group]:
    """The head, then the groups of workers."""
    head = cluster["spec"]["headGroupSpec"]
    yield Group(cluster, "headgroup", head["rayStartParams"], head["template"], 1)
    for each in cluster["spec"]["workerGroupSpecs"]:
        replicas = each.get("replicas", each["minReplicas"])
        yield Group(cluster, each["groupName"], each["rayStartParams"], each["template"], replicas)


def head_service(cluster: Doc) -> str:
    """The name by which pods of workers find the head."""
    return f"{cluster['metadata']['name']}-head-svc"


def service(cluster: Doc) -> Doc:
    """The Service that the operator makes of the head."""
    selector = {"ray.io/cluster": cluster["metadata"]["name"], "ray.io/node-type": "head"}
    spec = {"clusterIP": "None", "selector": selector, "publishNotReadyAddresses": True, "ports": []}
    return {"kind": "Service", "metadata": {"name": head_service(cluster)}, "spec": spec}


def command(group: Group, address: str) -> str:
    """The shell's line that the first container of a pod runs. ``address``: of the head, for workers."""
    params = dict(group.params)
    if group.is_head:
        params.setdefault("dashboard-host", "0.0.0.0")
    else:
        params.setdefault("address", address)
    params.setdefault("metrics-export-port", "8080")
    params.setdefault("dashboard-agent-listen-port", "52365")
    params["block"] = "true"
    limits = group.template["spec"]["containers"][0]["resources"].get("limits", {})
    if "memory" not in params and "memory" in limits:
        params["memory"] = str(_bytes(limits["memory"]))
    words = ["ray", "start", *(["--head"] if group.is_head else [])]
    for name, value in sorted(params.items()):
        if value.lower() in ("true", "false") and name not in BOOLEAN_OPTIONS:
            words += [f"--{name}"] if value.lower() == "true" else []
        else:
            words.append(f"--{name}={value}")
    return " ".join(words)


def pods(cluster: Doc, namespace: str) -> list[Doc]:
    """The pods that the operator makes."""
    name = cluster["metadata"]["name"]
    port = dict(cluster["spec"]["headGroupSpec"]["rayStartParams"]).get("port", "6379")
    host = f"{head_service(cluster)}.{namespace}.svc.cluster.local"
    made = []
    for group in groups(cluster):
        for number in range(group.replicas):
            pod = copy.deepcopy(group.template)
            kind = "head" if group.is_head else "worker"
            own = {"ray.io/cluster": name, "ray.io/node-type": kind, "ray.io/group": group.name, "ray.io/is-ray-node": "yes"}  # fmt: skip
            pod["metadata"]["labels"] |= own
            pod["metadata"]["name"] = f"{name}-{group.name}-{number}" if not group.is_head else f"{name}-head"
            container = pod["spec"]["containers"][0]
            assert not {"command", "args"} & container.keys(), "the operator runs these before ray start"
            line = command(group, f"{host}:{port}")
            if not group.is_head:
                pod["spec"].setdefault("initContainers", []).append(_wait(container, f"{host}:{port}"))
            container["command"] = ["/bin/bash", "-c", "--"]
            container["args"] = [f"ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-65536}}; {line}"]
            address = f"127.0.0.1:{port}" if group.is_head else f"{host}:{port}"
            container["env"] = [
                *container["env"],
                {"name": "RAY_CLUSTER_NAME", "value": name},
                {"name": "RAY_CLUSTER_NAMESPACE", "value": namespace},
                {
                    "name": "RAY_CLOUD_INSTANCE_ID",
                    "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
                },
                {"name": "RAY_NODE_TYPE_NAME", "value": group.name},
                {"name": "KUBERAY_GEN_RAY_START_CMD", "value": line},
                {"name": "RAY_PORT", "value": port},
                {"name": "RAY_ADDRESS", "value": address},
                {"name": "RAY_USAGE_STATS_KUBERAY_IN_USE", "value": "1"},
            ]
            made.append({"kind": "Pod", **pod})
    return made


def _wait(container: Doc, address: str) -> Doc:
    """What the operator has run before a worker's node, with its environment and mounts."""
    script = f"until ray health-check --address {address} > /dev/null 2>&1; do sleep 1; done"
    keys = ("image", "imagePullPolicy", "env", "volumeMounts", "securityContext")
    own = {key: copy.deepcopy(container[key]) for key in keys}
    return {"name": "wait-gcs-ready", "command": ["/bin/bash", "-c", "--"], "args": [script], **own}


def _bytes(quantity: str) -> int:
    for ending, factor in (("Ki", 2**10), ("Mi", 2**20), ("Gi", 2**30), ("Ti", 2**40), ("M", 10**6), ("G", 10**9)):  # fmt: skip
        if quantity.endswith(ending):
            return int(float(quantity.removesuffix(ending)) * factor)
    return int(quantity)


def check(cluster: Doc) -> None:
    """Raises for what the definition of RayClusters, or the operator, refuses; templates of pods are for others to check."""
    schema = yaml.safe_load(CRD.read_text())
    jsonschema.validate(cluster, schema, cls=jsonschema.Draft7Validator)
    assert len(cluster["metadata"]["name"]) <= NAME_MAX
    spec = cluster["spec"]
    scales = spec.get("enableInTreeAutoscaling", False)
    for group in spec["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["maxReplicas"]
        assert scales or "replicas" in group
    for group in groups(cluster):
        assert "labels" not in group.params
        assert all(isinstance(value, str) for value in group.params.values())
