# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of two devices works out by itself: which devices there are, who won, where pulling begins to pay."""

import math

import pytest
import torch

from bench.gpu._devices import devices_of
from bench.gpu._two_fetch import SUFFIX_TOKENS, break_even, predicted
from bench.gpu.two import verdicts
from twinpool.v1.control_pb2 import CostModel, WorkerRecord

BLOCK = 64


def test_one_name_stands_for_both_devices() -> None:
    assert devices_of("cpu") == ("cpu", "cpu")
    assert devices_of("cpu, cpu") == ("cpu", "cpu")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cpu,cpu,cpu", "name one device or two"),
        ("", "name one device or two"),
        ("wheel", "is no device"),
        ("cuda", "cannot be used"),
        ("meta", "cannot be used"),
    ],
)
def test_what_is_no_device_is_refused_with_a_sentence(text: str, words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        devices_of(text)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    missing = torch.cuda.device_count()
    with pytest.raises(SystemExit, match=f"cuda:{missing} is not there"):
        devices_of(f"cuda:{missing}" if missing == 0 else f"cuda:0,cuda:{missing}")


def test_the_break_even_lies_where_the_lines_cross() -> None:
    found = break_even({64: (3.0, 1.0), 128: (3.0, 2.0), 256: (3.0, 4.0), 512: (3.0, 8.0)})
    assert found == (192.0, True)


def test_a_pull_that_always_or_never_pays_has_no_break_even_among_the_lengths() -> None:
    assert break_even({64: (1.0, 2.0), 128: (1.0, 3.0)}) == (64.0, False)
    assert break_even({64: (2.0, 1.0), 128: (3.0, 1.0)}) == (math.inf, False)


def test_the_last_crossing_counts() -> None:
    assert break_even({64: (1.0, 2.0), 128: (3.0, 2.0), 256: (3.0, 4.0)})[0] == pytest.approx(192.0)


def record(unit_seconds: float) -> WorkerRecord:
    return WorkerRecord(
        num_blocks=1000,
        block_tokens=BLOCK,
        max_num_seqs=8,
        prefill_cost=CostModel(base_seconds=0.005, unit_seconds=unit_seconds),
    )


def test_placement_predicts_from_the_calibration_and_the_pulls() -> None:
    """Pulls of 4 ms whatever they move, against 10 us a token: 400 tokens, rounded up to whole blocks."""
    pulls = [(blocks, 0.004) for blocks in (1, 4, 16, 64)] * 8
    worker = record(1e-5)
    found = predicted(worker, worker, pulls, 8192)
    assert found == pytest.approx(448, abs=BLOCK)
    slower = predicted(record(2e-5), record(2e-5), pulls, 8192)
    assert slower < found
    assert slower % BLOCK == 0
    assert SUFFIX_TOKENS < BLOCK


def test_placement_never_pulls_what_is_computed_faster() -> None:
    worker = record(1e-9)
    assert predicted(worker, worker, [(1, 0.05), (64, 0.05)] * 16, 4096) == math.inf


def test_wins_and_losses_are_told_apart() -> None:
    figures: dict[str, object] = {
        "64 tokens ttft split ms": 2.0,
        "64 tokens ttft whole ms": 1.0,
        "2 answers beside 512 tokens, split: itl p99 ms": 5.0,
        "2 answers beside 512 tokens, replicas: itl p99 ms": 9.0,
        "2 answers beside 512 tokens, split: itl alone p99 ms": 5.0,
        "goodput of split per s": 3.0,
        "goodput of replicas per s": 2.0,
    }
    found = verdicts(figures, [64, 128])
    assert found["losses"] == ["time to first token of 64 tokens, ms, against one device: 2 against 1"]
    assert len(found["wins"]) == 2
    assert found["wins"][1] == "goodput, requests a second, against replicas: 3 against 2"
