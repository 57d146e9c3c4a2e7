# SPDX-License-Identifier: Apache-2.0
"""Claim: the core takes the decisions of a router and of a worker in microseconds, whatever the length of the prompts, of the
queue and of the cluster, and faster than its peers: TokenSpeed's scheduler (0.1.42) and Dynamo's radix tree (1.6.1).

The peers run from a venv of their own, whose python is given by --peers or TWINPOOL_PEERS:

    python -m venv peers && peers/bin/pip install numpy tokenspeed-scheduler==0.1.42 ai-dynamo-runtime==1.6.1

Without it the project's side alone is measured. Both sides do the same work through their Python APIs, each workload in a
process of its own, in turn (A B A B); figures are medians over the rounds of medians. Times are wall time, in microseconds.
The sides are in ``_core_ours.py`` and ``_core_peers.py``, what they share in ``_core_work.py``.

Figures, of a side (``ours.``, ``peer.``):

- admit: from token ids to a place in the worker's queue, with and without the hash; admit_plan: through the plan of its prefill.
- decode: a request's share of a step with 16 running: plan, all arrays of it, the result.
- plan: 64 decode, so many wait for a seat or for memory.
- prefix_hit: admission and plan of a prompt that is cached but for 32 tokens; prefix_hit_hash: its hashes too.
- search: longest prefix of 2,048 blocks, for all workers, with a million blocks indexed; a different length each.
- index: updates in batches of 256 blocks, resident bytes an entry (block and worker); churn: growth of resident memory
  over rounds of a million stores and removals.
- recall: share of the blocks found of popular prompts where the index may take a half or a quarter of the bytes of all.
- route, place: submit and plan of a router core over 8 x 64 pairs of workers; life: all eight calls of a request; recorded:
  while the core records them.
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from bench._common import Figures, arguments, interleave, report

ROOT = Path(__file__).resolve().parents[1]
SHARED = ("admit", "decode", "plan", "prefix_hit", "search", "index", "churn", "block_hash")
OURS_ALONE = ("recall", "router", "router_queue")
ROUNDS_MAX = {"churn": 1, "recall": 1}
"""Of workloads that take many rounds themselves."""
AT_MOST = {
    "admit_2k_us": 10.0,
    "admit_no_hash_2k_us": 2.0,
    "decode_1k_us": 0.3,
    "plan_10000_wait_for_seat_us": 50.0,
    "plan_10000_wait_for_memory_us": 50.0,
    "prefix_hit_80k_us": 60.0,
    "search_64_workers_us": 10.0,
    "place_8x64_us": 25.0,
    "index_bytes": 48.0,
    "churn_growth": 1.1,
}
AT_LEAST = {"index_store_m_s": 4.0, "index_remove_m_s": 4.0, "hash_m_tokens_s": 200.0}


def ask(python: str, side: str, workload: str, quick: bool) -> Figures:
    """Figures of one workload, by a process of its own."""
    command = [python, "-m", f"bench._core_{side}", workload, *(["--quick"] if quick else [])]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "DYN_LOG": "error"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def ratios_of(ours: Figures, peer: Figures) -> dict[str, float]:
    """Ours over the peer's, where both have the figure; over the target, where there is one: at most 1 is met."""
    ratios = {f"{name}, ours/peer": ours[name] / value for name, value in peer.items() if name in ours}
    for name, target in AT_MOST.items():
        if name in ours:
            ratios[f"{name}, ours/target"] = ours[name] / target
    for name, target in AT_LEAST.items():
        ratios[f"{name}, target/ours"] = target / ours[name]
    if "decode_128k_us" in ours:
        ratios["decode 128k/1k, over 1.2"] = ours["decode_128k_us"] / ours["decode_1k_us"] / 1.2
    return ratios


def main() -> None:
    """Measures and prints."""
    options = arguments(
        __doc__ or "",
        ("--peers", {"default": os.environ.get("TWINPOOL_PEERS", ""), "help": "python of the peers' venv"}),
    )
    quick = bool(options.quick)
    found: dict[str, Figures] = {"ours": {}, "peer": {}}
    for workload in (*SHARED, *OURS_ALONE):
        sides = {"ours": partial(ask, sys.executable, "ours", workload, quick)}
        if options.peers and workload in SHARED:
            sides["peer"] = partial(ask, options.peers, "peers", workload, quick)
        rounds = 1 if quick else ROUNDS_MAX.get(workload, 5)
        for side, figures in interleave(rounds, sides).items():
            found[side] |= figures
    figures = {f"{side}.{name}": value for side, all_of in found.items() for name, value in all_of.items()}
    report(
        "The core decides in microseconds",
        figures,
        ratios_of(found["ours"], found["peer"]),
        as_json=bool(options.json),
    )


if __name__ == "__main__":
    main()
