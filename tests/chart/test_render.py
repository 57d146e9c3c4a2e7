# SPDX-License-Identifier: Apache-2.0
"""What the chart renders to: valid for Kubernetes, safe by default, and two releases never meet."""

import re
from typing import Any

import kubernetes_validate
import pytest

from scripts import chart
from tests.support.chart import (
    CHART,
    EVERYTHING,
    FILES,
    Doc,
    Helm,
    containers,
    merged,
    named,
    nested,
    workloads,
)

pytestmark = pytest.mark.chart

VERSIONS = ("1.31", "1.34", "1.37")
CUSTOM = {
    "Certificate", "GRPCRoute", "HTTPRoute", "Issuer", "PrometheusRule", "ScaledObject", "ServiceMonitor",
}  # fmt: skip
"""Kinds of other projects, of which there are no schemas here."""

SCALED = nested({f"{role}.autoscaling.enabled": True for role in ("router", "prefill", "decode")})
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "defaults": ({}, ()),
    **{name: ({}, (name,)) for name in FILES},
    "everything": (EVERYTHING, ()),
    "scaled": (merged(EVERYTHING, SCALED), ()),
}


@pytest.mark.parametrize("case", CASES)
def test_helm_finds_no_fault(helm: Helm, case: str) -> None:
    files = [argument for name in CASES[case][1] for argument in ("-f", str(CHART / name))]
    result = helm.run("lint", "--strict", str(CHART), *files)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_manifests_fit_the_schemas_of_kubernetes(helm: Helm, case: str, version: str) -> None:
    values, files = CASES[case]
    docs = helm.docs(values, *files, version=f"{version}.0")
    checked = [doc for doc in docs if doc["kind"] not in CUSTOM]
    assert len(checked) >= 10
    for doc in checked:
        try:
            kubernetes_validate.validate(doc, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            name = f"{doc['kind']} {doc['metadata']['name']}"
            raise AssertionError(f"{name}: {'.'.join(map(str, error.path))}: {error.message}") from None


def test_a_field_that_kubernetes_does_not_know_would_be_seen(everything: list[Doc]) -> None:
    router = named(everything, "Deployment", "rel-twinpool-router")
    router = {**router, "spec": {**router["spec"], "replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(router, VERSIONS[-1], strict=True)


def test_every_object_is_named_once_and_within_bounds(helm: Helm) -> None:
    long = {"models": {"a-long-model-key": EVERYTHING["models"]["tiny"]}}
    docs = helm.docs(merged(EVERYTHING, long), release="a-release-with-a-name-of-many-characters")
    names = [(doc["kind"], doc["metadata"]["name"]) for doc in docs]
    assert len(set(names)) == len(names)
    for kind, name in names:
        # A StatefulSet's pods carry its name and a hash of ten characters in a label.
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name), name
        assert len(name) <= (52 if kind == "StatefulSet" else 63), name


def test_the_generated_files_are_up_to_date() -> None:
    assert (CHART / "values.schema.json").read_text() == chart.schema(), "python -m scripts.chart"
    assert (CHART / "README.md").read_text() == chart.readme(), "python -m scripts.chart"
    for path in chart.DASHBOARDS.glob("*.json"):
        assert (CHART / "dashboards" / path.name).read_text() == path.read_text(), "python -m scripts.chart"


# --- two releases in a namespace


def selectors(docs: list[Doc]) -> list[tuple[str, dict[str, str]]]:
    """(what, labels) of everything that picks pods."""
    found = []
    for doc in docs:
        spec = doc.get("spec", {})
        picked = {
            "Service": lambda spec=spec: spec.get("selector"),
            "Deployment": lambda spec=spec: spec["selector"]["matchLabels"],
            "StatefulSet": lambda spec=spec: spec["selector"]["matchLabels"],
            "PodDisruptionBudget": lambda spec=spec: spec["selector"]["matchLabels"],
            "NetworkPolicy": lambda spec=spec: spec["podSelector"]["matchLabels"],
            "ServiceMonitor": lambda spec=spec: spec["selector"]["matchLabels"],
        }.get(doc["kind"], lambda: None)()
        if picked is not None:
            found.append((f"{doc['kind']} {doc['metadata']['name']}", picked))
        for constraint in spec.get("template", {}).get("spec", {}).get("topologySpreadConstraints", []):
            found.append((f"spread of {doc['metadata']['name']}", constraint["labelSelector"]["matchLabels"]))
    return found


def picks(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize("other", ["rel2", "rel-twinpool", "twinpool"])
def test_two_releases_share_a_namespace(helm: Helm, everything: list[Doc], other: str) -> None:
    others = helm.docs(EVERYTHING, release=other)
    names = {(doc["kind"], doc["metadata"]["name"]) for doc in everything}
    assert names.isdisjoint((doc["kind"], doc["metadata"]["name"]) for doc in others)
    for ours, theirs in ((everything, others), (others, everything)):
        pods = [pod["metadata"]["labels"] for _, pod in workloads(theirs)]
        services = [doc["metadata"]["labels"] for doc in theirs if doc["kind"] == "Service"]
        for what, selector in selectors(ours):
            assert not any(picks(selector, labels) for labels in (*pods, *services)), what


def test_names_of_releases_never_meet(helm: Helm) -> None:
    """Also where a release is called as the chart, or as another one's objects."""
    seen: set[tuple[str, str]] = set()
    for release in ("rel", "twinpool", "rel-twinpool", "twinpool-router", "a" * 40, "a" * 41):
        names = {(doc["kind"], doc["metadata"]["name"]) for doc in helm.docs(EVERYTHING, release=release)}
        assert not seen & names
        seen |= names


def test_a_workload_picks_its_own_pods_and_no_others(everything: list[Doc]) -> None:
    pods = [(doc["metadata"]["name"], pod["metadata"]["labels"]) for doc, pod in workloads(everything)]
    for doc, _ in workloads(everything):
        if doc["kind"] == "Pod":
            continue
        selector = doc["spec"]["selector"]["matchLabels"]
        name = doc["metadata"]["name"]
        assert [other for other, labels in pods if picks(selector, labels)] == [name]


def test_no_label_of_a_user_is_in_a_selector(helm: Helm, everything: list[Doc]) -> None:
    theirs = {"app.kubernetes.io/component": "mine", "app.kubernetes.io/instance": "mine", "team": "mine"}
    roles = ("router", "prefill", "decode", "control", "etcd")
    values = merged(
        {"commonLabels": theirs, "nameOverride": "mine", "fullnameOverride": "rel-twinpool"},
        *({role: {"podLabels": theirs}} for role in roles),
    )
    docs = helm.docs(merged(EVERYTHING, values))
    assert selectors(docs) == selectors(everything)
    for doc, pod in workloads(docs):
        assert pod["metadata"]["labels"]["team"] == "mine"
        assert doc["metadata"]["labels"]["team"] == "mine"
        if doc["kind"] != "Pod":
            assert picks(doc["spec"]["selector"]["matchLabels"], pod["metadata"]["labels"])


# --- safety


def test_no_container_may_do_more_than_it_needs(everything: list[Doc]) -> None:
    added = {}
    for doc, pod in workloads(everything):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for container in containers(pod):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            if security["capabilities"].get("add"):
                added[doc["metadata"]["name"]] = security["capabilities"]["add"]
    # Of a StatefulSet, or of the group of a RayCluster.
    assert list(added.values()) == [["IPC_LOCK"]]
    assert {name.rpartition("-")[2] for name in added} == {"prefill"}


def test_devices_are_asked_for(everything: list[Doc]) -> None:
    (container,) = named(everything, "StatefulSet", "rel-twinpool-chat-prefill")["spec"]["template"]["spec"][
        "containers"
    ]
    wanted = {"nvidia.com/gpu": 1, "rdma/hca_shared_devices_a": 1}
    for kind in ("limits", "requests"):
        assert wanted.items() <= container["resources"][kind].items()
        assert "memory" in container["resources"][kind]
    (other,) = named(everything, "StatefulSet", "rel-twinpool-chat-decode")["spec"]["template"]["spec"][
        "containers"
    ]
    assert wanted.keys().isdisjoint(other["resources"]["limits"])


def test_every_mount_has_its_volume(everything: list[Doc]) -> None:
    for doc, pod in workloads(everything):
        claims = doc["spec"].get("volumeClaimTemplates", [])
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in claims}
        assert len(volumes) == len(pod["spec"]["volumes"]) + len(claims)
        mounted = set()
        for container in containers(pod):
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            assert len(set(paths)) == len(paths)
            mounted |= {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounted == volumes, doc["metadata"]["name"]


def test_what_is_named_is_there(everything: list[Doc]) -> None:
    """ConfigMaps, services and Secrets that are made by the chart, or by cert-manager for it, or given."""
    given = {"etcd-passwords", "resume", "token"}
    names = {kind: {doc["metadata"]["name"] for doc in everything if doc["kind"] == kind} for kind in (
        "ConfigMap", "Secret", "Service", "ServiceAccount", "PriorityClass",
    )}  # fmt: skip
    secrets = names["Secret"] | given
    secrets |= {doc["spec"]["secretName"] for doc in everything if doc["kind"] == "Certificate"}
    for doc, pod in workloads(everything):
        spec = pod["spec"]
        assert spec["serviceAccountName"] in names["ServiceAccount"]
        assert spec.get("priorityClassName") in names["PriorityClass"] | {None}
        if doc["kind"] == "StatefulSet":
            assert doc["spec"]["serviceName"] in names["Service"]
        for volume in spec["volumes"]:
            assert volume.get("configMap", {}).get("name") in names["ConfigMap"] | {None}
            assert volume.get("secret", {}).get("secretName") in secrets | {None}
