# SPDX-License-Identifier: Apache-2.0
"""Helm, for all tests of the chart."""

import pytest

from tests.support.chart import EVERYTHING, Doc, Helm, NoHelmError, find_helm


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
