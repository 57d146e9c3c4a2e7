# SPDX-License-Identifier: Apache-2.0
"""Recording a core's calls and making them again."""

import numpy as np
import pytest

from twinpool import _core
from twinpool._core import AdmissionConfig, CoreError, RouterCore


def busy_core() -> RouterCore:
    core = RouterCore(AdmissionConfig(prefill_window_tokens=3000, max_attempts=2))
    for name in ("p0", "p1", "d0", "d1"):
        role = "prefill" if name[0] == "p" else "decode"
        core.upsert_worker(0.0, name, 1, "m", role, "ready", "fp", 300, 16, 16)
    return core


def drive(core: RouterCore, start: int, count: int) -> None:
    random = np.random.default_rng(start)
    for i in range(start, start + count):
        now = i * 0.01
        hashes = random.integers(0, 256, (int(random.integers(1, 20)), 16), dtype=np.uint8)
        core.submit(now, f"r{i}", "m", len(hashes) * 16 + 3, 20, hashes, priority=i % 3)
        for action in core.plan(now):
            core.index_stored(*action.prefill, hashes)
            core.advance(now, action.request, action.attempt, "decode_reserved")
            core.advance(now + 0.005, action.request, action.attempt, "first_token")
            core.advance(now + 0.006, action.request, action.attempt, "delivered")
            if i % 5:
                core.advance(now + 0.007, action.request, action.attempt, "handoff_done")
                core.advance(now + 0.008, action.request, action.attempt, "finished")
                core.forget(action.request)
        core.report_load(now, "d0", 1, i % 4, 0, 0, 200 - i % 50, 0.01)


def test_a_log_replays_to_the_same_decisions() -> None:
    core = busy_core()
    drive(core, 0, 50)
    assert core.recorded() == b""
    core.record(1 << 20)
    drive(core, 50, 200)
    log = core.recorded()
    lines: list[str] = []
    report = _core.replay_log(log, lines.append)
    assert report.equal, report.mismatch
    assert report.calls == len(lines) > 1000
    assert report.placements > 100
    assert any(" submit r51 pool=m prompt=" in line for line in lines)
    assert any("| place request=" in line for line in lines)
    core.record(0)
    drive(core, 250, 10)
    assert core.recorded() == log, "recording has stopped"


def test_errors_are_part_of_the_log() -> None:
    core = busy_core()
    core.record(1 << 20)
    with pytest.raises(CoreError):
        core.submit(0.0, "", "m", 1, 1, np.empty((0, 16), np.uint8))
    lines: list[str] = []
    assert _core.replay_log(core.recorded(), lines.append).equal
    assert lines[0].endswith("-> error request_id is empty")


def test_bytes_that_are_no_log_are_refused() -> None:
    with pytest.raises(CoreError, match="log: too short"):
        _core.replay_log(b"")
    with pytest.raises(CoreError, match="not a log"):
        _core.replay_log(bytes(100))
    core = busy_core()
    core.record(1 << 20)
    drive(core, 0, 5)
    with pytest.raises(CoreError):
        _core.replay_log(core.recorded()[:-3])


def test_the_indexed_blocks_of_a_worker_can_be_read_back() -> None:
    core = busy_core()
    hashes = np.random.default_rng(1).integers(0, 256, (700, 16), dtype=np.uint8)
    core.index_stored("p0", 1, hashes)
    core.index_stored("p0", 1, hashes[:3], tier="host")
    core.index_stored("p1", 1, hashes[:5])

    def rows(name: str, tier: str) -> set[bytes]:
        found = core.index_hashes(name, 1, tier=tier)
        assert found.shape[1] == 16
        assert found.dtype == np.uint8
        return {bytes(row) for row in found}

    assert rows("p0", "device") == {bytes(row) for row in hashes}
    assert rows("p0", "host") == {bytes(row) for row in hashes[:3]}
    assert rows("p1", "host") == set()
    assert core.index_hashes("nobody", 1).shape == (0, 16)


def test_cost_models_are_seeded_and_passed_on() -> None:
    core = busy_core()

    def model(name: str, kind: str) -> float:
        (row,) = (row for row in core.workers() if row["name"] == name)
        fit = row[f"{kind}_model"]
        assert isinstance(fit, dict)
        return float(fit["per_unit_seconds"])

    core.set_cost_model("p0", 1, "prefill", 0.01, 2e-3)
    assert model("p0", "prefill") == 2e-3
    for tokens in range(100, 2000, 100):
        core.observe_prefill("p0", 1, tokens, 0, 0.01 + tokens * 4e-3)
    assert model("p0", "prefill") == pytest.approx(4e-3, rel=0.1)
    core.upsert_worker(1.0, "p9", 1, "m", "prefill", "ready", "fp", 300, 16, 16)
    assert model("p9", "prefill") == model("p0", "prefill"), "a newcomer is like its measured peer"
    core.upsert_worker(1.0, "p0", 2, "m", "prefill", "ready", "fp", 300, 16, 16)
    assert model("p0", "prefill") == pytest.approx(4e-3, rel=0.1), "a restarted one is like itself"
    core.upsert_worker(1.0, "x", 1, "m", "prefill", "ready", "other", 300, 16, 16)
    assert model("x", "prefill") == 1e-4, "another model tells nothing"
    with pytest.raises(CoreError, match="model=speed; allowed: prefill, transfer, step"):
        core.set_cost_model("p0", 2, "speed", 1, 1)
    with pytest.raises(CoreError, match="allowed: 0 or more"):
        core.set_cost_model("p0", 2, "step", -1, 1)
