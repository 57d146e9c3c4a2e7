# SPDX-License-Identifier: Apache-2.0
"""How commands find a release: a real kubectl against an API server that lists, and refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.chart import Doc
from tests.support.kube_api import KubeApi
from twinpool.control.kube.kubectl import Kubectl, said
from twinpool.control.kube.release import find_pods, find_service
from twinpool.errors import TwinpoolError

pytestmark = pytest.mark.chart


def reason_of(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(TwinpoolError) as raised:
        call()
    return raised.value.reason, raised.value.message


def test_the_services_of_the_chart_are_found_by_its_labels(api: KubeApi) -> None:
    control = find_service(Kubectl(), "control")
    assert (control.name, control.port, control.release) == ("rel-twinpool-control", 50053, "rel")
    assert control.server_name == "rel-twinpool-control.llm.svc"
    assert find_service(Kubectl(), "router").name == "rel-twinpool-router", "not the headless one"
    api.objects["services"].reverse()
    assert find_service(Kubectl(), "router").name == "rel-twinpool-router"


def test_the_name_in_the_certificate_is_the_one_that_is_expected(api: KubeApi, everything: list[Doc]) -> None:
    for component in ("router", "control"):
        found = find_service(Kubectl(), component)
        (certificate,) = (
            doc for doc in everything
            if doc["kind"] == "Certificate" and doc["metadata"]["name"] == f"rel-twinpool-{component}"
        )  # fmt: skip
        # The chart was rendered for the namespace "ns", the API server says "llm".
        assert found.server_name.replace(".llm.", ".ns.") in certificate["spec"]["dnsNames"]


def test_context_namespace_and_kubeconfig(api: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    where = Kubectl("other")
    assert reason_of(lambda: find_service(where, "control"))[0] == "KUBE_SERVICE_NOT_FOUND"
    assert find_service(Kubectl("other", "llm"), "control").namespace == "llm"
    monkeypatch.delenv("KUBECONFIG")
    assert reason_of(lambda: find_service(Kubectl(namespace="llm"), "control"))[0] == "KUBE_UNREACHABLE"
    assert find_service(Kubectl(kubeconfig=str(api.kubeconfig)), "control").namespace == "llm"


def test_several_releases_have_to_be_told_apart(api: KubeApi) -> None:
    first = api.objects["services"][0]["metadata"]["labels"]
    labels = first | {"app.kubernetes.io/instance": "second", "app.kubernetes.io/component": "control"}
    spec = {"clusterIP": "10.0.0.2", "ports": [{"name": "grpc", "port": 7}]}
    api.put("services", "second-control", "llm", labels, spec=spec)
    reason, message = reason_of(lambda: find_service(Kubectl(), "control"))
    assert (reason, message) == (
        "KUBE_RELEASE_AMBIGUOUS",
        "the context's namespace has the releases rel, second",
    )
    assert find_service(Kubectl(), "control", "second").port == 7
    reason, message = reason_of(lambda: find_service(Kubectl(), "control", "third"))
    assert reason == "KUBE_SERVICE_NOT_FOUND"
    assert "of release third" in message


def test_running_pods_only(api: KubeApi) -> None:
    labels = {
        "app.kubernetes.io/name": "twinpool",
        "app.kubernetes.io/component": "router",
        "app.kubernetes.io/instance": "rel",
    }
    for name, phase in (("b", "Running"), ("a", "Running"), ("c", "Pending")):
        api.put("pods", name, "llm", labels, status={"phase": phase})
    assert [pod["metadata"]["name"] for pod in find_pods(Kubectl(), "router", "rel")] == ["a", "b"]


def test_what_kubectl_refuses_is_told_apart(
    api: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason, message = reason_of(lambda: find_service(Kubectl("nowhere"), "control"))
    assert reason == "KUBE_CONTEXT_UNKNOWN"
    assert "nowhere" in message
    missing = Kubectl(kubeconfig=str(tmp_path / "none"))
    assert reason_of(lambda: find_service(missing, "control"))[0] == "KUBE_CONTEXT_UNKNOWN"
    api.denied.add("services")
    reason, message = reason_of(lambda: find_service(Kubectl(), "control"))
    assert reason == "KUBE_FORBIDDEN"
    assert 'cannot list resource "services"' in message
    config = yaml.safe_load(api.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    (tmp_path / "gone").write_text(yaml.safe_dump(config))
    away = Kubectl(kubeconfig=str(tmp_path / "gone"))
    assert reason_of(lambda: find_service(away, "control"))[0] == "KUBE_UNREACHABLE"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert reason_of(lambda: find_service(Kubectl(), "control"))[0] == "KUBECTL_MISSING"


def test_rights(api: KubeApi) -> None:
    assert Kubectl().can("create", "pods", "--subresource=portforward")
    api.denied.add("create pods/portforward")
    assert not Kubectl().can("create", "pods", "--subresource=portforward")
    assert Kubectl().can("list", "pods")


def test_words_that_mean_nothing_known_are_handed_on() -> None:
    error = said(
        "W0101 12:00:00.0 1 warnings.go] odd\nerror: the moon is full\n", ("get", "pods", "-o", "json")
    )
    assert (error.reason, error.message) == ("KUBECTL_FAILED", "kubectl get pods: error: the moon is full")
