# SPDX-License-Identifier: Apache-2.0
"""Every value does something, and what is no value is refused."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import yaml

from tests.support.chart import CHART, EVERYTHING, Helm, merged, nested

pytestmark = pytest.mark.chart

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())

EXTERNAL = {
    "etcd.enabled": False,
    "externalEtcd.endpoints": ["etcd.example.com:2379"],
    "externalEtcd.user": "me",
    "externalEtcd.passwordSecret": "password",
    "externalEtcd.tlsSecret": "etcd-tls",
}
RAY: dict[str, Any] = {"ray.mode": "raycluster", "ray.auth.existingSecret": "token"}
RAY_SCALES = RAY | {"prefill.autoscaling.enabled": True, "prefill.autoscaling.type": "ray"}
CONTEXTS: dict[str, dict[str, Any]] = {
    "ray": RAY,
    "ray.mode": {key: value for key, value in RAY.items() if key != "ray.mode"},
    "ray.autoscaler": RAY_SCALES,
    "networkPolicy.kubernetes": RAY_SCALES,
    "control.rayResources": RAY,
    **{f"ports.ray{name}": RAY for name in ("Gcs", "Node", "Objects", "Environments", "First", "Last")},
    "externalEtcd": EXTERNAL,
    "etcd.enabled": {key: value for key, value in EXTERNAL.items() if key != "etcd.enabled"},
    "tls.certManager.issuerRef": {"tls.certManager.issuerRef.name": "issuer"},
    "etcd.image": {"etcd.image.repository": "registry.example.com/etcd"},
    "router.http.enabled": {"ingress.http.enabled": False, "gateway.httpHostnames": []},
    **{
        f"{role}.autoscaling": {f"{role}.autoscaling.enabled": True}
        for role in ("router", "prefill", "decode")
    },
    **{
        f"{role}.autoscaling.prometheusUrl": {
            f"{role}.autoscaling.enabled": True,
            f"{role}.autoscaling.type": "keda",
        }
        for role in ("router", "prefill", "decode")
    },
    **{f"{role}.autoscaling.enabled": {} for role in ("router", "prefill", "decode")},
    **{
        f"{role}.{device}.resource": {f"{role}.{device}.count": 1}
        for role in ("prefill", "decode")
        for device in ("gpu", "rdma")
    },
}
"""What else has to be set for a value to show, by the beginning of its name; the longest counts."""

OTHERS: dict[str, Any] = {
    "image.digest": "sha256:" + "1" * 64,
    "image.cudaDigest": "sha256:" + "2" * 64,
    "config.transfer.ucx_tls": "tcp",
    "config.log.format": "console",
    "models": {"other": {"tiny": {"family": "llama"}}},
    "type": "keda",
    "ray.mode": "raycluster",
    "ray.version": "2.61.0",
    "upgradeStrategy": "Recreate",
    "gcsFaultToleranceOptions": {"redisAddress": "redis:6379"},
    "kubernetes": [{"podSelector": {}}],
    "router.service.type": "LoadBalancer",
    "whenUnsatisfiable": "DoNotSchedule",
    "pullPolicy": "Always",
    "kind": "ClusterIssuer",
    "etcd.replicas": 3,
    "duration": "24h",
    "renewBefore": "8h",
    "interval": "30s",
    "size": "1Gi",
    "sharedMemory": "1Gi",
    "prometheusUrl": "https://example.com",
    "rejectedRatio": 0.5,
    "config": {"log": {"level": "debug"}},
    "requests": {"cpu": "7"},
    "limits": {"memory": "7Gi"},
    "endpoints": ["other.example.com:2400"],
    "routerDnsNames": ["more.example.com"],
    "grpcHostnames": ["more.example.com"],
    "httpHostnames": ["more.example.com"],
    "tenants.file": {"tenants": []},
    "affinity": {"nodeAffinity": {}},
    "tolerations": [{"operator": "Exists"}],
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "tmp", "mountPath": "/more"}],
    "imagePullSecrets": [{"name": "pull"}],
    "extraEgress": [{"ports": [{"port": 4317}]}],
    "clients": [{"podSelector": {}}],
    "operators": [{"podSelector": {}}],
    "prometheus": [{"podSelector": {}}],
    "dns": [{"podSelector": {}}],
    "peers": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    "parentRefs": [{"name": "other"}],
}
"""Another value, by name or by its last part."""

FREE = {"annotations", "commonLabels", "labels", "nodeSelector", "podAnnotations", "podLabels"}
"""Maps of strings of a user's choice."""


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{path}{key}"
        if isinstance(value, dict) and value and key not in {"requests", "limits"} | FREE:
            yield from leaves(value, f"{name}.")
        else:
            yield name, value


LEAVES = dict(leaves(VALUES))


def other(name: str, value: object) -> object:
    last = name.rpartition(".")[2]
    for key in (name, last):
        if key in OTHERS and OTHERS[key] != value:
            return OTHERS[key]
    if last in FREE:
        return {"example.com/key": "value"}
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1 if value else 1
    assert isinstance(value, str), f"{name}: give another value than {value!r} in OTHERS"
    return "changed" if value != "changed" else "other"


def context_of(name: str) -> dict[str, Any]:
    found = max((key for key in CONTEXTS if f"{name}.".startswith(f"{key}.")), key=len, default="")
    return CONTEXTS.get(found, {})


@pytest.fixture(scope="session")
def before(helm: Helm) -> Any:
    """The rendering in a context."""

    @cache
    def render(context: str) -> str:
        return helm.text(json.loads(context))

    return render


@pytest.mark.parametrize("name", LEAVES)
def test_every_value_changes_what_is_rendered(helm: Helm, before: Any, name: str) -> None:
    context = merged(EVERYTHING, nested(context_of(name)))
    now: Any = merged(VALUES, context)
    for part in name.split("."):
        now = now[part]
    changed = merged(context, nested({name: other(name, now)}))
    assert helm.text(changed) != before(json.dumps(context))


def test_switches_and_zeros_of_a_model_go_before_those_of_its_role(helm: Helm) -> None:
    """A merge that takes empty values for missing ones would lose them."""
    base = {"prefill": {"replicas": 3, "config": {"router": {"early_rejection": True}}}}
    model = {
        "tiny": {"family": "llama"},
        "prefill": {
            "replicas": 0,
            "pdb": {"enabled": False},
            "config": {"router": {"early_rejection": False}, "kv": {"host_blocks": 0}},
        },
        "config": {"kv": {"host_blocks": 7}},
    }
    docs = helm.docs(merged(base, {"models": {"m": model}}))
    (pool,) = (
        doc
        for doc in docs
        if doc["metadata"]["name"] == "rel-twinpool-m-prefill" and doc["kind"] == "StatefulSet"
    )
    assert pool["spec"]["replicas"] == 0
    assert not [
        doc
        for doc in docs
        if doc["kind"] == "PodDisruptionBudget" and doc["metadata"]["name"].endswith("-m-prefill")
    ]
    (config,) = (
        doc
        for doc in docs
        if doc["metadata"]["name"] == "rel-twinpool-m-prefill" and doc["kind"] == "ConfigMap"
    )
    told = yaml.safe_load(config["data"]["config.yaml"])
    assert told["router"]["early_rejection"] is False
    assert told["kv"]["host_blocks"] == 0


def test_a_model_of_a_file_can_be_taken_away(helm: Helm) -> None:
    docs = helm.docs({"models": {"tiny": None}}, "values-dev.yaml")
    assert "prefill" not in {doc["metadata"]["labels"]["app.kubernetes.io/component"] for doc in docs}


MAPS = sorted({name.rpartition(".")[0] for name in LEAVES})


@pytest.mark.parametrize("path", MAPS)
def test_a_key_that_does_not_exist_is_refused(helm: Helm, path: str) -> None:
    with pytest.raises(AssertionError, match="nosuchkey"):
        helm.text(nested({f"{path}.nosuchkey" if path else "nosuchkey": 1}))


@pytest.mark.parametrize(
    "values",
    [
        {"router.replicas": "two"},
        {"router.replicas": -1},
        {"config.router.max_atempts": 2},
        {"config.router.max_attempts": 0},
        {"config.nosuchsection.a": 1},
        # What the chart sets itself.
        {"config.router.port": 1},
        {"config.cluster.name": "mine"},
        {"config.tls.cert_file": "/x"},
        {"config.worker.name": "mine"},
        {"models": {"Upper": {"tiny": {"family": "llama"}}}},
        {"models": {"m": {"tiny": {"family": "gpt"}}}},
        {"models": {"m": {"tiny": {"family": "llama"}, "prefil": {}}}},
        {"models": {"m": {"tiny": {"family": "llama"}, "decode": {"replica": 1}}}},
        {"models": {"m": {"path": "/models/m"}}},
        {"models": {"m": {"tiny": {"family": "llama"}, "prefill": {"gpu": {"count": 8}}}}},
        {"prefill.pdb.maxUnavailable": "some"},
        {"etcd.replicas": 2},
        {"etcd.enabled": False},
        {"etcd.auth.user": "root"},
        {"externalEtcd.endpoints": ["https://etcd.example.com:2379"]},
        {"etcd.enabled": False, "externalEtcd.endpoints": ["e:1"], "externalEtcd.user": "me"},
        {"image.digest": "latest"},
        {"ports.routerGrpc": 80},
        {"securityContext.runAsUser": 0},
        {"router.http.enabled": False, "ingress.http.enabled": True},
    ],
    ids=json.dumps,
)
def test_values_that_make_no_sense_are_refused(helm: Helm, values: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        helm.text(nested(values))
