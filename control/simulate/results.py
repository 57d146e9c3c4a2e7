# SPDX-License-Identifier: Apache-2.0
"""The figures of a run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.control.rebalance.history import reversals
from twinpool.control.replay.figures import latency_figures, weighted_spread
from twinpool.control.replay.trace import Trace
from twinpool.control.simulate.cluster import Cluster
from twinpool.control.simulate.job import Job, Status
from twinpool.control.simulate.policies import make_router
from twinpool.control.simulate.setup import Setup
from twinpool.control.simulate.worker import Worker

Figures = dict[str, object]


@dataclass(frozen=True)
class Run:
    """A finished run."""

    cluster: Cluster
    figures: Figures


def simulate(trace: Trace, setup: Setup, policy: str) -> Run:
    """Runs a trace through a policy and returns its figures. Raises ValueError for an unknown policy."""
    if setup.rebalance is not None and policy != "ours":
        raise ValueError(
            f"policy {policy!r} knows no worker that changes its role; allowed with a rebalancer: ours"
        )
    router = make_router(policy, setup)
    cluster = Cluster(trace, setup, router)
    cluster.run()
    return Run(cluster, {"policy": policy} | figures_of(cluster))


def figures_of(cluster: Cluster) -> Figures:
    """Latency, goodput, locality, balance and cost of a finished run."""
    jobs = cluster.jobs
    latency = latency_figures([job.timing for job in jobs], cluster.setup.objectives)
    ended = Counter(job.cause for job in jobs if job.status is not Status.SERVED)
    return latency | {
        "rejected": sum(job.status is Status.REJECTED for job in jobs),
        "failed": sum(job.status is Status.FAILED for job in jobs),
        "not_sent": cluster.not_sent,
        "causes": dict(ended),
        "attempts": sum(job.attempts for job in jobs),
        "token_itl_seconds": weighted_spread(cluster.step_seconds, cluster.step_tokens),
        **_locality(jobs),
        **_balance(cluster),
        "transfer_bytes": cluster.links.bytes,
        "transfers": cluster.links.transfers,
        "events": cluster.clock.calls,
        **_flips(cluster),
    }


def _locality(jobs: list[Job]) -> Figures:
    """Shares of the blocks that the trace lists. A fetched block is a hit whose bytes are in ``transfer_bytes``."""
    served = [job for job in jobs if job.status is Status.SERVED]
    listed = sum(job.listed for job in served)
    hits = sum(_hits(job) for job in served)
    infinite = sum(job.infinite for job in served)
    predicted = sum(job.predicted for job in served)
    return {
        "block_hit_rate": hits / listed if listed else 0.0,
        "infinite_hit_rate": infinite / listed if listed else 0.0,
        "share_of_infinite": hits / infinite if infinite else 1.0,
        "fetched_blocks": sum(job.fetched for job in served),
        "local_prefills": sum(job.local for job in served),
        "predicted_hit_rate": predicted / listed if listed else 0.0,
        "decode_hit_rate": sum(job.decode_cached for job in served) / listed if listed else 0.0,
        "computed_prompt_tokens": sum(job.computed for job in jobs),
    }


def _hits(job: Job) -> int:
    return min(job.decode_cached, job.usable) + job.fetched if job.local else job.cached


def _balance(cluster: Cluster) -> Figures:
    """Imbalance: the most loaded prefill worker over the mean, by prompt tokens computed and by seconds of steps."""
    workers = list(cluster.prefill.values())
    past = _former(cluster)
    tokens = [worker.computed_tokens for worker in workers]
    seconds = [worker.busy_seconds for worker in workers]
    now = cluster.clock.now or 1.0
    return {
        "imbalance": max(tokens) * len(tokens) / sum(tokens) if sum(tokens) else 1.0,
        "imbalance_seconds": max(seconds) * len(seconds) / sum(seconds) if sum(seconds) else 1.0,
        "prefill_utilisation": _utilisation([*workers, *past], "prefill", now),
        "decode_utilisation": _utilisation([*cluster.decode.values(), *past], "decode", now),
    }


def _former(cluster: Cluster) -> list[Worker]:
    """Workers as they were in roles that they have given up."""
    found = []
    for worker in [*cluster.prefill.values(), *cluster.decode.values()]:
        former = worker.former
        while former is not None:
            found.append(former)
            former = former.former
    return found


def _utilisation(workers: Sequence[Worker], role: str, now: float) -> float:
    """Share of the time in the role that was spent in steps."""
    chosen = [worker for worker in workers if worker.role == role]
    seconds = sum(
        (now if worker.role_until < 0 else worker.role_until) - worker.role_since for worker in chosen
    )
    return sum(worker.busy_seconds for worker in chosen) / seconds if seconds else 0.0


def _flips(cluster: Cluster) -> Figures:
    """What the rebalancer did."""
    rebalancer = cluster.rebalancer
    if rebalancer is None:
        return {}
    begun = zip(cluster.flips.log, rebalancer.flips, strict=True)
    flips = [
        {
            "at": flip.began,
            "worker": flip.worker,
            "to": flip.to,
            "drain_seconds": flip.drained - flip.began if flip.drained >= 0 else None,
            "seconds": flip.ended - flip.began if flip.ended >= 0 else None,
            "succeeded": flip.succeeded,
            "reason": decision.reason,
            "message": decision.message,
        }
        for flip, decision in begun
    ]
    return {"flips": flips, "reversals": reversals(rebalancer.history.moves)}
