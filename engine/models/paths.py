# SPDX-License-Identifier: Apache-2.0
"""Which form of latent attention a prefill takes."""

from typing import Literal

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.config import MlaConfig

PrefillPath = Literal["auto", "absorbed", "expanded"]
"""``auto`` takes the form with fewer multiplications; both give the same result up to rounding."""


def expand_is_cheaper(batch: AttentionBatch, mla: MlaConfig) -> bool:
    """Whether the batch's queries cost fewer multiplications with expanded keys and values.

    A pair of query and key costs ``width + latent`` absorbed and ``qk + v`` expanded, some three times less; but
    expansion is paid for each token of the context, absorption only for each query. So fresh prompts expand, and
    short chunks over a long cached prefix do not.
    """
    return batch.derived("expand_is_cheaper", lambda: _compare(batch, mla))


def _compare(batch: AttentionBatch, mla: MlaConfig) -> bool:
    latent, rope = mla.kv_lora_rank, mla.qk_rope_head_dim
    absorbed_pair = latent + rope + latent
    expanded_pair = mla.qk_head_dim + mla.v_head_dim
    projection = latent * (mla.qk_nope_head_dim + mla.v_head_dim)
    absorbed = expanded = 0.0
    for index in range(batch.num_sequences):
        queries = int(batch.host_q_start[index + 1] - batch.host_q_start[index])
        context = int(batch.host_context[index])
        pairs = queries * (context - (queries - 1) / 2)
        absorbed += pairs * absorbed_pair + queries * projection
        expanded += pairs * expanded_pair + context * projection
    return expanded < absorbed
