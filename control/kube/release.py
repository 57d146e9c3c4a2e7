# SPDX-License-Identifier: Apache-2.0
"""A release of the chart in a namespace, found by the labels that the chart gives to all it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from twinpool.control.kube.kubectl import Kubectl
from twinpool.errors import TwinpoolError

PART_OF: Final = "app.kubernetes.io/part-of=twinpool"
NAME: Final = "app.kubernetes.io/name=twinpool"
"""Of pods, which do not say what they are part of."""

COMPONENT: Final = "app.kubernetes.io/component"
INSTANCE: Final = "app.kubernetes.io/instance"
PORT: Final = "grpc"
"""Name of the port of a process's gRPC services."""


@dataclass(frozen=True, slots=True)
class Service:
    """A Service, and its gRPC port."""

    name: str
    namespace: str
    release: str
    port: int

    @property
    def server_name(self) -> str:
        """The name that the chart's certificates hold for it."""
        return f"{self.name}.{self.namespace}.svc"


def find_service(kubectl: Kubectl, component: str, release: str = "") -> Service:
    """The Service of the routers or of the controller. Raises KUBE_SERVICE_NOT_FOUND, KUBE_RELEASE_AMBIGUOUS and what kubectl says."""
    labels = f"{PART_OF},{COMPONENT}={component}" + (f",{INSTANCE}={release}" if release else "")
    found = [made for item in kubectl.get("services", "-l", labels) if (made := _service(item)) is not None]
    where = f"namespace {kubectl.namespace}" if kubectl.namespace else "the context's namespace"
    if not found:
        of = f" of release {release}" if release else ""
        raise TwinpoolError("KUBE_SERVICE_NOT_FOUND", f"{where} has no Service{of} with the labels {labels}")
    releases = sorted({one.release for one in found})
    if len(releases) > 1:
        raise TwinpoolError("KUBE_RELEASE_AMBIGUOUS", f"{where} has the releases {', '.join(releases)}")
    return found[0]


def find_pods(kubectl: Kubectl, component: str, release: str = "") -> list[dict[str, Any]]:
    """The running pods of a component, by name. Raises what kubectl says."""
    labels = f"{NAME},{COMPONENT}={component}" + (f",{INSTANCE}={release}" if release else "")
    pods = kubectl.get("pods", "-l", labels, "--field-selector=status.phase=Running")
    return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))


def _service(item: dict[str, Any]) -> Service | None:
    """None: a headless one, which names pods one by one, or one without gRPC."""
    spec, meta = item["spec"], item["metadata"]
    ports = [int(port["port"]) for port in spec.get("ports", ()) if port.get("name") == PORT]
    if spec.get("clusterIP") == "None" or not ports:
        return None
    return Service(meta["name"], meta["namespace"], meta.get("labels", {}).get(INSTANCE, ""), ports[0])
