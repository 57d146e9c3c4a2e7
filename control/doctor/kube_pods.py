# SPDX-License-Identifier: Apache-2.0
"""The pods of a release, their shared memory, their volumes, and the budgets that hold them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from twinpool.control.doctor.finding import Finding, failed, ok, warning
from twinpool.control.doctor.kube_values import ROLES, Values
from twinpool.control.doctor.machine import MIB, SHM_WORKER_BYTES
from twinpool.control.kube.kubectl import Kubectl
from twinpool.control.kube.release import COMPONENT, INSTANCE

_DEFAULT_CLASS: Final = "storageclass.kubernetes.io/is-default-class"
_UNITS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_REMEDIES: Final = {
    "Unschedulable": "kubectl describe pod; `doctor --kube` shows what nodes offer",
    "ImagePullBackOff": "look at image.repository, image.tag and imagePullSecrets",
    "ErrImagePull": "look at image.repository, image.tag and imagePullSecrets",
    "CreateContainerConfigError": "a Secret or ConfigMap that the pod names is missing: kubectl describe pod",
    "CrashLoopBackOff": "kubectl logs --previous",
    "OOMKilled": "raise resources.limits.memory, or lower kv.num_blocks and kv.host_blocks",
    "ContainersNotReady": "kubectl logs; a worker is ready once its model is loaded and etcd has its lease",
}


def check_pods(kubectl: Kubectl, selector: str) -> Iterator[Finding]:
    """Those that are not ready, with the reason. Raises what kubectl says."""
    pods = kubectl.get("pods", "-l", selector)
    if not pods:
        yield failed(
            "pods",
            "the release has none",
            "nobody serves",
            "kubectl get events; kubectl get statefulsets,deployments",
        )
        return
    ready = 0
    for pod in sorted(pods, key=lambda one: str(one["metadata"]["name"])):
        reason = not_ready(pod)
        if reason is None:
            ready += 1
            continue
        kind, text = reason
        detail = f"{kind}: {text}" if text else kind
        remedy = _REMEDIES.get(kind, "kubectl describe pod")
        yield failed(f"pod {pod['metadata']['name']}", detail, _missing(pod), remedy)
    if ready:
        yield ok("pods", f"{ready} of {len(pods)} ready")


def _missing(pod: dict[str, Any]) -> str:
    part = pod["metadata"].get("labels", {}).get(COMPONENT, "it")
    return {
        "etcd": "nobody registers anew; what runs goes on",
        "control": "operators are not answered; requests go on",
    }.get(part, f"{part} has less capacity, or none")


def not_ready(pod: dict[str, Any]) -> tuple[str, str] | None:
    """The reason's name and its words, the most telling one; None: the pod is ready, or has ended well."""
    status = pod.get("status", {})
    conditions = {one["type"]: one for one in status.get("conditions", ())}
    if status.get("phase") == "Succeeded" or conditions.get("Ready", {}).get("status") == "True":
        return None
    placed = conditions.get("PodScheduled", {})
    if placed.get("status") == "False":
        return str(placed.get("reason", "Unschedulable")), str(placed.get("message", ""))
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        last = container.get("lastState", {}).get("terminated", {})
        if last.get("reason") == "OOMKilled":
            return (
                "OOMKilled",
                f"container {container['name']} was killed, {container.get('restartCount', 0)} restarts",
            )
        if waiting := container.get("state", {}).get("waiting"):
            if waiting.get("reason") in ("PodInitializing", "ContainerCreating"):
                continue
            ended = f"; it ended with {last['exitCode']}" if "exitCode" in last else ""
            text = str(waiting.get("message", "")).strip() or f"{container.get('restartCount', 0)} restarts"
            return str(waiting.get("reason", "Waiting")), f"container {container['name']}: {text}{ended}"
    unready = conditions.get("Ready", {})
    if status.get("phase") == "Failed":
        return str(status.get("reason") or "Failed"), str(status.get("message", ""))
    return str(unready.get("reason") or status.get("phase", "Unknown")), str(unready.get("message", ""))


def check_shared_memory(kubectl: Kubectl, selector: str) -> Iterator[Finding]:
    """Of each worker pod: a volume in memory at /dev/shm. Raises what kubectl says."""
    roles = f"app.kubernetes.io/component in ({','.join(ROLES)})"
    pods = kubectl.get("pods", "-l", f"{selector},{roles}")
    good = 0
    for pod in pods:
        name, fault = pod["metadata"]["name"], shm_fault(pod["spec"])
        if fault is None:
            good += 1
        else:
            yield failed(f"shared memory {name}", fault, "UCX cannot share memory, and a worker may end at its start",
                         "set the value sharedMemory of its role; leave /dev/shm to the chart")  # fmt: skip
    if good:
        yield ok("shared memory", f"{good} of {len(pods)} worker pods have a volume in memory at /dev/shm")


def shm_fault(spec: dict[str, Any]) -> str | None:
    """What is wrong with the /dev/shm of a pod; None: nothing."""
    volumes = {one["name"]: one for one in spec.get("volumes", ())}
    for container in spec.get("containers", ()):
        mounted = [one["name"] for one in container.get("volumeMounts", ()) if one["mountPath"] == "/dev/shm"]
        if not mounted:
            return f"container {container['name']} has no volume at /dev/shm: the runtime gives it 64 MiB"
        shared = volumes.get(mounted[0], {}).get("emptyDir", {})
        if shared.get("medium") != "Memory":
            return f"the volume {mounted[0]} at /dev/shm is not in memory"
        size = shared.get("sizeLimit")
        if size is not None and quantity(size) < SHM_WORKER_BYTES:
            return f"/dev/shm has {size}; {SHM_WORKER_BYTES // MIB} MiB are needed"
    return None


def quantity(text: str) -> float:
    """Bytes of a quantity such as 256Mi. Raises ValueError for what is none."""
    found = re.fullmatch(r"([0-9.]+)([kMG]i?)?", text.replace("K", "k", 1) if text.endswith("K") else text)
    if found is None:
        raise ValueError(f"{text!r} is no quantity")
    return float(found[1]) * _UNITS[(found[2] or "").replace("ki", "Ki")]


def check_claims(kubectl: Kubectl, release: str, values: Values) -> Iterator[Finding]:
    """The class that etcd's volumes are of, and volumes that wait. Raises what kubectl says."""
    if not values.get("etcd.enabled", True) or not values.get("etcd.persistence.enabled", True):
        yield ok("storage class", "etcd has no volumes of its own here")
        return
    wanted = str(values.get("etcd.persistence.storageClassName", ""))
    classes = {str(one["metadata"]["name"]): one for one in kubectl.get("storageclasses.storage.k8s.io")}
    default = [
        name
        for name, one in classes.items()
        if one["metadata"].get("annotations", {}).get(_DEFAULT_CLASS) == "true"
    ]
    matters = "etcd's volume stays Pending, and with it etcd"
    if wanted and wanted not in classes:
        detail = f"etcd.persistence.storageClassName is {wanted}; the cluster has {', '.join(sorted(classes)) or 'none'}"
        yield failed("storage class", detail, matters, "name one that the cluster has")
    elif not wanted and not default:
        detail = f"no class is the default one; the cluster has {', '.join(sorted(classes)) or 'none'}"
        yield failed(
            "storage class",
            detail,
            matters,
            "set etcd.persistence.storageClassName, or mark a class as default",
        )
    else:
        yield ok("storage class", wanted or f"{default[0]} (default)")
    if not release:
        return
    for claim in kubectl.get("persistentvolumeclaims", "-l", f"{INSTANCE}={release},{COMPONENT}=etcd"):
        phase = claim.get("status", {}).get("phase", "Unknown")
        if phase != "Bound":
            name = claim["metadata"]["name"]
            yield failed(f"volume {name}", f"{phase}", matters, f"kubectl describe pvc {name}")


def check_budgets(kubectl: Kubectl, selector: str) -> Iterator[Finding]:
    """PodDisruptionBudgets that let no pod of the release leave, so that a drain of a node waits. Raises what kubectl says."""
    budgets = kubectl.get("poddisruptionbudgets.policy")
    pods = kubectl.get("pods", "-l", selector)
    free = 0
    for budget in budgets:
        labels = budget["spec"].get("selector", {}).get("matchLabels", {})
        mine = [pod for pod in pods if labels and labels.items() <= pod["metadata"].get("labels", {}).items()]
        if not mine:
            continue
        status, name = budget.get("status", {}), budget["metadata"]["name"]
        if status.get("disruptionsAllowed", 0) > 0 or not status.get("expectedPods", 0):
            free += 1
            continue
        healthy, least = status.get("currentHealthy", 0), status.get("desiredHealthy", 0)
        detail = f"lets no pod leave: {healthy} of {status['expectedPods']} are healthy, {least} have to be"
        remedy = (
            "make the pods ready first, see above"
            if healthy < status["expectedPods"]
            else "raise the role's replicas or pdb.maxUnavailable; it was set so that none may ever leave"
        )
        yield warning(f"budget {name}", detail, "kubectl drain of a node with one of its pods waits", remedy)
    if free:
        yield ok("disruption budgets", f"{free} let a pod leave")
