# SPDX-License-Identifier: Apache-2.0
"""The first token of each choice, drawn from the same logits by whoever computes the prompt."""

from twinpool.engine.runner import StepResult
from twinpool.engine.sampling import PromptScoring, SequenceDraw, TokenLogprobs
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.commands import Draw, Prompt
from twinpool.worker.tokens import finish_reason, position_logprobs


def first_draw(draw: Draw, prompt: Prompt) -> SequenceDraw:
    """The first choice's draw, with those of the other choices as its siblings, and the prompt's scoring if it is asked for."""
    siblings = tuple(draw.sequence(prompt, choice=index) for index in range(1, draw.n))
    own = draw.sequence(prompt, siblings=siblings)
    if draw.params.prompt_logprobs is not None:
        own.scoring = PromptScoring(prompt.tokens, draw.params.prompt_logprobs)
    return own


def first_tokens(draw: SequenceDraw, result: StepResult, index: int) -> list[pb.FirstToken]:
    """What was drawn, once the step has computed the prompt's last token as its entry ``index``."""
    own = result.logprobs[index] if result.logprobs is not None else None
    entries = [own, *(drawn.logprobs for drawn in result.siblings.get(index, ()))]
    return [
        _token(choice, drawn, entry)
        for choice, (drawn, entry) in enumerate(zip((draw, *draw.siblings), entries, strict=True))
    ]


def _token(index: int, draw: SequenceDraw, logprobs: TokenLogprobs | None) -> pb.FirstToken:
    token = pb.FirstToken(index=index, token_id=draw.outputs[-1], finish=finish_reason(draw.finish()))
    if logprobs is not None:
        token.logprobs.CopyFrom(position_logprobs(logprobs))
    return token
