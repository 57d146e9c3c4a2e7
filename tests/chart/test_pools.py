# SPDX-License-Identifier: Apache-2.0
"""Several pools of several models in one release: each has its own of everything, and the routers know what each takes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.test_config import config_of, served
from tests.chart.test_render import picks, selectors
from tests.support.chart import EVERYTHING, Doc, Helm, merged, named, nested, workloads
from twinpool.config import pool_config, pool_names, served_pools
from twinpool.control.doctor.kube_values import Values
from twinpool.router.choice import Offer, choose, rules_of

pytestmark = pytest.mark.chart

POOLS = {"chat": "chat", "chat-long": "chat", "chat-urgent": "chat", "code": "code-model"}
ROLES = ("prefill", "decode")
RAY = nested({"ray.mode": "raycluster", "ray.auth.existingSecret": "token"})


@pytest.fixture(params=[{}, RAY], ids=["statefulset", "raycluster"])
def docs(helm: Helm, request: pytest.FixtureRequest) -> list[Doc]:
    return helm.docs(request.param, "values-two-models.yaml")


def config(docs: list[Doc], component: str, tmp_path: Path) -> Any:
    """What the product makes of what a Deployment tells its process."""
    (found,) = (each for each in served(docs) if each[0]["metadata"]["name"] == f"rel-twinpool-{component}")
    return config_of(docs, found[1], found[2], tmp_path, component)


def test_routers_send_a_request_where_the_values_say(docs: list[Doc], tmp_path: Path) -> None:
    told = config(docs, "router", tmp_path)
    rules = rules_of(told)
    assert {pool: rule.model for pool, rule in rules.items()} == POOLS
    assert served_pools(told) == list(POOLS)
    # Its tokenizer lies where the routers mount it.
    assert {rule.model_path for rule in rules.values()} == {"/models/chat", "/models/code"}

    def pool_of(tokens: int, priority: int, away: str = "") -> str:
        chat = [pool for pool in POOLS if POOLS[pool] == "chat"]
        offers = [Offer(pool, rules[pool].takes, pool != away, 2) for pool in chat]
        chosen = choose(offers, tokens, priority)
        assert chosen is not None
        return offers[chosen[0]].pool

    assert [pool_of(tokens, 0) for tokens in (1, 127, 128, 4096)] == [
        "chat",
        "chat",
        "chat-long",
        "chat-long",
    ]
    assert pool_of(1, 50) == "chat-urgent"
    assert pool_of(200, 50) == "chat-long"
    assert pool_of(1, 0, away="chat") == "chat-long"


def test_the_controller_knows_every_pool(docs: list[Doc], tmp_path: Path) -> None:
    told = config(docs, "control", tmp_path)
    assert pool_names(told) == list(POOLS)
    ray = any(doc["kind"] == "RayCluster" for doc in docs)
    for pool in POOLS:
        own = pool_config(told, pool).pools
        assert own.managed == ray
        assert [own.workers(role) for role in ROLES] == ([1, 1] if ray else [0, 0])


def test_the_controller_waits_for_the_longest_drain(helm: Helm, tmp_path: Path) -> None:
    """Else it ends a worker that still answers."""
    slow = nested({"models.code.decode.config.worker.drain_timeout_seconds": 95})
    docs = helm.docs(merged(RAY, slow), "values-two-models.yaml")
    assert config(docs, "control", tmp_path).worker.drain_timeout_seconds == 95


def test_workers_are_told_their_pool(helm: Helm) -> None:
    docs = helm.docs({}, "values-two-models.yaml")
    for pool, model in POOLS.items():
        for role in ROLES:
            told = yaml.safe_load(
                named(docs, "ConfigMap", f"rel-twinpool-{pool}-{role}")["data"]["config.yaml"]
            )
            assert told["worker"]["pool"] == pool
            assert told["model"]["name"] == model
            assert told["kv"]["num_blocks"] == (128 if pool == "chat-long" else 64)


def test_everything_of_a_pool_is_its_own(docs: list[Doc]) -> None:
    """What picks pods of workers picks those of one role of one pool, in every kind of object; and nothing is left out."""
    pods = [
        pod["metadata"]["labels"]
        for _, pod in workloads(docs)
        if "twinpool.dev/pool" in pod["metadata"]["labels"]
    ]
    assert len(pods) == len(POOLS) * len(ROLES)
    ray = any(doc["kind"] == "RayCluster" for doc in docs)
    kinds = {"Service", "PodDisruptionBudget", "NetworkPolicy"} | (
        set() if ray else {"StatefulSet", "spread"}
    )
    picked: dict[str, list[tuple[str, str]]] = {kind: [] for kind in kinds}
    for what, selector in selectors(docs):
        found = [labels for labels in pods if picks(selector, labels)]
        if found and len(found) < len(pods):
            assert len(found) == 1, what
            labels = found[0]
            picked[what.partition(" ")[0]].append(
                (labels["twinpool.dev/pool"], labels["app.kubernetes.io/component"])
            )
    wanted = sorted((pool, role) for pool in POOLS for role in ROLES)
    assert {kind: sorted(found) for kind, found in picked.items()} == dict.fromkeys(kinds, wanted)
    assert {labels["twinpool.dev/pool"]: labels["twinpool.dev/model"] for labels in pods} == {
        pool: pool.partition("-")[0] for pool in POOLS
    }


def test_what_is_set_for_a_pool_is_set_for_no_other(helm: Helm) -> None:
    """And what a model sets holds for all its pools, of which one may say otherwise."""
    values: dict[str, Any] = {
        "models": {
            "chat": {
                "decode": {"nodeSelector": {"disk": "fast"}, "replicas": 2},
                "pools": {
                    "long": {
                        "decode": {
                            "nodeSelector": {"memory": "large"},
                            "replicas": 3,
                            "autoscaling": {"enabled": True},
                            "resources": {"limits": {"memory": "9Gi"}},
                            "tolerations": [{"operator": "Exists"}],
                        }
                    }
                },
            }
        }
    }
    docs = helm.docs(values, "values-two-models.yaml")
    sets = {pool: named(docs, "StatefulSet", f"rel-twinpool-{pool}-decode")["spec"] for pool in POOLS}
    pods = {pool: each["template"]["spec"] for pool, each in sets.items()}
    assert {pool: pod.get("nodeSelector") for pool, pod in pods.items()} == {
        "chat": {"disk": "fast"},
        "chat-long": {"disk": "fast", "memory": "large"},
        "chat-urgent": {"disk": "fast"},
        "code": None,
    }
    assert {pool: each.get("replicas") for pool, each in sets.items()} == {
        "chat": 2,
        "chat-long": None,
        "chat-urgent": 2,
        "code": 1,
    }
    limits = {pool: pod["containers"][0]["resources"]["limits"]["memory"] for pool, pod in pods.items()}
    assert limits == {"chat": "8Gi", "chat-long": "9Gi", "chat-urgent": "8Gi", "code": "8Gi"}
    assert [pool for pool, pod in pods.items() if "tolerations" in pod] == ["chat-long"]
    scalers = [doc["spec"]["scaleTargetRef"] for doc in docs if doc["kind"] == "HorizontalPodAutoscaler"]
    assert [each["name"] for each in scalers] == ["rel-twinpool-chat-long-decode"]


def test_a_pool_of_a_file_can_be_taken_away(helm: Helm) -> None:
    docs = helm.docs({"models": {"chat": {"pools": {"long": None}}}}, "values-two-models.yaml")
    found = {pod["metadata"]["labels"].get("twinpool.dev/pool") for _, pod in workloads(docs)}
    assert found - {None} == POOLS.keys() - {"chat-long"}


def test_the_doctor_counts_every_pool(everything: list[Doc]) -> None:
    found = {f"rel-twinpool-{name}": block for name, block in Values(EVERYTHING, "").pools()}
    sets = {doc["metadata"]["name"]: doc for doc in everything if doc["kind"] == "StatefulSet"}
    assert found.keys() == sets.keys() - {"rel-twinpool-etcd"}
    for name, block in found.items():
        limits = sets[name]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert limits.get("nvidia.com/gpu", 0) == block.get("gpu", {}).get("count", 0)
        assert sets[name]["spec"]["replicas"] == block.get("replicas", 1)


TINY = {"tiny": {"family": "llama"}}


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ({"default": TINY}, "default"),
        ({"chat": TINY | {"pools": {"of-many-letters": {}}}}, "more than 16"),
        ({"a": TINY | {"pools": {"b": {}}}, "a-b": TINY}, "models.a and models.a-b have a pool a-b each"),
        ({"chat": TINY | {"takes": {"promptTokensLeast": 9, "promptTokensMost": 8}}}, "promptTokensLeast 9"),
        ({"chat": TINY | {"pools": {"b": {"takes": {"priorityLeast": 9, "priorityMost": -8}}}}}, "priorityMost -8"),
        ({"chat": TINY | {"takes": {"priorityLeast": 101}}}, "priorityLeast"),
        ({"chat": TINY | {"pools": {"b": {"tiny": {"family": "llama"}}}}}, "tiny"),
        ({"chat": TINY | {"pools": {"b": {"takes": {"prompt_tokens_least": 1}}}}}, "prompt_tokens_least"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("values", [{}, RAY], ids=["statefulset", "raycluster"])
def test_pools_that_cannot_be_are_refused(
    helm: Helm, values: dict[str, Any], models: dict[str, Any], words: str
) -> None:
    with pytest.raises(AssertionError, match=words):
        helm.text(merged(values, {"models": models}))
