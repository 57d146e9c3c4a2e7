# SPDX-License-Identifier: Apache-2.0
"""``twinpool version``, for people and for programs."""

import json

import pytest
from typer.testing import CliRunner

import twinpool
from twinpool.control.cli.main import app


def test_for_people() -> None:
    assert CliRunner().invoke(app, ["version"]).output == f"twinpool {twinpool.__version__}\n"


@pytest.mark.parametrize("form", [["--json"], ["-o", "json"], ["--output", "json"]])
def test_for_programs(form: list[str]) -> None:
    done = CliRunner().invoke(app, ["version", *form])
    assert done.exit_code == 0
    assert json.loads(done.output)["twinpool"] == twinpool.__version__
