# SPDX-License-Identifier: Apache-2.0
"""The nodes: devices that the release's workers ask for, and clocks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

from twinpool.control.doctor.finding import Finding, failed, judged, ok, warning
from twinpool.control.doctor.kube_values import Values
from twinpool.control.kube.kubectl import Kubectl

GPU: Final = "nvidia.com/gpu"

NODE_SKEW_SECONDS_MAX: Final = 2.0
"""The server's side of the comparison is known to a second, and the write took time, too."""

_LEASES: Final = "kube-node-lease"


def check_resources(kubectl: Kubectl, values: Values) -> Iterator[Finding]:
    """GPUs and RDMA devices that nodes offer, against what the pools want. Raises what kubectl says."""
    nodes = [node for node in kubectl.get("nodes") if _takes_pods(node)]
    wanted = values.devices()
    for resource in sorted({GPU, *wanted}):
        offered = {str(node["metadata"]["name"]): _count(node, resource) for node in nodes}
        total, most = sum(offered.values()), max(offered.values(), default=0)
        having = sum(count > 0 for count in offered.values())
        asked = sum(workers * count for _, workers, count in wanted.get(resource, ()))
        largest = max((count for _, _, count in wanted.get(resource, ())), default=0)
        detail = f"{total} on {having} of {len(nodes)} nodes, {asked} wanted"
        if asked == 0 or (asked <= total and largest <= most):
            yield ok(f"resource {resource}", detail)
            continue
        if largest > most:
            detail += f"; a worker wants {largest}, and no node has more than {most}"
        plugin = "the RDMA shared device plugin" if resource.startswith("rdma") else "NVIDIA's device plugin"
        remedy = (
            f"install {plugin} on the nodes, and give the workers tolerations of their taints"
            if total == 0
            else "add nodes, or lower the pools' replicas or counts"
        )
        yield failed(f"resource {resource}", detail, "workers stay Pending", remedy)
    unwell = [str(node["metadata"]["name"]) for node in nodes if not _ready(node)]
    if unwell:
        yield warning(
            "nodes", f"not ready: {', '.join(unwell)}", "pods there do not answer", "kubectl describe node"
        )


def _takes_pods(node: dict[str, Any]) -> bool:
    return not node.get("spec", {}).get("unschedulable")


def _count(node: dict[str, Any], resource: str) -> int:
    text = str(node.get("status", {}).get("allocatable", {}).get(resource, "0"))
    return int(text.removesuffix("k")) * (1000 if text.endswith("k") else 1)


def _ready(node: dict[str, Any]) -> bool:
    conditions = node.get("status", {}).get("conditions", ())
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


def check_node_clocks(kubectl: Kubectl) -> Iterator[Finding]:
    """Each kubelet renews its lease with its own time; the API server notes when that came, in whole seconds of its own time.

    The difference is the skew, less the time that the write took and up to a second. Raises what kubectl says.
    """
    leases = kubectl.get("leases.coordination.k8s.io", f"--namespace={_LEASES}", "--show-managed-fields")
    found = {str(one["metadata"]["name"]): skew for one in leases if (skew := lease_skew(one)) is not None}
    if not found:
        yield warning("node clocks", "no lease of a node says when it was written", "skew is not known", "")
        return
    off = {name: skew for name, skew in found.items() if abs(skew) > NODE_SKEW_SECONDS_MAX}
    for name, skew in sorted(off.items()):
        way = "ahead of" if skew > 0 else "behind"
        detail = f"{name} is some {abs(skew):.1f} s {way} the API server (known to a second)"
        matters = "events, spans and logs are in the wrong order; beyond minutes certificates are refused"
        yield judged(
            abs(skew) > NODE_SKEW_SECONDS_MAX,
            "node clocks",
            detail,
            matters,
            "run an NTP client on the node (chrony)",
        )
    if not off:
        worst = max(found.values(), key=abs)
        yield ok(
            "node clocks",
            f"{len(found)} nodes, at most {abs(worst):.1f} s from the API server (known to a second)",
        )


def lease_skew(lease: dict[str, Any]) -> float | None:
    """Seconds by which the node's clock is ahead; None where the lease does not show it."""
    renewed = lease.get("spec", {}).get("renewTime")
    written = [
        one["time"]
        for one in lease["metadata"].get("managedFields", ())
        if one.get("manager") == "kubelet" and "time" in one
    ]
    if renewed is None or not written:
        return None
    server = max(datetime.fromisoformat(time) for time in written)
    # Whole seconds are cut off: half a second is the middle of what it may have been.
    return (datetime.fromisoformat(renewed) - server).total_seconds() - 0.5
