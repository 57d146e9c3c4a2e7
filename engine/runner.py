# SPDX-License-Identifier: Apache-2.0
"""Executes step plans: copies blocks, runs the model over the paged cache, draws the next tokens."""

import contextlib
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.graphs import DecodeGraphs
from twinpool.engine.kv.host import HostPool, SwapPlan
from twinpool.engine.kv.pool import KVPool
from twinpool.engine.models.base import DecoderModel
from twinpool.engine.sampling import Grammars, Sample, SequenceDraw, TokenLogprobs, sample
from twinpool.engine.step import Drawn, Plan, PlanArrays, PlanError, PlanLimits, StepResult, check_plan
from twinpool.engine.warmup import WARMUP_PARAMS, warmup_plans
from twinpool.logs import get_logger

__all__ = ["Drawn", "ModelRunner", "Plan", "PlanError", "SequenceDraw", "StepResult"]

GRAPH_CONTEXT = 32768
"""Sequences beyond this length are decoded without a graph: launches count for little there, and tables stay small."""

log = get_logger(__name__)


class ModelRunner:
    """One model over one pool. ``step`` and ``warmup`` must be called from one thread at a time."""

    def __init__(
        self,
        model: DecoderModel,
        pool: KVPool,
        *,
        host: HostPool | None = None,
        grammars: Grammars | None = None,
        threads: int | None = None,
        validate: bool = False,
    ) -> None:
        """``grammars``: who made the grammars of the draws. ``host``: where preempted sequences keep their KV, if the scheduler
        has host blocks. ``threads``: intra-op threads of torch, for the whole process; None leaves them. ``validate`` checks
        every plan before it is run (some tens of microseconds)."""
        if threads is not None:
            torch.set_num_threads(threads)
        self._model = model.eval()
        self._pool = pool
        self._host = host
        self._grammars = grammars
        self._device = pool.tensor.device
        self._validate = validate
        self._graphs: DecodeGraphs | None = None
        if self._device.type == "cuda" and model.capturable:
            longest = min(GRAPH_CONTEXT, model.config.max_position_embeddings)
            self._graphs = DecodeGraphs(model, pool, max_context=longest)
        self._limits = PlanLimits(
            num_blocks=pool.num_blocks,
            block_tokens=pool.block_tokens,
            vocab_size=model.config.vocab_size,
            max_positions=model.config.max_position_embeddings,
        )

    @property
    def limits(self) -> PlanLimits:
        """What the numbers of a plan must lie in."""
        return self._limits

    @property
    def lazy(self) -> bool:
        """Whether the first step of a shape pays for what the later ones use (graphs, kernels)."""
        return self._device.type == "cuda"

    @torch.inference_mode()
    def step(self, plan: Plan, draws: Sequence[SequenceDraw]) -> StepResult:
        """Runs ``plan``; ``draws[i]`` says how to draw for ``plan.seq[i]`` (unused where nothing is sampled).

        Every drawn token has been appended to its draw (and to its siblings') on return. If this raises, no draw has
        changed, and the plan is to be aborted: what it wrote lies beyond the sequences' computed tokens. Raises
        PlanError for a plan that contradicts itself or the draws.
        """
        arrays = PlanArrays.of(plan)
        if len(draws) != len(arrays.seq):
            raise PlanError(f"{len(draws)} draws for {len(arrays.seq)} sequences")
        if self._validate:
            check_plan(arrays, self._limits)
        if len(arrays.copies):
            self._pool.copy_blocks(arrays.copies)
        sampled = np.flatnonzero(arrays.sample)
        last_rows = arrays.q_start[1:].astype(np.int64) - 1
        if not len(sampled):
            # Only KV is wanted. One row stands in, so that no kernel has to cope with an empty batch.
            self._forward(arrays, last_rows[:1])
            if self._device.type == "cuda":
                # Nothing was fetched that would have waited for the KV, and peers read it outside of any stream.
                torch.cuda.current_stream(self._device).synchronize()
            return StepResult(np.zeros(len(draws), np.int32), None, {}, ())
        flat, rows = _flatten(sampled, draws)
        masks = self._grammars.masks([draw.grammar for draw in flat]) if self._grammars is not None else None
        if self._graphs is not None and self._graphs.fits(arrays):
            logits = self._graphs.run(arrays)
            logits = (
                logits if len(sampled) == len(draws) else logits[torch.from_numpy(sampled).to(self._device)]
            )
        else:
            logits = self._model.logits(self._forward(arrays, last_rows[sampled]))
        if len(flat) > len(sampled):
            logits = logits[torch.tensor(rows, device=self._device)]
        return self._take(sample(logits, flat, masks), sampled, draws)

    @torch.inference_mode()
    def swap(self, plan: SwapPlan) -> None:
        """Moves KV between the pool and host memory as ``plan`` says. To be called before ``step``, and before what the plan
        has freed is poisoned. If it raises, the plan is to be aborted."""
        if self._host is not None:
            self._host.swap(plan)

    @torch.inference_mode()
    def warmup(self, *, max_batched_tokens: int = 512, max_num_seqs: int = 8) -> float:
        """Runs a prefill and a decode step of these sizes, so that the first request does not pay for lazy set-up.

        The blocks that it uses are put back as they were. Returns the seconds it took.
        """
        started = time.monotonic()
        for plan in warmup_plans(self._limits, max_batched_tokens, max_num_seqs):
            with self.scratch(plan):
                hidden = self._forward(plan, plan.q_start[1:].astype(np.int64) - 1)
                sample(self._model.logits(hidden), [SequenceDraw(WARMUP_PARAMS)] * len(plan.seq))
        seconds = time.monotonic() - started
        log.info("model_warm", seconds=round(seconds, 3))
        return seconds

    @contextlib.contextmanager
    def scratch(self, plan: PlanArrays) -> Iterator[None]:
        """For runs of ``plan`` that nobody asked for: afterwards the blocks of its table are as they were."""
        blocks = torch.from_numpy(np.unique(plan.block_table[plan.block_table >= 0]).astype(np.int64))
        blocks = blocks.to(self._device)
        saved = self._pool.tensor[blocks]
        # Memory that was never written is one page of zeros to a CPU, which reads it faster than real KV.
        self._pool.tensor[blocks] = saved
        try:
            yield
        finally:
            self._pool.tensor[blocks] = saved

    def _forward(self, plan: PlanArrays, last_rows: NDArray[np.int64]) -> Tensor:
        batch = AttentionBatch.build(
            q_start=plan.q_start,
            context=plan.context,
            block_table=plan.block_table,
            slots=plan.slots,
            block_tokens=self._limits.block_tokens,
            num_decodes=plan.num_decodes,
            last_rows=last_rows,
            device=self._device,
        )
        ids = torch.from_numpy(plan.token_ids.astype(np.int64)).to(self._device)
        positions = torch.from_numpy(plan.positions.astype(np.int64)).to(self._device)
        hidden: Tensor = self._model(ids, positions, self._pool.tensor, batch)
        return hidden

    def _take(self, drawn: Sample, sampled: NDArray[np.int64], draws: Sequence[SequenceDraw]) -> StepResult:
        result = _unflatten(drawn, sampled, draws)
        for index in sampled.tolist():
            if index not in result.failed:
                draws[index].append(int(result.tokens[index]))
                for sibling, other in zip(draws[index].siblings, result.siblings.get(index, ()), strict=True):
                    sibling.append(other.token)
        return result


def _flatten(
    sampled: NDArray[np.int64], draws: Sequence[SequenceDraw]
) -> tuple[list[SequenceDraw], list[int]]:
    """The draws of the sampled sequences, each sequence's siblings behind it, and the row of logits of each."""
    flat: list[SequenceDraw] = []
    rows: list[int] = []
    for row, index in enumerate(sampled.tolist()):
        group = (draws[index], *draws[index].siblings)
        flat.extend(group)
        rows.extend([row] * len(group))
    return flat, rows


def _unflatten(drawn: Sample, sampled: NDArray[np.int64], draws: Sequence[SequenceDraw]) -> StepResult:
    """Puts flat draws, each sequence's siblings behind it, in their places in the plan."""
    tokens = np.zeros(len(draws), np.int32)
    entries = drawn.logprobs
    logprobs: list[TokenLogprobs | None] = [None] * len(draws)
    siblings: dict[int, list[Drawn]] = {}
    failed: list[int] = []
    at = 0
    for index in sampled.tolist():
        end = at + 1 + len(draws[index].siblings)
        if drawn.failed[at:end].any():
            failed.append(index)
        else:
            tokens[index] = drawn.tokens[at]
            if entries is not None:
                logprobs[index] = entries[at]
            if end > at + 1:
                siblings[index] = [
                    Drawn(int(drawn.tokens[i]), None if entries is None else entries[i])
                    for i in range(at + 1, end)
                ]
        at = end
    if failed:
        log.error("logits_not_finite", sequences=len(failed))
    return StepResult(tokens, logprobs if entries is not None else None, siblings, tuple(failed))
