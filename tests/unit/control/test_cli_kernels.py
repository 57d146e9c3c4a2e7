# SPDX-License-Identifier: Apache-2.0
"""``twinpool kernels`` says what a device would run, and why."""

import json

import pytest
from typer.testing import CliRunner

from twinpool.control.cli.main import app


def rows(*options: str) -> list[dict[str, object]]:
    result = CliRunner().invoke(app, ["kernels", *options, "-o", "json"])
    assert result.exit_code == 0, result.output
    found: list[dict[str, object]] = json.loads(result.stdout)
    return found


def chosen(*options: str) -> dict[object, object]:
    return {row["name"]: row["backend"] for row in rows(*options) if row["chosen"]}


def test_each_device_gets_its_best() -> None:
    attention = "mla_paged_attention"
    assert set(chosen().values()) == {"torch"}
    assert chosen("--device", "sm_90")[attention] == "hopper"
    assert chosen("--device", "sm_100")[attention] == "triton"
    assert chosen("--device", "sm_90", "--dtype", "float32")[attention] == "triton"
    assert chosen("--device", "sm_75")[attention] == "torch"
    assert chosen("--device", "sm_90", "--layout", "fp8_latent")[attention] == "triton_fp8"
    assert chosen("--device", "sm_80", "--layout", "fp8_latent")[attention] == "torch_fp8"


def test_an_explanation_names_every_candidate() -> None:
    found = {
        row["backend"]: row
        for row in rows("--explain", "--device", "sm_100")
        if row["name"] == "mla_paged_attention"
    }
    assert found["hopper"]["reason"] == "needs sm_90 or earlier, this is cuda sm_100"
    assert found["triton"]["chosen"] == "yes"
    assert found["torch"]["reason"] == "priority 0 is not above triton's 10"
    assert found["torch_fp8"]["reason"] == "no layout block_major"


@pytest.mark.parametrize("options", [("--device", "tpu"), ("--dtype", "int4"), ("--layout", "layer_major")])
def test_what_is_unknown_is_refused(options: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["kernels", *options])
    assert result.exit_code == 2
    assert options[1] in result.stderr
