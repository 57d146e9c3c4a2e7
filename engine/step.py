# SPDX-License-Identifier: Apache-2.0
"""What a step takes and gives: the plan's arrays as the runner sees them, the result, and the plan's check."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from twinpool.engine.sampling import PromptLogprobs, TokenLogprobs


class PlanError(ValueError):
    """A step plan that contradicts itself, its draws or the pool. Names what is wrong; nothing was run."""


class Plan(Protocol):
    """The arrays of ``twinpool._core.StepPlan``, which documents them. Every access may make a fresh array."""

    @property
    def seq(self) -> NDArray[np.int64]: ...
    @property
    def token_ids(self) -> NDArray[np.int32]: ...
    @property
    def positions(self) -> NDArray[np.int32]: ...
    @property
    def q_start(self) -> NDArray[np.int32]: ...
    @property
    def context(self) -> NDArray[np.int32]: ...
    @property
    def block_table(self) -> NDArray[np.int32]: ...
    @property
    def slots(self) -> NDArray[np.int64]: ...
    @property
    def sample(self) -> NDArray[np.uint8]: ...
    @property
    def num_decodes(self) -> int: ...
    @property
    def copies(self) -> NDArray[np.int32]: ...


class FollowingPlan(Plan, Protocol):
    """One that was made before the tokens of the plan before it were known (``StepScheduler.plan_ahead``)."""

    @property
    def follows(self) -> NDArray[np.int32]: ...


@dataclass(frozen=True, slots=True)
class PlanArrays:
    """A plan read once. Field by field as in ``twinpool._core.StepPlan``."""

    seq: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    q_start: NDArray[np.int32]
    context: NDArray[np.int32]
    block_table: NDArray[np.int32]
    slots: NDArray[np.int64]
    sample: NDArray[np.uint8]
    num_decodes: int
    copies: NDArray[np.int32]

    @classmethod
    def of(cls, plan: Plan) -> "PlanArrays":
        return cls(
            seq=plan.seq,
            token_ids=plan.token_ids,
            positions=plan.positions,
            q_start=plan.q_start,
            context=plan.context,
            block_table=plan.block_table,
            slots=plan.slots,
            sample=plan.sample,
            num_decodes=plan.num_decodes,
            copies=plan.copies,
        )

    def as_decodes(self) -> "PlanArrays":
        """The same tokens as decodes of one token each, in their order: a layer stores the KV of all of them before any of
        them attends, so each sees what a chunk would have shown it. ``sample`` marks the last one of each sequence that samples.
        """
        counts = np.diff(self.q_start)
        sample = np.zeros(len(self.token_ids), np.uint8)
        sample[self.q_start[1:] - 1] = self.sample
        return PlanArrays(
            seq=np.repeat(self.seq, counts),
            token_ids=self.token_ids,
            positions=self.positions,
            q_start=np.arange(len(self.token_ids) + 1, dtype=np.int32),
            context=self.positions + 1,
            block_table=np.repeat(self.block_table, counts, axis=0),
            slots=self.slots,
            sample=sample,
            num_decodes=len(self.token_ids),
            copies=self.copies,
        )


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one sibling choice drew."""

    token: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step drew, in the plan's order (``n = len(plan.seq)``)."""

    tokens: NDArray[np.int32]
    """``[n]``: 0 where the plan samples nothing or the draw failed. Hand it to ``StepScheduler.advance``."""
    logprobs: list[TokenLogprobs | None] | None
    """``[n]``, or None if no sequence asked for any."""
    siblings: Mapping[int, Sequence[Drawn]]
    """By index in the plan: what the ``siblings`` of that sequence's draw got, in their order."""
    failed: tuple[int, ...]
    """Indices in the plan whose logits were not finite: end these sequences with an error."""
    prompts: Mapping[int, PromptLogprobs] = field(default_factory=dict)
    """By index in the plan: of sequences whose draw scores their prompt, the positions that this step has added. Positions
    follow those of the steps before without a gap, and none comes twice."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What the plan's numbers must lie in."""

    num_blocks: int
    block_tokens: int
    vocab_size: int
    max_positions: int


def check_plan(plan: PlanArrays, limits: PlanLimits) -> None:
    """Raises PlanError if running ``plan`` would read or write what it must not. Vectorised: for debugging and tests."""
    n, total = len(plan.seq), len(plan.token_ids)
    _need(len(plan.q_start) == n + 1, f"q_start has {len(plan.q_start)} entries for {n} sequences")
    lengths = np.diff(plan.q_start)
    _need(n > 0 and plan.q_start[0] == 0 and plan.q_start[-1] == total, "q_start does not span the tokens")
    _need(bool((lengths > 0).all()), "a sequence has no query token")
    _need(bool((lengths[: plan.num_decodes] == 1).all()), "a decode has more than one query token")
    for name, array, want in (
        ("positions", plan.positions, total),
        ("slots", plan.slots, total),
        ("context", plan.context, n),
        ("sample", plan.sample, n),
        ("block_table", plan.block_table, n),
    ):
        _need(len(array) == want, f"{name} has {len(array)} rows, not {want}")
    _need(_within(plan.token_ids, limits.vocab_size), "a token id is outside the vocabulary")
    _need(bool((plan.context >= lengths).all()), "context is shorter than the query")
    _need(
        int(plan.context.max()) <= limits.max_positions, f"context exceeds {limits.max_positions} positions"
    )
    first = np.repeat(plan.context - lengths - plan.q_start[:-1], lengths)
    _need(
        bool((plan.positions == np.arange(total) + first).all()), "positions are not the context's last ones"
    )
    _check_blocks(plan, lengths, limits)


def _check_blocks(plan: PlanArrays, lengths: NDArray[np.int32], limits: PlanLimits) -> None:
    size = limits.block_tokens
    used = -(-plan.context // size)
    _need(int(used.max()) <= plan.block_table.shape[1], "block_table is too narrow for the context")
    inside = np.arange(plan.block_table.shape[1])[None, :] < used[:, None]
    _need(_within(plan.block_table[inside], limits.num_blocks), "block_table names a block outside the pool")
    rows = np.repeat(np.arange(len(plan.seq)), lengths)
    blocks = plan.block_table[rows, plan.positions // size].astype(np.int64)
    _need(
        bool((plan.slots == blocks * size + plan.positions % size).all()),
        "slots do not follow the block table",
    )
    _need(len(np.unique(plan.slots)) == len(plan.slots), "two tokens write one slot")
    _need(bool((plan.sample <= 1).all()), "sample is neither 0 nor 1")
    if len(plan.copies):
        _need(_within(plan.copies, limits.num_blocks), "copies name a block outside the pool")
        source, destination = plan.copies[:, 0], plan.copies[:, 1]
        _need(len(np.unique(destination)) == len(destination), "two copies have one destination")
        _need(not np.isin(source, destination).any(), "a copy reads what another one writes")


def _within(values: NDArray[np.int32], limit: int) -> bool:
    return not len(values) or (int(values.min()) >= 0 and int(values.max()) < limit)


def _need(condition: bool | np.bool_, message: str) -> None:
    if not condition:
        raise PlanError(message)
