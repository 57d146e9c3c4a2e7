# SPDX-License-Identifier: Apache-2.0
"""The NetworkPolicies allow the connections of docs/architecture.md and no others."""

from typing import Any

import pytest

from tests.support.chart import EVERYTHING, Doc, Helm, merged, nested, workloads
from tests.support.policies import End, Policies

pytestmark = pytest.mark.chart

GRPC, HTTP, WORKER, EVENTS, REPLAY, METRICS = 50051, 8000, 50052, 5557, 5558, 9090
TRANSFER = range(18500, 18532)
CONTROL, CLIENT, PEER, ETCD_METRICS = 50053, 2379, 2380, 2381
GCS, RAY_CLIENT, RAY_NODE = 6379, 10001, (6380, 6381, 10002, 10033)
PORTS = (
    GRPC, HTTP, WORKER, EVENTS, REPLAY, METRICS, CONTROL, CLIENT, PEER, ETCD_METRICS,
    # The ends of the range, what lies beside it, and ports that nobody uses.
    TRANSFER[0], TRANSFER[-1], TRANSFER[0] - 1, TRANSFER[-1] + 1, 22, 53, 443, 6443, 10250,
    # Ray's, its dashboard and what else of it listens.
    GCS, *RAY_NODE, RAY_NODE[-1] + 1, RAY_CLIENT, 6382, 8080, 8265, 52365,
)  # fmt: skip
POOLS = ("tiny", "chat", "chat-long")
READS = (WORKER, TRANSFER[0], TRANSFER[-1])

STRANGER = End("stranger", "ns", {"app": "other"})
FOREIGNER = End("foreigner", "elsewhere", {"app": "other"})
PROMETHEUS = End("prometheus", "monitoring", {"app.kubernetes.io/name": "prometheus"})
DNS = End("dns", "kube-system", {"k8s-app": "kube-dns"})
WORLD = End("world")
OUTSIDE = (STRANGER, FOREIGNER, PROMETHEUS, DNS, WORLD)


def pods(docs: list[Doc], release: str = "") -> list[End]:
    found = []
    for _, pod in workloads(docs):
        labels = pod["metadata"]["labels"]
        pool = labels.get("twinpool.dev/pool")
        name = "-".join(filter(None, (release, pool, labels["app.kubernetes.io/component"])))
        found.append(End(name, "ns", labels))
    return found


def design() -> set[tuple[str, str, int]]:
    """The table of docs/architecture.md, for three pools of two models, in ports."""
    workers = {pool: (f"{pool}-prefill", f"{pool}-decode") for pool in POOLS}
    every = [worker for pair in workers.values() for worker in pair]
    edges = {(end.name, "router", port) for end in OUTSIDE for port in (GRPC, HTTP)}
    # HandOver; and the pod of `helm test` is a client.
    edges |= {("router", "router", GRPC), ("test", "router", GRPC)}
    # Session, TakeOver, KV events.
    edges |= {("router", worker, port) for worker in every for port in (WORKER, EVENTS, REPLAY)}
    # Exchange and NIXL, within a pool and in both directions.
    edges |= {(one, two, port) for pair in workers.values() for one in pair for two in pair for port in READS}
    edges |= {("control", worker, WORKER) for worker in every} | {("control", "router", GRPC)}
    edges |= {(part, "etcd", CLIENT) for part in ("router", "control", *every)}
    edges |= {("etcd", "etcd", PEER)}
    edges |= {("prometheus", part, METRICS) for part in ("router", "control", *every)}
    edges |= {("prometheus", "etcd", ETCD_METRICS)}
    return edges


def ray_design() -> set[tuple[str, str, int]]:
    """The same where workers are Ray's: its head calls every node and is called, and so does the controller's node."""
    workers = [f"{pool}-{role}" for pool in POOLS for role in ("prefill", "decode")]
    edges = design()
    edges |= {(part, "ray", port) for part in (*workers, "control") for port in (GCS, *RAY_NODE)}
    edges |= {("ray", part, port) for part in (*workers, "control") for port in RAY_NODE}
    edges |= {("control", worker, port) for worker in workers for port in RAY_NODE}
    return edges | {(worker, "control", port) for worker in workers for port in RAY_NODE}


def allowed(docs: list[Doc]) -> set[tuple[str, str, int]]:
    ends = pods(docs)
    inside = {end.name for end in ends}
    return {edge for edge in Policies(docs).edges([*ends, *OUTSIDE], PORTS) if edge[1] in inside}


def test_what_the_design_has_is_allowed_and_nothing_else(everything: list[Doc]) -> None:
    assert allowed(everything) == design()


@pytest.fixture(scope="session")
def ray(helm: Helm) -> list[Doc]:
    return helm.docs(merged(EVERYTHING, {"ray": {"mode": "raycluster"}}))


def test_what_ray_needs_is_allowed_in_its_cluster_and_nothing_else(ray: list[Doc]) -> None:
    assert allowed(ray) == ray_design()


def test_rays_autoscaler_alone_reaches_the_api_of_kubernetes(helm: Helm) -> None:
    scales = nested(
        {f"{role}.autoscaling": {"enabled": True, "type": "ray"} for role in ("prefill", "decode")}
    )
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "elsewhere"}}}
    values = merged(EVERYTHING, {"ray": {"mode": "raycluster"}}, scales)
    for peers, reached in (([], (FOREIGNER, WORLD)), ([here], (FOREIGNER,))):
        docs = helm.docs(merged(values, nested({"networkPolicy.kubernetes": peers})))
        policies = Policies(docs)
        found = {
            (pod.name, end.name)
            for pod in pods(docs)
            for end in (FOREIGNER, WORLD)
            if policies.allow(pod, end, 443)
        }
        assert found == {("ray", end.name) for end in reached}


@pytest.mark.parametrize("form", ["statefulset", "raycluster"])
def test_each_end_by_itself_is_no_wider(everything: list[Doc], ray: list[Doc], form: str) -> None:
    """Of a connection that one end allows and the other does not nothing would be seen above."""
    docs, edges = (ray, ray_design()) if form == "raycluster" else (everything, design())
    policies, ends = Policies(docs), pods(docs)
    inside = {end.name for end in ends}
    wanted = {edge for edge in edges if edge[0] in inside}
    # Anybody may come to a router; who may go there is said by the other end.
    clients = {(end.name, "router", port) for end in ends for port in (GRPC, HTTP)}
    pairs = [(one, two, port) for one in ends for two in ends for port in PORTS]
    into = {
        (one.name, two.name, port) for one, two, port in pairs if policies.lets("ingress", two, one, port)
    }
    out = {(one.name, two.name, port) for one, two, port in pairs if policies.lets("egress", one, two, port)}
    assert into == wanted | clients
    assert out == wanted


def test_without_policies_everything_would_be_allowed(helm: Helm) -> None:
    """Else the comparison above would say nothing."""
    docs = helm.docs(merged(EVERYTHING, nested({"networkPolicy.enabled": False})))
    assert allowed(docs) > design()


def test_nobody_reaches_the_world_but_for_names(everything: list[Doc]) -> None:
    policies = Policies(everything)
    for pod in pods(everything):
        for target in (STRANGER, FOREIGNER, PROMETHEUS, WORLD):
            assert not [port for port in PORTS if policies.allow(pod, target, port)], (pod.name, target.name)
        assert [port for port in PORTS if policies.allow(pod, DNS, port)] == [53]
        assert policies.allow(pod, DNS, 53, "UDP")


def test_another_release_in_the_namespace_is_a_stranger(helm: Helm, everything: list[Doc]) -> None:
    others = helm.docs(EVERYTHING, release="other")
    policies = Policies([*everything, *others])
    for one in pods(everything):
        for two in pods(others):
            assert not [port for port in PORTS if policies.allow(one, two, port)], (one.name, two.name)
            assert not [port for port in PORTS if policies.allow(two, one, port)], (two.name, one.name)


@pytest.mark.parametrize(
    ("values", "more", "less"),
    [
        (
            {"networkPolicy.clients": [{"podSelector": {"matchLabels": {"app": "other"}}}]},
            set(),
            {(end.name, "router", port) for end in OUTSIDE if end is not STRANGER for port in (GRPC, HTTP)},
        ),
        (
            {"networkPolicy.operators": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "elsewhere"}}}]},
            {("foreigner", "control", CONTROL)},
            set(),
        ),
        (
            {"networkPolicy.prometheus": []},
            set(),
            {edge for edge in design() if edge[0] == "prometheus" and edge[2] in (METRICS, ETCD_METRICS)},
        ),
        (
            {"router.http.enabled": False, "ingress.http.enabled": False, "gateway.httpHostnames": []},
            set(),
            {(end.name, "router", HTTP) for end in OUTSIDE},
        ),
        (
            {"test.enabled": False},
            set(),
            {("test", "router", GRPC)},
        ),
        (
            {"control.enabled": False},
            set(),
            {edge for edge in design() if "control" in edge},
        ),
    ],
    ids=["clients", "operators", "no prometheus", "no http", "no test", "no controller"],
)  # fmt: skip
def test_values_change_what_they_are_about(
    helm: Helm, values: dict[str, Any], more: set[tuple[str, str, int]], less: set[tuple[str, str, int]]
) -> None:
    assert allowed(helm.docs(merged(EVERYTHING, nested(values)))) == (design() | more) - less


def test_an_external_etcd_is_reached_on_its_ports(helm: Helm) -> None:
    external = {"endpoints": ["a.example.com:2400", "b.example.com:2401"]}
    docs = helm.docs(merged(EVERYTHING, {"etcd": {"enabled": False}, "externalEtcd": external}))
    policies = Policies(docs)
    for pod in pods(docs):
        reached = [port for port in (*PORTS, 2400, 2401) if policies.allow(pod, WORLD, port)]
        assert reached == ([] if pod.name == "test" else [2400, 2401]), pod.name


def test_more_egress_is_for_the_processes_of_the_product(helm: Helm) -> None:
    rule = {"to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "elsewhere"}}}]}
    rule |= {"ports": [{"protocol": "TCP", "port": 4317}]}
    docs = helm.docs(merged(EVERYTHING, nested({"networkPolicy.extraEgress": [rule]})))
    policies = Policies(docs)
    reach = {pod.name for pod in pods(docs) if policies.allow(pod, FOREIGNER, 4317)}
    assert reach == {pod.name for pod in pods(docs)} - {"etcd", "test"}
