# SPDX-License-Identifier: Apache-2.0
"""``twinpool doctor --kube``: a real kubectl against an API server whose objects are wrong in one way after the other."""

import copy
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart import Doc
from tests.support.kube_api import KubeApi
from twinpool.control.doctor.finding import Finding, Status
from twinpool.control.doctor.kube import check_kube
from twinpool.control.doctor.kube_nodes import lease_skew
from twinpool.control.doctor.kube_pods import quantity
from twinpool.control.doctor.kube_values import merged
from twinpool.control.kube.kubectl import Kubectl

pytestmark = [pytest.mark.chart, pytest.mark.slow]

GPU_POOL = {
    "models": {"chat": {"prefill": {"replicas": 2, "gpu": {"count": 1}, "rdma": {"count": 1}}}},
    "decode": {"gpu": {"count": 2}},
}
READY = [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}]


def pod(api: KubeApi, everything: list[Doc], name: str, component: str) -> Doc:
    """A ready pod as the chart's StatefulSet or Deployment of that part makes it."""
    template = next(
        doc["spec"]["template"] for doc in everything
        if doc["kind"] in ("StatefulSet", "Deployment")
        and doc["metadata"]["labels"]["app.kubernetes.io/component"] == component
    )  # fmt: skip
    status = {"phase": "Running", "conditions": copy.deepcopy(READY)}
    labels = template["metadata"]["labels"]
    return api.put("pods", name, "llm", labels, spec=copy.deepcopy(template["spec"]), status=status)


def lease(api: KubeApi, name: str, skew: float) -> Doc:
    """As a kubelet renews it and the API server notes it: its own time in microseconds, the server's in whole seconds."""
    server = datetime(2026, 11, 30, 12, 0, 0, 400_000, tzinfo=UTC)
    renewed = server + timedelta(seconds=skew)
    fields = [{"manager": "kubelet", "operation": "Update", "time": f"{server:%Y-%m-%dT%H:%M:%SZ}"}]
    spec = {"renewTime": f"{renewed:%Y-%m-%dT%H:%M:%S.%fZ}"}
    return api.put("leases", name, "kube-node-lease", spec=spec, metadata={"managedFields": fields})


@pytest.fixture
def healthy(api: KubeApi, everything: list[Doc]) -> KubeApi:
    """A release in which nothing is wrong."""
    for name, component in (
        ("etcd-0", "etcd"),
        ("prefill-0", "prefill"),
        ("decode-0", "decode"),
        ("router-0", "router"),
    ):
        pod(api, everything, name, component)
    for number in range(2):
        offer = {"nvidia.com/gpu": "2", "rdma/hca_shared_devices_a": "1k", "cpu": "8"}
        api.put("nodes", f"node-{number}", status={"allocatable": offer, "conditions": READY[:1]})
        lease(api, f"node-{number}", 0.2)
    default = {"annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
    api.put("storageclasses", "fast", metadata=default)
    api.put("persistentvolumeclaims", "data-etcd-0", "llm", {"app.kubernetes.io/instance": "rel", "app.kubernetes.io/component": "etcd"},
            status={"phase": "Bound"})  # fmt: skip
    for doc in everything:
        if doc["kind"] == "PodDisruptionBudget":
            status = {"disruptionsAllowed": 1, "expectedPods": 2, "currentHealthy": 2, "desiredHealthy": 1}
            api.put(
                "poddisruptionbudgets",
                doc["metadata"]["name"],
                "llm",
                doc["metadata"]["labels"],
                spec=doc["spec"],
                status=status,
            )
    return api


def checked(tmp_path: Path, values: dict[str, Any] | None = None) -> dict[str, list[Finding]]:
    """Findings by name."""
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(GPU_POOL if values is None else values))
    found: dict[str, list[Finding]] = {}
    for one in check_kube(Kubectl(), "", [file]):
        assert one.status is Status.OK or one.matters, one
        found.setdefault(one.name, []).append(one)
    return found


def bad(found: dict[str, list[Finding]]) -> dict[str, Finding]:
    """Those that have failed, by name."""
    return {name: one for name, several in found.items() for one in several if one.status is Status.FAILED}


def test_nothing_is_wrong_with_a_healthy_release(healthy: KubeApi, tmp_path: Path) -> None:
    found = checked(tmp_path)
    assert bad(found) == {}
    warned = [name for name, several in found.items() if several[0].status is Status.WARNING]
    assert warned == ["kind rayclusters.ray.io"]
    assert found["resource nvidia.com/gpu"][0].detail == "4 on 2 of 2 nodes, 4 wanted"
    assert found["pods"][0].detail == "4 of 4 ready"
    assert found["shared memory"][0].detail.startswith("2 of 2")
    assert found["node clocks"][0].detail.startswith("2 nodes, at most 0.1 s")
    assert found["storage class"][0].detail == "fast (default)"


def test_devices_that_nodes_do_not_offer(healthy: KubeApi, tmp_path: Path) -> None:
    for node in healthy.objects["nodes"]:
        node["status"]["allocatable"] = {"nvidia.com/gpu": "1"}
    found = bad(checked(tmp_path))
    gpu = found["resource nvidia.com/gpu"]
    assert gpu.detail == "2 on 2 of 2 nodes, 4 wanted; a worker wants 2, and no node has more than 1"
    rdma = found["resource rdma/hca_shared_devices_a"]
    assert rdma.detail.startswith("0 on 0 of 2 nodes, 2 wanted")
    assert "RDMA shared device plugin" in rdma.remedy
    healthy.objects["nodes"][0]["spec"] = {"unschedulable": True}
    assert "0 of 1 nodes" in bad(checked(tmp_path))["resource rdma/hca_shared_devices_a"].detail


def test_kinds_that_the_values_ask_for(healthy: KubeApi, tmp_path: Path) -> None:
    values = {"tls": {"enabled": True}, "monitoring": {"serviceMonitor": {"enabled": True}}, "ray": {"mode": "raycluster"},
              "router": {"autoscaling": {"enabled": True, "type": "keda"}}}  # fmt: skip
    found = bad(checked(tmp_path, values))
    assert {name for name in found if name.startswith("kind ")} == {
        "kind certificates.cert-manager.io", "kind issuers.cert-manager.io", "kind servicemonitors.monitoring.coreos.com",
        "kind scaledobjects.keda.sh", "kind rayclusters.ray.io",
    }  # fmt: skip
    assert "install cert-manager" in found["kind certificates.cert-manager.io"].remedy
    for resource, version, kind in (
        ("certificates", "cert-manager.io/v1", "Certificate"), ("issuers", "cert-manager.io/v1", "Issuer"),
        ("servicemonitors", "monitoring.coreos.com/v1", "ServiceMonitor"), ("scaledobjects", "keda.sh/v1alpha1", "ScaledObject"),
        ("rayclusters", "ray.io/v1", "RayCluster"),
    ):  # fmt: skip
        healthy.knows(resource, version, kind)
    assert bad(checked(tmp_path, values)) == {}
    assert bad(checked(tmp_path, {"tls": {"enabled": True, "certManager": {"enabled": False}}})) == {}


@pytest.mark.parametrize(
    ("status", "said", "remedy"),
    [
        (
            {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                                                 "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."}]},
            "Unschedulable: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", "describe pod",
        ),
        (
            {"phase": "Pending", "containerStatuses": [
                {"name": "decode", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]},
            "ImagePullBackOff: container decode: no such image", "image.repository",
        ),
        (
            {"phase": "Running", "containerStatuses": [
                {"name": "decode", "restartCount": 4, "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                 "lastState": {"terminated": {"exitCode": 3, "reason": "Error"}}}]},
            "CrashLoopBackOff: container decode: 4 restarts; it ended with 3", "--previous",
        ),
        (
            {"phase": "Running", "containerStatuses": [
                {"name": "decode", "restartCount": 2, "state": {"running": {}},
                 "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]},
            "OOMKilled: container decode was killed, 2 restarts", "resources.limits.memory",
        ),
        (
            {"phase": "Running", "conditions": [
                {"type": "Ready", "status": "False", "reason": "ContainersNotReady", "message": "unready: [decode]"}]},
            "ContainersNotReady: unready: [decode]", "model is loaded",
        ),
    ],
)  # fmt: skip
def test_a_pod_that_is_not_ready(
    healthy: KubeApi, tmp_path: Path, status: Doc, said: str, remedy: str
) -> None:
    (found,) = (one for one in healthy.objects["pods"] if one["metadata"]["name"] == "decode-0")
    found["status"] = status
    wrong = bad(checked(tmp_path))
    assert list(wrong) == ["pod decode-0"]
    assert wrong["pod decode-0"].detail == said
    assert remedy in wrong["pod decode-0"].remedy


def test_shared_memory_of_worker_pods(healthy: KubeApi, tmp_path: Path) -> None:
    (found,) = (one for one in healthy.objects["pods"] if one["metadata"]["name"] == "prefill-0")
    (volume,) = (one for one in found["spec"]["volumes"] if one["name"] == "shm")
    volume["emptyDir"]["sizeLimit"] = "16Mi"
    assert "16Mi; 64 MiB are needed" in bad(checked(tmp_path))["shared memory prefill-0"].detail
    volume["emptyDir"] = {}
    assert "not in memory" in bad(checked(tmp_path))["shared memory prefill-0"].detail
    for container in found["spec"]["containers"]:
        container["volumeMounts"] = []
    assert "no volume at /dev/shm" in bad(checked(tmp_path))["shared memory prefill-0"].detail


def test_a_node_with_another_time(healthy: KubeApi, tmp_path: Path) -> None:
    lease(healthy, "late", -9.0)
    lease(healthy, "early", 30.0)
    several = checked(tmp_path)["node clocks"]
    assert [one.detail.partition(" (")[0] for one in several] == [
        "early is some 29.9 s ahead of the API server",
        "late is some 9.1 s behind the API server",
    ]
    assert lease_skew({"metadata": {}, "spec": {}}) is None


def test_storage_of_etcd(healthy: KubeApi, tmp_path: Path) -> None:
    named = {"etcd": {"persistence": {"storageClassName": "slow"}}}
    assert "is slow; the cluster has fast" in bad(checked(tmp_path, named))["storage class"].detail
    healthy.objects["storageclasses"][0]["metadata"] = {"name": "fast", "labels": {}}
    healthy.objects["persistentvolumeclaims"][0]["status"]["phase"] = "Pending"
    found = bad(checked(tmp_path, {}))
    assert "no class is the default one" in found["storage class"].detail
    assert found["volume data-etcd-0"].detail == "Pending"
    assert bad(checked(tmp_path, {"etcd": {"enabled": False}})) == {}


def test_budgets_that_hold_a_drain(healthy: KubeApi, tmp_path: Path) -> None:
    budget = next(
        one for one in healthy.objects["poddisruptionbudgets"] if one["metadata"]["name"].endswith("router")
    )
    budget["status"] = {"disruptionsAllowed": 0, "expectedPods": 2, "currentHealthy": 1, "desiredHealthy": 1}
    (held,) = checked(tmp_path)[f"budget {budget['metadata']['name']}"]
    assert held.status is Status.WARNING
    assert held.detail == "lets no pod leave: 1 of 2 are healthy, 1 have to be"
    assert "make the pods ready" in held.remedy
    budget["status"] |= {"currentHealthy": 2, "desiredHealthy": 2}
    (held,) = checked(tmp_path)[f"budget {budget['metadata']['name']}"]
    assert "maxUnavailable" in held.remedy


def test_what_may_not_be_seen_is_said_and_the_rest_is_checked(healthy: KubeApi, tmp_path: Path) -> None:
    healthy.denied |= {"nodes", "leases", "create pods/portforward"}
    found = checked(tmp_path)
    right = found["right create pods/portforward"][0]
    assert right.status is Status.FAILED
    assert "may not create pods/portforward" in right.detail
    assert found["right list nodes"][0].status is Status.WARNING
    for name in ("nodes", "node clocks"):
        assert found[name][0].detail.startswith("KUBE_FORBIDDEN")
    assert found["pods"][0].status is Status.OK


def test_an_old_server_and_none_at_all(healthy: KubeApi, tmp_path: Path) -> None:
    healthy.version = "v1.27.9"
    assert "upgrade to 1.30" in bad(checked(tmp_path))["kubernetes"].remedy
    (only,) = check_kube(Kubectl("nowhere"), "", [])
    assert only.status is Status.FAILED
    assert "KUBE_CONTEXT_UNKNOWN" in only.detail


def test_the_command(healthy: KubeApi, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(GPU_POOL))
    command = [
        sys.executable,
        "-m",
        "twinpool.control.cli.main",
        "doctor",
        "--kube",
        "-f",
        str(file),
        "-n",
        "llm",
        "-o",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert set(json.loads(done.stdout)[0]) == {"name", "status", "detail", "matters", "remedy"}
    healthy.objects["nodes"].clear()
    assert subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 3
    several = subprocess.run(
        [*command, "--release", "other"], capture_output=True, text=True, timeout=120, check=False
    )
    (pods,) = (row for row in json.loads(several.stdout) if row["name"] == "pods")
    assert pods["detail"] == "the release has none"


def test_values_of_several_files_and_quantities() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 3}, "d": [2]}) == {
        "a": {"b": 3, "c": 2},
        "d": [2],
    }
    assert [quantity(text) for text in ("1Gi", "256Mi", "5k", "12", "1.5G")] == [
        1 << 30,
        256 << 20,
        5000,
        12,
        1.5e9,
    ]
    with pytest.raises(ValueError, match="no quantity"):
        quantity("much")
