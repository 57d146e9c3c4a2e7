# SPDX-License-Identifier: Apache-2.0
"""A short run of ``make chaos``: everything dies, stalls and is cut off under load, and nobody notices but by the clock.

``TWINPOOL_SEED=<number>`` runs another plan; docs/benchmarks.md has the long runs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.schedule import NETWORK, WEIGHTS, plan
from tests.support.soak import SEED_VARIABLE

pytestmark = [pytest.mark.integration, pytest.mark.faults]

ROOT = Path(__file__).parents[2]
SECONDS = 90
RUN_SECONDS = 1500
"""A machine that is ten times slower than usual needs so long, the start and the oracle's answers included."""


def seed() -> int:
    """One whose plan has every kind of fault, so that every run tries each."""
    return int(os.environ.get(SEED_VARIABLE) or FULL_SEED)


KINDS = {kind for kind, weight in WEIGHTS.items() if weight}
FULL_SEED = next(seed for seed in range(1, 10_000) if {fault.kind for fault in plan(seed, SECONDS)} >= KINDS)


@pytest.mark.timeout(RUN_SECONDS + 60)
def test_a_short_run_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos", "--seed", str(seed()), "--seconds", str(SECONDS)]
    # A plan of its own for a slow machine: few answers to compute beforehand, few streams at a time.
    command += ["--questions", "8", "--longest", "160", "--clients", "4", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert done.stdout, done.stderr[-4000:]
    result = json.loads(done.stdout)
    print(result)
    assert result["failures"] == []
    assert done.returncode == 0
    assert (result["lost"], result["wrong"]) == (0, 0)
    assert result["finished"] == result["streams"] > 0
    links = result["links"] == "namespaces"
    kinds = frozenset(WEIGHTS) - (frozenset() if links else NETWORK)
    assert sum(result["faults"].values()) == len(plan(seed(), SECONDS, kinds=kinds))
    assert result["restarts"] >= sum(count for kind, count in result["faults"].items() if "kill_" in kind)
