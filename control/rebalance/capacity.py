# SPDX-License-Identifier: Apache-2.0
"""What a worker can do within the objectives, from cost models as workers measure them at their start."""

from dataclasses import dataclass

LEAST_SECONDS = 1e-6


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that work takes: ``base + unit * units + context * context``. As the protocol's CostModel."""

    base: float
    unit: float
    context: float = 0.0

    def seconds(self, units: float, context: float) -> float:
        """Never 0, so that it can be divided by."""
        return max(LEAST_SECONDS, self.base + self.unit * units + self.context * context)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What bounds a decode worker's batch."""

    kv_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests as they were lately, on average."""

    prompt_tokens: float
    """Of a prompt, those included that are cached."""
    uncached_tokens: float
    output_tokens: float

    @property
    def context_tokens(self) -> float:
        """Tokens of KV that a request holds while it is decoded, half of its output on average."""
        return self.prompt_tokens + self.output_tokens / 2.0


def prompt_seconds(cost: Cost, load: Workload) -> float:
    """What one prompt takes on a prefill worker that has nothing else to do."""
    computed = load.uncached_tokens
    cached = max(0.0, load.prompt_tokens - computed)
    return cost.seconds(computed, computed * (cached + computed / 2.0))


def batch(cost: Cost, limits: WorkerLimits, load: Workload, itl: float) -> float:
    """Sequences that a decode worker may run at once: what the inter-token objective, its memory and its limit allow. At least 1."""
    each = cost.unit + cost.context * load.context_tokens
    by_time = (itl - cost.base) / each if each > 0 else float(limits.max_num_seqs)
    by_memory = limits.kv_tokens / max(1.0, load.prompt_tokens + load.output_tokens)
    return max(1.0, min(by_time, by_memory, float(limits.max_num_seqs)))


def decode_capacity(cost: Cost, limits: WorkerLimits, load: Workload, itl: float) -> float:
    """Output tokens a second of a decode worker with as large a batch as that."""
    sequences = batch(cost, limits, load, itl)
    return sequences / cost.seconds(sequences, sequences * load.context_tokens)


def prefill_capacity(cost: Cost, load: Workload) -> float:
    """Uncached prompt tokens a second of a prefill worker."""
    return max(1.0, load.uncached_tokens) / prompt_seconds(cost, load)
