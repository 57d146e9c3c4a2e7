# SPDX-License-Identifier: Apache-2.0
"""The chart with a RayCluster: KubeRay takes it, it says the same as the StatefulSets do, and one of all owns the numbers.

Tests that are imported hold for both forms: here they get the documents with a RayCluster.
"""

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from tests.chart.test_config import (
    config_of,
    environment,
    file_of,
    test_all_processes_mean_the_same_cluster,  # noqa: F401
    test_files_that_are_named_are_mounted,  # noqa: F401
)
from tests.chart.test_image import (
    test_pods_run_what_the_image_has,  # noqa: F401
)
from tests.chart.test_render import (
    VERSIONS,
    test_every_mount_has_its_volume,  # noqa: F401
    test_no_container_may_do_more_than_it_needs,  # noqa: F401
    test_two_releases_share_a_namespace,  # noqa: F401
    test_what_is_named_is_there,  # noqa: F401
)
from tests.support import kuberay
from tests.support.chart import EVERYTHING, ROOT, Doc, Helm, containers, merged, named, nested, workloads
from twinpool.config import pool_config, pool_names
from twinpool.control.cli.main import app
from twinpool.control.ray_join import HEAD_AWAY_SECONDS

pytestmark = pytest.mark.chart

RAY = merged(EVERYTHING, nested({"ray.mode": "raycluster", "ray.auth.existingSecret": "token"}))
"""With every part."""
SCALES = nested({f"{role}.autoscaling": {"enabled": True, "type": "ray"} for role in ("prefill", "decode")})
ROLES = ("prefill", "decode")
POOLS = ("chat", "chat-long", "tiny")


@pytest.fixture(scope="session")
def everything(helm: Helm) -> list[Doc]:
    return helm.docs(RAY)


@pytest.fixture
def docs(everything: list[Doc]) -> list[Doc]:
    return everything


def cluster_of(docs: list[Doc]) -> Doc:
    (found,) = (doc for doc in docs if doc["kind"] == "RayCluster")
    return found


def pools_of(docs: list[Doc]) -> dict[str, Any]:
    """The section of the controller about its pools."""
    text = named(docs, "ConfigMap", "rel-twinpool-control")["data"]["config.yaml"]
    pools: dict[str, Any] = yaml.safe_load(text)["pools"]
    return pools


def group_of(docs: list[Doc], name: str) -> Doc:
    (found,) = (each for each in cluster_of(docs)["spec"]["workerGroupSpecs"] if each["groupName"] == name)
    return found


# --- what KubeRay takes


CASES: dict[str, dict[str, Any]] = {
    "everything": {},
    "scales": SCALES,
    "recreate": nested({"ray.upgradeStrategy": "Recreate"}),
    "redis": nested({"ray.gcsFaultToleranceOptions": {"redisAddress": "redis:6379"}}),
    "rocksdb": nested({"ray.gcsFaultToleranceOptions": {"backend": "rocksdb", "storage": {"size": "1Gi"}}}),
}


@pytest.mark.parametrize("case", CASES)
def test_kuberay_takes_the_cluster(helm: Helm, case: str) -> None:
    kuberay.check(cluster_of(helm.docs(merged(RAY, CASES[case]))))


@pytest.mark.parametrize("version", VERSIONS)
def test_its_pods_fit_the_schemas_of_kubernetes(helm: Helm, version: str) -> None:
    docs = helm.docs(merged(RAY, SCALES))
    for group in kuberay.groups(cluster_of(docs)):
        doc = {"apiVersion": "v1", "kind": "PodTemplate", "template": group.template}
        kubernetes_validate.validate(doc, version, strict=True)
    for doc in (
        named(docs, "Deployment", "rel-twinpool-control"),
        named(docs, "Service", "rel-twinpool-ray"),
    ):
        kubernetes_validate.validate(doc, version, strict=True)


def test_a_key_that_kuberay_does_not_know_would_be_seen(everything: list[Doc]) -> None:
    cluster = cluster_of(everything)
    for wrong in ({"headGroup": {}}, {"rayVersion": 2}, {"upgradeStrategy": {"type": "Rolling"}}):
        with pytest.raises(kuberay.jsonschema.ValidationError):
            kuberay.check({**cluster, "spec": cluster["spec"] | wrong})


def test_ray_knows_every_option(everything: list[Doc]) -> None:
    """Of `ray start`, for nodes that KubeRay starts and the one beside the controller."""
    from ray.scripts.scripts import start

    known = {name for option in start.params for name in option.opts}
    lines = [kuberay.command(group, "head:6379") for group in kuberay.groups(cluster_of(everything))]
    lines.append(" ".join(sidecar(everything)["args"]))
    for line in lines:
        options = re.findall(r"--[a-z-]+", line)
        assert len(options) >= 10
        assert set(options) <= known, line


def test_it_is_the_ray_of_the_image(everything: list[Doc]) -> None:
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert cluster_of(everything)["spec"]["rayVersion"] == pinned[1]


# --- the same as StatefulSets


def test_pods_are_those_of_the_stateful_sets(helm: Helm, everything: list[Doc]) -> None:
    """But for who starts what in them."""
    plain = helm.docs(merged(RAY, nested({"ray.mode": "statefulset"})))
    for pool in (f"{pool}-{role}" for pool in POOLS for role in ROLES):
        pod = named(plain, "StatefulSet", f"rel-twinpool-{pool}")["spec"]["template"]
        other = group_of(everything, pool)["template"]
        assert other["metadata"] == pod["metadata"]
        (one,), (two,) = pod["spec"].pop("containers"), other["spec"]["containers"]
        probes = {"startupProbe", "livenessProbe", "readinessProbe"}
        own = {"env", "ports", "volumeMounts", "args", "lifecycle"} | probes
        assert {key: one[key] for key in one.keys() - own} == {key: two[key] for key in two.keys() - own}
        for key in ("env", "ports", "volumeMounts"):
            assert [each for each in one[key] if each not in two[key]] == []
        assert one["livenessProbe"] != two["livenessProbe"]
        for key in pod["spec"].keys() - {"volumes", "terminationGracePeriodSeconds"}:
            assert other["spec"][key] == pod["spec"][key], key
        more = other["spec"]["terminationGracePeriodSeconds"] - pod["spec"]["terminationGracePeriodSeconds"]
        assert more > 0


def test_a_worker_reads_on_its_node_what_it_would_in_a_stateful_set(
    everything: list[Doc], tmp_path: Path
) -> None:
    for role in ROLES:
        pod = group_of(everything, f"chat-{role}")["template"]
        config = config_of(everything, pod, pod["spec"]["containers"][0], tmp_path, f"{role}-pod")
        assert config.worker.host == config.metrics.host == "10.1.2.3"
        assert config.worker.device == ("cuda" if role == "prefill" else "cpu")
        ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
        assert ports["grpc"] == config.worker.port
        # Ray's node and the worker share the pod's address.
        assert len(set(ports.values())) == len(ports)


def test_what_waits_for_the_head_waits_as_long_as_the_product_says(everything: list[Doc]) -> None:
    for _, pod in workloads(everything):
        for container in containers(pod):
            env = environment(container, "pod") if "RAY_AUTH_MODE" in json.dumps(container) else {}
            if env:
                assert env["RAY_AUTH_MODE"] == "token"
                assert int(env["RAY_gcs_rpc_server_reconnect_timeout_s"]) == HEAD_AWAY_SECONDS
                mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
                assert str(Path(env["RAY_AUTH_TOKEN_PATH"]).parent) in mounts


# --- who runs how many


def sidecar(docs: list[Doc]) -> Doc:
    pod = named(docs, "Deployment", "rel-twinpool-control")["spec"]["template"]["spec"]
    (found,) = (each for each in pod["initContainers"] if each.get("restartPolicy") == "Always")
    return found


def test_the_controller_joins_the_head_by_a_node_beside_it(everything: list[Doc], tmp_path: Path) -> None:
    address = pools_of(everything)["ray_address"]
    service = named(everything, "Service", address.partition(".")[0])
    head = cluster_of(everything)["spec"]["headGroupSpec"]
    assert service["spec"]["selector"].items() <= head["template"]["metadata"]["labels"].items()
    assert address.endswith(f":{head['rayStartParams']['port']}")
    node = sidecar(everything)
    assert f"--address={address}" in node["args"]
    assert {"--num-cpus=0", "--num-gpus=0"} <= set(node["args"])
    pod = named(everything, "Deployment", "rel-twinpool-control")["spec"]["template"]
    # Ray's driver finds its node by the process, not by the files alone.
    assert pod["spec"]["shareProcessNamespace"]
    (control,) = pod["spec"]["containers"]
    for path in ("/tmp", "/dev/shm"):
        (one,) = (mount for mount in control["volumeMounts"] if mount["mountPath"] == path)
        assert one in node["volumeMounts"]
    file = tmp_path / "config.yaml"
    file.write_text(file_of(everything, pod))
    result = CliRunner().invoke(app, ["config", "validate", str(file)], env={"TWINPOOL_CONFIG": None})
    assert result.exit_code == 0, result.output


def test_a_worker_takes_what_one_pod_of_its_role_offers(everything: list[Doc], tmp_path: Path) -> None:
    pod = named(everything, "Deployment", "rel-twinpool-control")["spec"]["template"]
    config = config_of(everything, pod, pod["spec"]["containers"][0], tmp_path, "control")
    assert pool_names(config) == list(POOLS)
    seen: set[str] = set()
    for pool, role in ((pool, role) for pool in POOLS for role in ROLES):
        params = group_of(everything, f"{pool}-{role}")["rayStartParams"]
        offered = json.loads(params["resources"].strip("'")) | {"GPU": float(params["num-gpus"])}
        needs = pool_config(config, pool).pools.resources(role)
        assert needs == {name: amount for name, amount in offered.items() if amount}
        assert needs[f"twinpool-{pool}-{role}"] == 1
        # No other pool's pods would do: they have other options and another model.
        assert seen.isdisjoint(needs.keys() - {"GPU"})
        seen |= needs.keys() - {"GPU"}
    head = cluster_of(everything)["spec"]["headGroupSpec"]["rayStartParams"]
    assert (head["num-cpus"], head.get("resources")) == ("0", None)
    assert head["include-dashboard"] == "false"
    assert head["dashboard-host"] == "127.0.0.1"


def test_pods_and_workers_are_as_many(helm: Helm) -> None:
    docs = helm.docs(merged(RAY, nested({"prefill.replicas": 3, "decode.replicas": 4})))
    pools = pools_of(docs)["further"]["tiny"]
    for role, count in (("prefill", 3), ("decode", 4)):
        group = group_of(docs, f"tiny-{role}")
        assert [group[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [count] * 3
        assert pools[f"{role}_workers"] == count
        # A flip needs no pod.
        assert pools[f"{role}_most"] == 7
        budget = named(docs, "PodDisruptionBudget", f"rel-twinpool-tiny-{role}")
        assert budget["spec"]["minAvailable"] == count - 1
        assert "maxUnavailable" not in budget["spec"]


@pytest.mark.parametrize(("away", "stay"), [(0, 5), (2, 3), (9, 0), ("40%", 3), ("10%", 5)])
def test_a_budget_says_how_many_stay(helm: Helm, away: int | str, stay: int) -> None:
    values = nested({"decode.replicas": 5, "decode.pdb.maxUnavailable": away})
    budget = named(helm.docs(merged(RAY, values)), "PodDisruptionBudget", "rel-twinpool-tiny-decode")
    assert budget["spec"]["minAvailable"] == stay


def test_rays_autoscaler_follows_the_controller_within_its_bounds(helm: Helm) -> None:
    values = nested({f"{role}.autoscaling": {"minReplicas": 2, "maxReplicas": 5} for role in ROLES})
    docs = helm.docs(merged(RAY, SCALES, values))
    spec = cluster_of(docs)["spec"]
    assert spec["enableInTreeAutoscaling"]
    assert spec["autoscalerOptions"]["idleTimeoutSeconds"] == 300
    for pool, role in ((pool, role) for pool in POOLS for role in ROLES):
        group, pools = group_of(docs, f"{pool}-{role}"), pools_of(docs)["further"][pool]
        assert (group["minReplicas"], group["maxReplicas"]) == (2, 5)
        # An upgrade does not undo what the autoscaler has made of it.
        assert "replicas" not in group
        assert [pools[f"{role}_{key}"] for key in ("workers", "least", "most")] == [2, 2, 5]
    assert not [doc for doc in docs if doc["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
    # It calls the API of Kubernetes, and nobody else does.
    head = spec["headGroupSpec"]["template"]["spec"]
    assert head["serviceAccountName"] == "rel-twinpool-ray"
    assert head["automountServiceAccountToken"]
    others = [
        pod["spec"] for doc, pod in workloads(docs) if doc["metadata"]["name"] != "rel-twinpool-ray-headgroup"
    ]
    assert not any(each["automountServiceAccountToken"] for each in others)


def test_auto_follows_what_the_cluster_knows(helm: Helm) -> None:
    values = merged(RAY, nested({"ray.mode": "auto"}))
    assert "RayCluster" not in {doc["kind"] for doc in helm.docs(values)}
    docs = helm.docs(values, apis="ray.io/v1/RayCluster")
    assert "RayCluster" in {doc["kind"] for doc in docs}
    assert not [doc for doc in docs if doc["kind"] == "StatefulSet" and "etcd" not in doc["metadata"]["name"]]
    both = helm.docs(merged(values, nested({"ray.mode": "statefulset"})), apis="ray.io/v1/RayCluster")
    assert "RayCluster" not in {doc["kind"] for doc in both}


REBALANCE = nested({"control.config.rebalance.auto": True})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (merged(RAY, nested({"control.enabled": False})), "control.enabled"),
        (merged(RAY, nested({"prefill.autoscaling.enabled": True})), "set it to ray"),
        (merged(RAY, nested({"decode.autoscaling": {"enabled": True, "type": "keda"}})), "set it to ray"),
        (merged(EVERYTHING, SCALES), "needs a RayCluster"),
        (merged(RAY, SCALES, REBALANCE), "rebalance.auto"),
        (merged(RAY, SCALES, nested({"config.rebalance.auto": True})), "rebalance.auto"),
        (merged(EVERYTHING, REBALANCE, nested({"decode.autoscaling.enabled": True})), "rebalance.auto"),
        (merged(RAY, nested({"router.autoscaling": {"enabled": True, "type": "ray"}})), "router"),
        (merged(RAY, nested({"config.pools.ray_address": "elsewhere:6379"})), "ray_address"),
    ],
)
def test_what_does_not_go_together_is_refused(helm: Helm, values: dict[str, Any], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        helm.text(values)


def test_routers_scale_by_load_while_the_rebalancer_moves_workers(helm: Helm) -> None:
    docs = helm.docs(merged(RAY, REBALANCE, nested({"router.autoscaling.enabled": True})))
    (scaler,) = (doc for doc in docs if doc["kind"] == "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == "rel-twinpool-router"


def test_the_token_is_made_and_hidden(helm: Helm) -> None:
    docs = helm.docs(merged(RAY, nested({"ray.auth.existingSecret": ""})))
    secret = named(docs, "Secret", "rel-twinpool-ray-auth")
    assert len(secret["data"]["auth_token"]) >= 64
    token = secret["data"]["auth_token"]
    assert token not in json.dumps([doc for doc in docs if doc["kind"] != "Secret"])
