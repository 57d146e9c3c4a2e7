# SPDX-License-Identifier: Apache-2.0
"""Sampling: how the next token of each sequence is drawn from its logits."""

from twinpool.engine.sampling.draw import SequenceDraw
from twinpool.engine.sampling.grammar import GrammarError, Grammars, GrammarState, Masks
from twinpool.engine.sampling.logprobs import TokenLogprobs
from twinpool.engine.sampling.params import MAX_LOGPROBS, DrawParams, DrawParamsError, Finish
from twinpool.engine.sampling.sampler import Sample, sample
from twinpool.engine.sampling.scoring import PromptLogprobs, PromptScoring

__all__ = [
    "MAX_LOGPROBS",
    "DrawParams",
    "DrawParamsError",
    "Finish",
    "GrammarError",
    "GrammarState",
    "Grammars",
    "Masks",
    "PromptLogprobs",
    "PromptScoring",
    "Sample",
    "SequenceDraw",
    "TokenLogprobs",
    "sample",
]
