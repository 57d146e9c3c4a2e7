# SPDX-License-Identifier: Apache-2.0
"""Plans that touch the paths a first request would otherwise pay for."""

import numpy as np
from numpy.typing import NDArray

from twinpool.engine.sampling import DrawParams
from twinpool.engine.step import PlanArrays, PlanLimits

WARMUP_PARAMS = DrawParams(temperature=1.0, top_p=0.9)
"""Draws through the filters, which the greedy path skips."""


def warmup_plans(limits: PlanLimits, max_batched_tokens: int, max_num_seqs: int) -> list[PlanArrays]:
    """A prefill of one prompt, then decodes of as many sequences as there are blocks for."""
    room = min(limits.num_blocks * limits.block_tokens, limits.max_positions)
    prompt = max(1, min(max_batched_tokens, room))
    sequences = max(1, min(max_num_seqs, limits.num_blocks))
    return [prefill_plan(limits, prompt), decode_plan(limits, sequences)]


def prefill_plan(limits: PlanLimits, tokens: int, cached: int = 0) -> PlanArrays:
    """A chunk of ``tokens`` tokens of one prompt, after ``cached`` ones, in blocks from block 0 on."""
    return _plan(limits, 1, tokens, cached, decode=False)


def decode_plan(limits: PlanLimits, sequences: int, cached: int = 0) -> PlanArrays:
    """A step of ``sequences`` sequences that have ``cached`` tokens each, in blocks of their own from block 0 on."""
    return _plan(limits, sequences, 1, cached, decode=True)


def _plan(limits: PlanLimits, sequences: int, tokens: int, cached: int, *, decode: bool) -> PlanArrays:
    context = cached + tokens
    width = -(-context // limits.block_tokens)
    table: NDArray[np.int32] = np.arange(sequences * width, dtype=np.int32).reshape(sequences, width)
    positions = np.tile(np.arange(cached, context, dtype=np.int32), sequences)
    rows = np.repeat(np.arange(sequences), tokens)
    blocks = table[rows, positions // limits.block_tokens].astype(np.int64)
    return PlanArrays(
        seq=np.arange(sequences, dtype=np.int64),
        # Unlike ones: equal tokens would all go to the same experts.
        token_ids=(np.arange(sequences * tokens) % limits.vocab_size).astype(np.int32),
        positions=positions,
        q_start=np.arange(0, sequences * tokens + 1, tokens, dtype=np.int32),
        context=np.full(sequences, context, np.int32),
        block_table=table,
        slots=blocks * limits.block_tokens + positions % limits.block_tokens,
        sample=np.ones(sequences, np.uint8),
        num_decodes=sequences if decode else 0,
        copies=np.zeros((0, 2), np.int32),
    )
