# SPDX-License-Identifier: Apache-2.0
"""Conversations that all begin with the same block: affinity must neither send everything to one worker nor be given up."""

from tests.unit.control.simulated import sessions, setup
from twinpool.control.simulate.results import simulate


def run(policy: str) -> tuple[float, float]:
    """Share of an infinite cache's hits, and the busiest prefill worker's tokens over the mean."""
    trace = sessions(count=160, turns=8, seed=3, gap=0.02)
    figures = simulate(trace, setup(prefill=3, decode=3, prefill_blocks=600), policy).figures
    assert figures["served"] == len(trace.requests)
    return float(figures["share_of_infinite"]), float(figures["imbalance"])  # type: ignore[arg-type]


def test_a_shared_first_block_is_no_reason_to_pile_up() -> None:
    hits, imbalance = run("ours")
    spread_hits, _ = run("round_robin")
    _, piled = run("longest_prefix")
    assert piled > 2.5, "the trace does not tempt anybody"
    assert imbalance <= 1.25
    assert hits >= 0.9
    assert hits >= 1.3 * spread_hits
