# SPDX-License-Identifier: Apache-2.0
"""``twinpool model tiny`` writes what a worker loads."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from twinpool.control.cli.main import app
from twinpool.engine.config import ModelConfig
from twinpool.engine.loader import load_model


@pytest.mark.parametrize("float8", [False, True])
def test_a_tiny_checkpoint_of_either_form_loads(float8: bool, tmp_path: Path) -> None:
    path = tmp_path / "model"
    options = ["--family", "llama", "--shards", "2", *(["--float8"] if float8 else [])]
    result = CliRunner().invoke(app, ["model", "tiny", str(path), *options])
    assert result.exit_code == 0, result.output
    assert ModelConfig.from_pretrained(path).float8_weights is float8
    held = {parameter.dtype for parameter in load_model(path).parameters()}
    assert (torch.float8_e4m3fn in held) is float8
    assert CliRunner().invoke(app, ["model", "tiny", str(path), *options]).exit_code == 2
