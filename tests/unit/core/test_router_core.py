# SPDX-License-Identifier: Apache-2.0
"""The Python face of the router core: types, errors, threads."""

import ast
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from twinpool import _core
from twinpool._core import AdmissionConfig, CoreError, RouterCore

NO_HASHES = np.empty((0, 16), np.uint8)
STUB = Path(__file__).parents[3] / "twinpool" / "_core.pyi"


def make(**limits: float) -> RouterCore:
    core = RouterCore(AdmissionConfig(**limits))
    for name in ("p0", "p1", "d0", "d1"):
        role = "prefill" if name[0] == "p" else "decode"
        core.upsert_worker(0.0, name, 1, "m", role, "ready", "fp", 1000, 16, 64)
    return core


def random_hashes(blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (blocks, 16), dtype=np.uint8)


@pytest.mark.parametrize("name", ["AdmissionConfig", "RouterCore", "Submission", "Action", "Transition"])
def test_the_stub_names_what_there_is(name: str) -> None:
    tree = next(
        node
        for node in ast.parse(STUB.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    declared = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    declared |= {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    actual = {attribute for attribute in vars(getattr(_core, name)) if not attribute.startswith("_")}
    assert declared - {"__init__"} == actual


def test_config_is_checked_field_by_field() -> None:
    config = AdmissionConfig(max_attempts=5, ageing_seconds=2)
    assert (config.max_attempts, config.ageing_seconds) == (5, 2.0)
    config.max_attempts = 7
    assert isinstance(config.max_attempts, int)
    with pytest.raises(CoreError, match=r"max_attempts=0; allowed: whole numbers 1 to"):
        config.max_attempts = 0
    with pytest.raises(CoreError, match=r"unknown field max_atempts; allowed: max_queue_requests, "):
        AdmissionConfig(max_atempts=3)
    with pytest.raises(CoreError, match="allowed: whole numbers"):
        AdmissionConfig(max_attempts=1.5)
    assert config.max_attempts == 7
    assert {field: getattr(config, field) for field in AdmissionConfig.FIELDS}["max_attempts"] == 7


def test_a_place_action_says_all_that_is_to_be_done() -> None:
    core = make()
    hashes = random_hashes(8)
    core.index_stored("p1", 1, hashes)
    core.index_stored("d0", 1, hashes[:3])
    submission = core.submit(0.0, "a", "m", 8 * 16 + 1, 10, hashes)
    (action,) = core.plan(0.0)
    assert (action.kind, action.request, action.attempt) == ("place", submission.request, 1)
    assert (action.prefill, action.decode, action.state) == (("p1", 1), ("d0", 1), "Prefilling")
    assert (action.predicted_cached_blocks, action.predicted_decode_cached_blocks) == (8, 3)
    assert action.predicted_ttft_seconds > 0
    assert (action.cause, action.local, action.fetch_from) == ("", False, None)
    why = core.explain(submission.request)
    assert (why["obstacle"], why["pairs"]) == ("none", 4)
    chosen = why["chosen"]
    assert isinstance(chosen, dict)
    parts = sum(value for key, value in chosen.items() if key.endswith("_seconds") and key != "total_seconds")
    assert parts == pytest.approx(chosen["total_seconds"])
    others = why["others"]
    assert isinstance(others, list)
    assert len(others) == 3
    assert all(other["total_seconds"] >= chosen["total_seconds"] for other in others)


@pytest.mark.parametrize(
    "hashes",
    [
        np.empty((0, 8), np.uint8),
        np.empty(16, np.uint8),
        np.empty((2, 16), np.int8),
        np.empty((4, 16), np.uint8)[::2],
    ],
    ids=["width", "one-dimensional", "dtype", "strided"],
)
def test_hashes_of_a_wrong_kind_are_refused(hashes: NDArray[np.uint8]) -> None:
    core = make()
    for call in (
        lambda: core.submit(0.0, "a", "m", 100, 10, hashes),
        lambda: core.index_stored("p0", 1, hashes),
        lambda: core.longest_prefix(hashes),
    ):
        with pytest.raises((TypeError, ValueError, CoreError)):
            call()
    assert core.stats()["requests"] == 0


def test_wrong_names_are_named() -> None:
    core = make()
    with pytest.raises(CoreError, match="role=both; allowed: prefill, decode"):
        core.upsert_worker(0.0, "x", 1, "m", "both", "ready", "fp", 10, 16, 4)
    with pytest.raises(CoreError, match="state=dead; allowed: starting"):
        core.upsert_worker(0.0, "x", 1, "m", "decode", "dead", "fp", 10, 16, 4)
    with pytest.raises(CoreError, match="tier=tape"):
        core.index_stored("p0", 1, NO_HASHES, tier="tape")
    with pytest.raises(CoreError, match="incarnation=0"):
        core.upsert_worker(0.0, "x", 0, "m", "decode", "ready", "fp", 10, 16, 4)
    with pytest.raises(CoreError, match="never submitted"):
        core.forget(5)
    with pytest.raises(CoreError, match="not known"):
        core.state(5)


def test_news_of_unknown_workers_are_late_not_wrong() -> None:
    core = make()
    core.report_load(0.0, "p0", 99, 1, 1, 1, 1, 0.1)
    core.index_stored("p0", 99, random_hashes(4))
    core.index_removed("nobody", 1, random_hashes(4))
    core.index_cleared("nobody", 1)
    core.quarantine(0.0, "nobody", 1, 10.0)
    core.observe_prefill("nobody", 1, 10, 0, 1.0)
    core.remove_worker(0.0, "p0", 99)
    stats = core.stats()
    assert (stats["workers"], stats["index_blocks"]) == (4, 0)


def test_incarnations_use_all_64_bits() -> None:
    core = make()
    big = 2**64 - 1
    core.upsert_worker(0.0, "p0", big, "m", "prefill", "ready", "fp", 1000, 16, 64)
    core.remove_worker(0.0, "p1", 1)
    core.submit(0.0, "a", "m", 10, 1, NO_HASHES)
    assert core.plan(0.0)[0].prefill == ("p0", big)


def test_the_index_follows_copies_and_tiers() -> None:
    core = make()
    hashes = random_hashes(600)  # past the batch size from which the GIL is released
    core.index_stored("p0", 1, hashes, counted=True)
    core.index_stored("p0", 1, hashes, counted=True)
    core.index_removed("p0", 1, hashes)
    assert core.longest_prefix(hashes) == [("p0", 600)]
    core.index_stored("d1", 1, hashes[:7], tier="host")
    assert core.longest_prefix(hashes) == [("p0", 600), ("d1", 7)]
    core.index_cleared("p0", 1)
    assert core.longest_prefix(hashes) == [("d1", 7)]
    core.remove_worker(0.0, "d1", 1)
    assert core.longest_prefix(hashes) == []


def test_models_learn_from_what_prefill_took() -> None:
    core = make()
    for tokens in range(100, 2100, 100):
        core.observe_prefill("p0", 1, tokens, 0, 0.01 + tokens / 500)
        core.observe_transfer("d0", 1, tokens // 16, tokens / 16 * 1e-3)
    rows = {str(row["name"]): row for row in core.workers()}
    model = rows["p0"]["prefill_model"]
    assert isinstance(model, dict)
    assert model["per_unit_seconds"] == pytest.approx(1 / 500, rel=0.1)
    transfer = rows["d0"]["transfer_model"]
    assert isinstance(transfer, dict)
    assert transfer["per_unit_seconds"] == pytest.approx(1e-3, rel=0.1)
    assert core.predict_transfer("d0", 1, 100) == pytest.approx(0.1, rel=0.1)
    assert core.predict_transfer("d0", 2, 100) == 0.0
    core.submit(0.0, "a", "m", 1000, 10, NO_HASHES)
    assert core.plan(0.0)[0].prefill[0] == "p1", "the unmeasured one is taken to be quicker"


def test_without_measurements_the_core_learns_from_events() -> None:
    core = make()
    core.remove_worker(0.0, "p1", 1)
    now = 0.0
    for i in range(20):
        tokens = 100 + 50 * i
        request = core.submit(now, f"r{i}", "m", tokens, 1, NO_HASHES).request
        assert len(core.plan(now)) == 1
        core.advance(now, request, 1, "decode_reserved")
        now += tokens / 1000
        core.advance(now, request, 1, "first_token")
        core.advance(now, request, 1, "finished")
        core.forget(request)
    (row,) = (row for row in core.workers() if row["name"] == "p0")
    model = row["prefill_model"]
    assert isinstance(model, dict)
    assert model["per_unit_seconds"] == pytest.approx(1e-3, rel=0.1)
    assert model["samples"] == 20


def test_threads_may_share_a_core() -> None:
    core = make(max_queue_requests=0)
    stop = threading.Event()
    faults: list[BaseException] = []

    def run(work: object) -> threading.Thread:
        def loop() -> None:
            try:
                while not stop.is_set():
                    work()  # type: ignore[operator]
            except BaseException as error:
                faults.append(error)

        thread = threading.Thread(target=loop)
        thread.start()
        return thread

    hashes = random_hashes(2000)
    threads = [
        run(lambda: core.index_stored("p0", 1, hashes)),
        run(lambda: core.index_removed("p0", 1, hashes)),
        run(lambda: core.longest_prefix(hashes)),
        run(lambda: core.upsert_worker(0.0, "d1", 1, "m", "decode", "ready", "fp", 1000, 16, 64)),
        run(core.workers),
    ]
    for i in range(2000):
        core.submit(0.0, f"r{i}", "m", 100, 10, hashes[:6])
        for action in core.plan(0.0):
            core.advance(0.0, action.request, action.attempt, "cancel")
            core.forget(action.request)
    stop.set()
    for thread in threads:
        thread.join()
    assert not faults
    assert core.stats()["reservations"] == 0
