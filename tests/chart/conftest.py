# SPDX-License-Identifier: Apache-2.0
"""Helm and kubectl, for all tests of the chart."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chart import EVERYTHING, Doc, Helm, NoHelmError, find_helm, find_kubectl
from tests.support.kube_api import KubeApi


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Renders the chart; skips where there is no helm to be had."""
    try:
        return Helm(find_helm(), tmp_path_factory.mktemp("helm"))
    except NoHelmError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def everything(helm: Helm) -> list[Doc]:
    """The documents with every part on."""
    return helm.docs(EVERYTHING)


@pytest.fixture(scope="session")
def kubectl() -> str:
    """The path of a real kubectl; skips where there is none to be had."""
    try:
        return find_kubectl()
    except NoHelmError as error:
        pytest.skip(str(error))


@pytest.fixture
def api(
    tmp_path: Path, kubectl: str, everything: list[Doc], monkeypatch: pytest.MonkeyPatch
) -> Iterator[KubeApi]:
    """What a kubectl in the PATH talks to: two namespaces, of which "llm" has the Services of the release "rel"."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "kubectl").symlink_to(kubectl)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    with KubeApi(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        for doc in everything:
            if doc["kind"] == "Service":
                doc["spec"].setdefault("clusterIP", "10.0.0.1")
                meta = doc["metadata"]
                server.put("services", meta["name"], "llm", meta["labels"], spec=doc["spec"])
        yield server
