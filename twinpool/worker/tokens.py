# SPDX-License-Identifier: Apache-2.0
"""Drawn tokens as they stand on the wire."""

from twinpool.engine.sampling import Finish, TokenLogprobs
from twinpool.v1.inference_pb2 import FinishReason, PositionLogprobs, TokenLogprob

_FINISH = {
    None: FinishReason.FINISH_REASON_UNSPECIFIED,
    Finish.STOP: FinishReason.FINISH_REASON_STOP,
    Finish.LENGTH: FinishReason.FINISH_REASON_LENGTH,
}


def finish_reason(finish: Finish | None) -> FinishReason.ValueType:
    """The wire form; None is UNSPECIFIED: the choice goes on."""
    return _FINISH[finish]


def position_logprobs(entry: TokenLogprobs) -> PositionLogprobs:
    """The wire form of one position's log-probabilities."""
    return PositionLogprobs(
        chosen=TokenLogprob(token_id=entry.token_id, logprob=entry.logprob),
        top=[
            TokenLogprob(token_id=token, logprob=logprob)
            for token, logprob in zip(entry.top_ids.tolist(), entry.top_logprobs.tolist(), strict=True)
        ],
    )
