# SPDX-License-Identifier: Apache-2.0
"""A release on Kubernetes, as kubectl shows it: rights, what the cluster has to know, nodes, pods, volumes, budgets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from twinpool.control.doctor.finding import Finding, failed, judged, ok, warning
from twinpool.control.doctor.kube_nodes import check_node_clocks, check_resources
from twinpool.control.doctor.kube_pods import check_budgets, check_claims, check_pods, check_shared_memory
from twinpool.control.doctor.kube_values import Values, ValuesError, read_values
from twinpool.control.kube.kubectl import Kubectl
from twinpool.control.kube.release import INSTANCE, NAME, PART_OF
from twinpool.errors import TwinpoolError

LEAST_VERSION: Final = (1, 30)

_COMMANDS: Final = "commands of operators reach the release by it (--kube-context, --namespace)"
_LOOKS: Final = "what it would show is not checked"

Right = tuple[str, str, tuple[str, ...], str, bool]

RIGHTS_AT_ONCE: Final = 4
RIGHTS: Final[tuple[Right, ...]] = (
    ("get", "services", (), _COMMANDS, True),
    ("list", "pods", (), _COMMANDS, True),
    ("create", "pods", ("--subresource=portforward",), _COMMANDS, True),
    ("list", "statefulsets.apps", (), _LOOKS, False),
    ("list", "persistentvolumeclaims", (), _LOOKS, False),
    ("list", "poddisruptionbudgets.policy", (), _LOOKS, False),
    ("list", "nodes", (), _LOOKS, False),
    ("list", "leases.coordination.k8s.io", ("--namespace=kube-node-lease",), _LOOKS, False),
    ("list", "storageclasses.storage.k8s.io", (), _LOOKS, False),
)
"""Verb, resource, more words, what it is for, and whether commands need it."""


def check_kube(kubectl: Kubectl, release: str, files: Iterable[Path]) -> list[Finding]:
    """All there is to say. Never raises for what the API server refuses: that is a finding."""
    found = [_reached(kubectl)]
    if found[0].status.value == "failed":
        return found
    try:
        release = release or _only_release(kubectl)
        values = read_values(kubectl, release, list(files))
    except (TwinpoolError, ValuesError) as error:
        remedy = (
            error.spec.user_action
            if isinstance(error, TwinpoolError)
            else "give the release's values by --values"
        )
        return [*found, failed("release", str(error), "nothing can be said of it", remedy)]
    found.append(_release(release, values))
    found += _rights(kubectl)
    found += _guarded("kinds", lambda: _kinds(kubectl, values))
    found += _guarded("nodes", lambda: check_resources(kubectl, values))
    found += _guarded("node clocks", lambda: check_node_clocks(kubectl))
    found += _guarded("storage class", lambda: check_claims(kubectl, release, values))
    if release:
        selector = f"{NAME},{INSTANCE}={release}"
        found += _guarded("pods", lambda: check_pods(kubectl, selector))
        found += _guarded("shared memory", lambda: check_shared_memory(kubectl, selector))
        found += _guarded("disruption budgets", lambda: check_budgets(kubectl, selector))
    return found


def _guarded(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings, or why there are none."""
    try:
        return list(check())
    except TwinpoolError as error:
        return [warning(name, f"{error.reason}: {error.message}", _LOOKS, error.spec.user_action)]


def _reached(kubectl: Kubectl) -> Finding:
    try:
        told: dict[str, Any] = json.loads(kubectl.run("version", "-o", "json"))
    except TwinpoolError as error:
        detail = f"{error.reason}: {error.message}"
        return failed("kubernetes", detail, "nothing of the cluster can be seen", error.spec.user_action)
    server = told["serverVersion"]
    own, version = told["clientVersion"]["gitVersion"], server["gitVersion"]
    detail = f"server {version}, kubectl {own}"
    numbers = (int(server["major"]), int("".join(sign for sign in server["minor"] if sign.isdigit()) or 0))
    if numbers < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        return failed(
            "kubernetes", detail, "the chart's objects need a later one", f"upgrade to {least} or later"
        )
    return ok("kubernetes", detail)


def _only_release(kubectl: Kubectl) -> str:
    """The release of the namespace; "" if there is none. Raises KUBE_RELEASE_AMBIGUOUS."""
    label = INSTANCE
    services = kubectl.get("services", "-l", PART_OF)
    names = sorted({str(item["metadata"].get("labels", {}).get(label, "")) for item in services} - {""})
    if len(names) > 1:
        raise TwinpoolError("KUBE_RELEASE_AMBIGUOUS", f"the namespace has the releases {', '.join(names)}")
    return names[0] if names else ""


def _release(release: str, values: Values) -> Finding:
    if not release:
        detail = f"the namespace has none; what an install needs is checked with {values.origin}"
        return warning(
            "release", detail, "its pods are not checked", "give --namespace, or install the chart"
        )
    return ok("release", f"{release}, values from {values.origin}")


def _rights(kubectl: Kubectl) -> list[Finding]:
    """Each is a question of its own to the API server."""
    with ThreadPoolExecutor(RIGHTS_AT_ONCE) as threads:
        return list(threads.map(partial(_right, kubectl), RIGHTS))


def _right(kubectl: Kubectl, right: Right) -> Finding:
    verb, resource, more, purpose, needed = right
    words = f"{verb} {resource}{''.join('/' + one.partition('=')[2] for one in more if 'sub' in one)}"
    name = f"right {words}"
    try:
        allowed = kubectl.can(verb, resource, *more)
    except TwinpoolError as error:
        return warning(name, f"{error.reason}: {error.message}", purpose, error.spec.user_action)
    if allowed:
        return ok(name, "yes")
    remedy = (
        "have a Role with it bound to this user"
        if needed
        else "have a ClusterRole with it bound to this user"
    )
    return judged(needed, name, f"this user may not {words}", purpose, remedy)


def _kinds(kubectl: Kubectl, values: Values) -> Iterator[Finding]:
    """Kinds that the release's objects are of, or that it would use."""
    known = set(kubectl.run("api-resources", "-o", "name").split())
    wanted = values.kinds()
    for kind in wanted:
        name = f"kind {kind.resource}"
        if kind.resource in known:
            yield ok(name, f"known ({kind.why})")
        else:
            yield judged(
                kind.needed, name, f"the cluster does not know it ({kind.why})", kind.matters, kind.remedy
            )
