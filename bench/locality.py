# SPDX-License-Identifier: Apache-2.0
"""Claim: routing by cost, with cached prefixes pulled from wherever they lie, serves more requests in time than the rules of
other routers, at nearly the hits of an infinite cache and with even load.

Public traces run through the simulator (the real router core and block managers, modelled workers), every policy in the same
run. Hits count fetched blocks; the bytes of fetches are in ``kv_moved_gb``. Imbalance is of prefill work: the busiest worker's
seconds over the mean. Goodput is the rate of requests that met both objectives at the highest arrival rate at which 90 % did.
Needs the traces: --traces DIRECTORY, or TWINPOOL_TRACES.
"""

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench._common import arguments, report
from bench._late_router import LateRouter
from twinpool.control.replay.figures import Objectives
from twinpool.control.replay.load import Selection, load_trace
from twinpool.control.replay.trace import Trace
from twinpool.control.simulate.cluster import Cluster
from twinpool.control.simulate.model import PRESETS
from twinpool.control.simulate.policies import POLICIES
from twinpool.control.simulate.results import Figures, simulate
from twinpool.control.simulate.setup import Setup

CONVERSATION = "mooncake_conversation_trace.jsonl"
AGENTS = "coding_agent_sessions.runs.jsonl.gz"
PEERS = ("threshold", "additive")
"""Other systems' published rules; the rest are yardsticks."""
IN_TIME = 0.9
"""Share of requests that must meet the objectives for a rate to count as served."""


@dataclass(frozen=True)
class Scenario:
    """A trace on a cluster. ``speed`` is the load: it divides arrivals and pauses."""

    name: str
    file: str
    preset: str
    prefill: int
    decode: int
    prefill_blocks: int
    decode_blocks: int
    speed: float
    ttft: float
    itl: float
    selection: Selection = dataclasses.field(default_factory=Selection)
    horizon: float = float("inf")
    """Of the recording, in seconds at speed 1."""
    core: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"prefix_fetch": 1.0})
    goodput: bool = True
    """Whether the highest rate is searched for, which takes some twenty runs."""


# Blocks of 512 tokens throughout: the granularity of the conversation trace, and for the agents' 5.5 billion prompt tokens fast.
BLOCK_TOKENS = 512
_SESSIONS = Selection(spread=3600.0, think_limit=30.0)
# Memory for every prefix: the device's and a host tier's.
_AMPLE = 200_000
SCENARIOS = (
    Scenario("conversation_4x20000", CONVERSATION, "h200-v3", 4, 4, 20_000, 0, 0.5, 10.0, 0.1),
    Scenario("conversation_8_ample", CONVERSATION, "h200-v3", 8, 8, _AMPLE, 0, 1.0, 10.0, 0.1),
    Scenario("agents_ample", AGENTS, "h200-v2lite", 5, 6, _AMPLE, _AMPLE, 1.0, 2.0, 0.05, _SESSIONS, 3600.0),
    Scenario(
        "agents_device", AGENTS, "h200-v2lite", 8, 6, 0, 0, 0.5, 2.0, 0.05, _SESSIONS, 3600.0, goodput=False
    ),
)


def main() -> None:
    """Entry point."""
    args = arguments(
        __doc__ or "",
        ("--traces", {"default": os.environ.get("TWINPOOL_TRACES", ""), "help": "directory of the traces"}),
        ("--only", {"default": "", "help": "scenarios whose name contains this"}),
        ("--policies", {"default": ",".join(POLICIES), "help": "comma-separated"}),
        (
            "--core",
            {"action": "append", "default": [], "help": "option of the core, name=value (repeatable)"},
        ),
        ("--no-goodput", {"action": "store_true", "help": "skip the search for the highest rate"}),
    )
    if not args.traces:
        print("no traces: give --traces DIRECTORY or set TWINPOOL_TRACES", file=sys.stderr)
        sys.exit(0 if args.quick else 2)
    policies = args.policies.split(",")
    core = {name: float(value) for name, _, value in (each.partition("=") for each in args.core)}
    figures: dict[str, object] = {}
    ratios: dict[str, float] = {}
    for scenario in SCENARIOS:
        if args.only not in scenario.name:
            continue
        chosen = dataclasses.replace(scenario, core={**scenario.core, **core})
        trace = _trace(Path(args.traces), chosen, args.quick)
        figures |= dict(_compare(chosen, trace, policies, ratios))
        if scenario.goodput and not args.no_goodput and not args.quick:
            figures |= dict(_goodputs(chosen, trace, policies, ratios))
    if args.only in "late_router":
        figures |= _late_router(Path(args.traces), core, args.quick, ratios)
    report("locality: policies on public traces", figures, ratios, as_json=args.json)


def _trace(directory: Path, scenario: Scenario, quick: bool) -> Trace:
    selection = scenario.selection
    if quick:
        agents = scenario.file == AGENTS
        selection = dataclasses.replace(
            selection, sessions=40 if agents else None, requests=None if agents else 1500
        )
    return load_trace(directory / scenario.file, "auto", selection)


def _setup(scenario: Scenario, trace: Trace, speed: float) -> Setup:
    return Setup(
        model=PRESETS[scenario.preset],
        prefill=scenario.prefill,
        decode=scenario.decode,
        block_tokens=BLOCK_TOKENS,
        prefill_blocks=scenario.prefill_blocks,
        decode_blocks=scenario.decode_blocks,
        closed=trace.closed,
        objectives=Objectives(scenario.ttft, scenario.itl),
        core=scenario.core,
        horizon=scenario.horizon / speed,
        max_new_tokens=max(request.output_length for request in trace.requests),
    )


def _compare(
    scenario: Scenario, trace: Trace, policies: list[str], ratios: dict[str, float]
) -> Iterator[tuple[str, object]]:
    """Every policy at the scenario's load."""
    shares: dict[str, float] = {}
    for policy in policies:
        found = _run(scenario, trace, policy, scenario.speed)
        for name, value in _shown(found).items():
            yield f"{scenario.name}.{policy}.{name}", value
        shares[policy] = _number(found["goodput_per_second"])
        if policy == "ours":
            ratios[f"{scenario.name}.share_of_infinite"] = _number(found["share_of_infinite"])
            ratios[f"{scenario.name}.imbalance"] = _number(found["imbalance_seconds"])
            yield f"{scenario.name}.infinite_hit_rate", found["infinite_hit_rate"]
    peers = [shares[peer] for peer in PEERS if peer in shares]
    if "ours" in shares and peers:
        ratios[f"{scenario.name}.in_time_at_same_load_over_best_peer"] = shares["ours"] / max(peers)


def _run(scenario: Scenario, trace: Trace, policy: str, speed: float) -> Figures:
    found = simulate(trace.faster(speed), _setup(scenario, trace, speed), policy).figures
    print(
        f"{scenario.name} {policy} at {speed:.3g}: {_number(found['attainment']):.3f} in time, "
        f"{_number(found['goodput_per_second']):.3g}/s, hits {_number(found['block_hit_rate']):.3f}",
        file=sys.stderr,
        flush=True,
    )
    return found


def _shown(found: Figures) -> dict[str, object]:
    ttft, itl = found["ttft_seconds"], found["itl_seconds"]
    assert isinstance(ttft, dict)
    assert isinstance(itl, dict)
    return {
        "hit_rate": found["block_hit_rate"],
        "share_of_infinite": found["share_of_infinite"],
        "imbalance": found["imbalance_seconds"],
        "imbalance_tokens": found["imbalance"],
        "ttft_p50": ttft.get("p50"),
        "ttft_p90": ttft.get("p90"),
        "ttft_p99": ttft.get("p99"),
        "itl_p50": itl.get("p50"),
        "itl_p99": itl.get("p99"),
        "in_time": found["attainment"],
        "in_time_per_second": found["goodput_per_second"],
        "kv_moved_gb": _number(found["transfer_bytes"]) / 1e9,
        "rejected": found["rejected"],
    }


def _goodputs(
    scenario: Scenario, trace: Trace, policies: list[str], ratios: dict[str, float]
) -> Iterator[tuple[str, object]]:
    """For ours and the peers: the highest load at which enough requests are in time, by bisection to 4 %."""
    found: dict[str, float] = {}
    for policy in ("ours", *PEERS):
        if policy in policies:
            found[policy] = _goodput(scenario, trace, policy)
            yield f"{scenario.name}.{policy}.goodput_per_second", found[policy]
    peers = [found[peer] for peer in PEERS if peer in found]
    if "ours" in found and peers and max(peers) > 0:
        ratios[f"{scenario.name}.goodput_over_best_peer"] = found["ours"] / max(peers)


def _goodput(scenario: Scenario, trace: Trace, policy: str) -> float:
    low, high, best = scenario.speed / 16, scenario.speed * 2, 0.0
    while high > low * 1.04:
        middle = (low * high) ** 0.5
        tried = _run(scenario, trace, policy, middle)
        if _number(tried["attainment"]) >= IN_TIME:
            low, best = middle, max(best, _number(tried["goodput_per_second"]))
        else:
            high = middle
    return best


def _late_router(
    directory: Path, core: Mapping[str, float], quick: bool, ratios: dict[str, float]
) -> Figures:
    """A second router that starts half-way, from a snapshot of what the workers hold, chooses beside the first."""
    scenario = SCENARIOS[0]
    scenario = dataclasses.replace(scenario, core={**scenario.core, **core})
    trace = _trace(directory, scenario, quick)
    setup = _setup(scenario, trace, scenario.speed)
    router = LateRouter(setup, starts=trace.seconds / scenario.speed / 2)
    Cluster(trace.faster(scenario.speed), setup, router).run()
    ratios["late_router.same_prefill_choices"] = router.same / max(1, router.compared)
    return {"late_router.compared": router.compared, "late_router.same_pairs": router.same_pairs}


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


if __name__ == "__main__":
    main()
