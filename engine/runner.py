# SPDX-License-Identifier: Apache-2.0
"""Executes step plans: copies blocks, runs the model over the paged cache, draws the next tokens."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.begun import BegunStep, fetch
from twinpool.engine.graphs import DecodeGraphs, Replayed
from twinpool.engine.kv.host import HostPool, SwapPlan
from twinpool.engine.kv.pool import KVPool
from twinpool.engine.models.base import DecoderModel
from twinpool.engine.sampling import (
    Grammars,
    PromptLogprobs,
    Sample,
    SequenceDraw,
    TokenLogprobs,
    sample,
)
from twinpool.engine.step import (
    Drawn,
    FollowingPlan,
    Plan,
    PlanArrays,
    PlanError,
    PlanLimits,
    StepResult,
    check_plan,
)
from twinpool.engine.warmup import WARMUP_PARAMS, warmup_plans
from twinpool.logs import get_logger

__all__ = ["Drawn", "ModelRunner", "Plan", "PlanError", "SequenceDraw", "StepResult"]

GRAPH_CONTEXT = 131072
"""Sequences beyond this length are decoded without a graph, so that the graphs' block tables stay small (2 MB for 256 sequences).
It costs: on an H200 a step of a model of 27 layers took 22.7 ms at 32,769 tokens without a graph, against 3.5 at 8,192 with one."""

GRAPH_READS = 1 << 20
"""A step whose chunks are small runs through a graph too, a row a token, if its rows attend to no more positions than this in all:
each row reads its whole context anew, which at 31 kB a token (DeepSeek-V2-Lite) takes 7 ms of an H200, where the launches of such a step
by themselves take 20."""

log = get_logger(__name__)

_NOTHING_DRAWN = Sample(np.zeros(0, np.int32), None, np.zeros(0, np.bool_))


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
        """Runs ``plan``; ``draws[i]`` says how to draw for ``plan.seq[i]`` (where nothing is sampled, only its scoring is used).

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
        scored = _scored(arrays, draws)
        if not len(sampled) and not scored:
            # Only KV is wanted. One row stands in, so that no kernel has to cope with an empty batch.
            if self._replay(arrays) is None:
                self._forward(arrays, last_rows[:1])
            if self._device.type == "cuda":
                # Nothing was fetched that would have waited for the KV, and peers read it outside of any stream.
                torch.cuda.current_stream(self._device).synchronize()
            return StepResult(np.zeros(len(draws), np.int32), None, {}, ())
        logits, best, prompts = self._logits(arrays, sampled, scored, draws)
        if not len(sampled):
            return self._take(_NOTHING_DRAWN, sampled, draws, prompts)
        flat, rows = _flatten(sampled, draws)
        masks = self._grammars.masks([draw.grammar for draw in flat]) if self._grammars is not None else None
        if len(flat) > len(sampled):
            index = torch.tensor(rows, device=self._device)
            logits, best = logits[index], None if best is None else best[:, index]
        return self._take(sample(logits, flat, masks, best), sampled, draws, prompts)

    @torch.inference_mode()
    def begin(self, plan: Plan, draws: Sequence[SequenceDraw]) -> BegunStep:
        """As ``step``, but does not wait where it need not: for decodes that are all drawn greedily, through a graph (on a CPU, where
        nothing runs beside the host, all but the telling is done on return). Any other plan has run as by ``step``."""
        arrays = PlanArrays.of(plan)
        if len(draws) != len(arrays.seq) or not self._greedy(arrays, draws):
            result = self.step(plan, draws)
            return BegunStep(lambda: result)
        if self._validate:
            check_plan(arrays, self._limits)
        return self._begin(arrays, draws, None)

    def may_follow(self, before: BegunStep) -> bool:
        """Whether ``follow`` takes the next tokens of the sequences of ``before``, the step that was begun last."""
        longest = self._graphs.max_context if self._graphs is not None else self._limits.max_positions
        return before.best is not None and before.longest < longest

    @torch.inference_mode()
    def follow(self, before: BegunStep, plan: FollowingPlan, draws: Sequence[SequenceDraw]) -> BegunStep:
        """Begins the step that follows ``before``, which ``may_follow`` and need not be finished: its tokens are taken where it leaves
        them. ``draws`` are those of ``plan``, of the plan before it as far as they go on."""
        arrays, rows = PlanArrays.of(plan), plan.follows
        assert before.best is not None
        drawn = before.best[0]
        if len(rows) < len(drawn):
            index = torch.from_numpy(rows.astype(np.int64))
            if self._device.type == "cuda":
                index = index.pin_memory().to(self._device, non_blocking=True)
            drawn = drawn[index]
        return self._begin(arrays, draws, drawn)

    def settle(self) -> None:
        """Waits for all that was begun."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _greedy(self, arrays: PlanArrays, draws: Sequence[SequenceDraw]) -> bool:
        """Whether every sequence decodes one token that is the arg max of its logits, and no more is wanted of it."""
        if arrays.num_decodes < len(arrays.seq) or len(arrays.copies) or not arrays.sample.all():
            return False
        if self._graphs is not None:
            if not self._graphs.fits(arrays):
                return False
        elif self._device.type != "cpu":
            return False
        return all(
            draw.plain and not draw.siblings and draw.scoring is None and draw.params.logprobs is None
            for draw in draws
        )

    def _begin(self, arrays: PlanArrays, draws: Sequence[SequenceDraw], drawn: Tensor | None) -> BegunStep:
        if self._graphs is not None:
            best = self._graphs.run(arrays, drawn).best
        else:
            hidden = self._forward(arrays, arrays.q_start[1:].astype(np.int64) - 1, drawn)
            best = self._model.best(self._model.scores(hidden))
        sampled, wait = np.arange(len(arrays.seq)), fetch(best)
        longest = int(arrays.context.max())
        return BegunStep(lambda: self._take(wait(), sampled, draws, {}), best, longest)

    def _logits(
        self,
        arrays: PlanArrays,
        sampled: NDArray[np.int64],
        scored: Mapping[int, range],
        draws: Sequence[SequenceDraw],
    ) -> tuple[Tensor, Tensor | None, dict[int, PromptLogprobs]]:
        """Runs the model: logits of the last row of each sampled sequence, their greedy choice if it comes with them, and
        what is wanted of prompts."""
        if not scored and (replayed := self._replay(arrays)) is not None:
            logits, best = replayed
            last = arrays.q_start[sampled + 1].astype(np.int64) - 1
            if len(last) < len(logits):
                wanted = torch.from_numpy(last).to(self._device)
                logits, best = logits[wanted], best[:, wanted]
            return logits, best, {}
        rows = [arrays.q_start[sampled + 1].astype(np.int64) - 1]
        for index, positions in scored.items():
            row_zero = int(arrays.context[index] - arrays.q_start[index + 1])
            rows.append(np.arange(positions.start, positions.stop, dtype=np.int64) - row_zero)
        hidden = self._forward(arrays, np.concatenate(rows))
        prompts: dict[int, PromptLogprobs] = {}
        at = len(sampled)
        for index, positions in scored.items():
            scoring, own = draws[index].scoring, hidden[at : at + len(positions)]
            assert scoring is not None
            prompts[index] = scoring.score(own, positions.start, self._model.logits)
            at += len(positions)
        return self._model.logits(hidden[: len(sampled)]) if len(sampled) else hidden[:0], None, prompts

    def _replay(self, arrays: PlanArrays) -> Replayed | None:
        """Runs the model through a graph: what every token's row leaves. None, with nothing done, for a plan that is not for graphs."""
        if self._graphs is None:
            return None
        chunks = arrays.num_decodes < len(arrays.seq)
        if chunks and int(arrays.positions.sum()) > GRAPH_READS:
            return None
        plan = arrays.as_decodes() if chunks and self._graphs.takes(len(arrays.token_ids)) else arrays
        return self._graphs.run(plan) if self._graphs.fits(plan) else None

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

    def _forward(self, plan: PlanArrays, last_rows: NDArray[np.int64], drawn: Tensor | None = None) -> Tensor:
        """``drawn``: the tokens, instead of the plan's."""
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
        if drawn is None:
            drawn = torch.from_numpy(plan.token_ids.astype(np.int64))
        ids = drawn.to(self._device, torch.int64)
        positions = torch.from_numpy(plan.positions.astype(np.int64)).to(self._device)
        hidden: Tensor = self._model(ids, positions, self._pool.tensor, batch)
        return hidden

    def _take(
        self,
        drawn: Sample,
        sampled: NDArray[np.int64],
        draws: Sequence[SequenceDraw],
        prompts: Mapping[int, PromptLogprobs],
    ) -> StepResult:
        if not (prompts or drawn.logprobs or drawn.failed.any()) and len(drawn.tokens) == len(sampled):
            # Nearly every step, and the device idles meanwhile.
            tokens = np.zeros(len(draws), np.int32)
            tokens[sampled] = drawn.tokens
            for index, token in zip(sampled.tolist(), drawn.tokens.tolist(), strict=True):
                draws[index].append(token)
            return StepResult(tokens, None, {}, ())
        result = _unflatten(drawn, sampled, draws, prompts)
        for index in sampled.tolist():
            if index not in result.failed:
                draws[index].append(int(result.tokens[index]))
                for sibling, other in zip(draws[index].siblings, result.siblings.get(index, ()), strict=True):
                    sibling.append(other.token)
        for index, part in result.prompts.items():
            scoring = draws[index].scoring
            assert scoring is not None
            scoring.next += len(part.token_ids)
        return result


def _scored(arrays: PlanArrays, draws: Sequence[SequenceDraw]) -> dict[int, range]:
    """Positions of prompts whose logits are wanted of a plan, by index in it. Raises PlanError if some before them are missing."""
    found: dict[int, range] = {}
    for index, draw in enumerate(draws):
        if draw.scoring is None:
            continue
        end = int(arrays.context[index])
        begin = end - int(arrays.q_start[index + 1] - arrays.q_start[index])
        due = draw.scoring.due(begin, end)
        if due and due.start >= draw.scoring.next:
            raise PlanError(f"position {draw.scoring.next} of a prompt was to be scored and is not computed")
        if due:
            found[index] = due
    return found


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


def _unflatten(
    drawn: Sample,
    sampled: NDArray[np.int64],
    draws: Sequence[SequenceDraw],
    prompts: Mapping[int, PromptLogprobs],
) -> StepResult:
    """Puts flat draws, each sequence's siblings behind it, in their places in the plan."""
    unhealthy = {index for index, part in prompts.items() if not part.finite}
    tokens = np.zeros(len(draws), np.int32)
    entries = drawn.logprobs
    logprobs: list[TokenLogprobs | None] = [None] * len(draws)
    siblings: dict[int, list[Drawn]] = {}
    at = 0
    for index in sampled.tolist():
        end = at + 1 + len(draws[index].siblings)
        if drawn.failed[at:end].any() or index in unhealthy:
            unhealthy.add(index)
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
    if unhealthy:
        log.error("logits_not_finite", sequences=len(unhealthy))
    return StepResult(
        tokens,
        logprobs if entries is not None else None,
        siblings,
        tuple(sorted(unhealthy)),
        {index: part for index, part in prompts.items() if index not in unhealthy},
    )
