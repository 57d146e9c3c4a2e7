# SPDX-License-Identifier: Apache-2.0
"""``twinpool core replay``."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from twinpool import _core
from twinpool._core import AdmissionConfig, RouterCore
from twinpool.control.cli.main import app

runner = CliRunner()


def log_file(directory: Path) -> Path:
    core = RouterCore(AdmissionConfig())
    core.record(1 << 20)
    core.upsert_worker(0.0, "p0", 1, "m", "prefill", "ready", "fp", 100, 16, 8)
    core.upsert_worker(0.0, "d0", 1, "m", "decode", "ready", "fp", 100, 16, 8)
    core.submit(1.0, "a", "m", 100, 10, np.empty((0, 16), np.uint8))
    core.plan(1.0)
    path = directory / "core.log"
    path.write_bytes(core.recorded())
    return path


def test_the_same_decisions_end_well(tmp_path: Path) -> None:
    result = runner.invoke(app, ["core", "replay", str(log_file(tmp_path)), "--lines"])
    assert result.exit_code == 0, result.output
    assert "1 submit a pool=m prompt=100" in result.output
    assert "4 calls made again, 1 placements" in result.output
    assert "all decisions are equal" in result.output


def test_programs_get_json(tmp_path: Path) -> None:
    result = runner.invoke(app, ["core", "replay", str(log_file(tmp_path)), "-o", "json"])
    report = json.loads(result.stdout)
    assert (report["calls"], report["placements"], report["equal"], report["mismatch"]) == (4, 1, True, "")


def test_a_difference_ends_the_command_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = SimpleNamespace(calls=3, placements=1, equal=False, mismatch="call 3: 1 plan")
    monkeypatch.setattr(_core, "replay_log", lambda *_: report)
    path = str(log_file(tmp_path))
    result = runner.invoke(app, ["core", "replay", path])
    assert result.exit_code == 1
    assert "3 calls made again" in result.stdout
    assert "another decision" in result.stdout
    assert "call 3: 1 plan" in result.stderr
    result = runner.invoke(app, ["core", "replay", path, "-o", "json"])
    assert (result.exit_code, json.loads(result.stdout)["equal"]) == (1, False)


def test_a_damaged_log_is_named(tmp_path: Path) -> None:
    path = log_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-2])
    result = runner.invoke(app, ["core", "replay", str(path)])
    assert result.exit_code == 2
    assert "core.log" in result.output
