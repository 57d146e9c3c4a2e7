# SPDX-License-Identifier: Apache-2.0
"""Drawn tokens as they stand on the wire."""

from collections.abc import Iterator
from typing import Final

from twinpool.engine.sampling import Finish, PromptLogprobs, TokenLogprobs
from twinpool.transfer.base import AttemptKey
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.inference_pb2 import FinishReason, PositionLogprobs, TokenLogprob

POSITIONS_A_MESSAGE: Final = 256
"""Most positions of a prompt that one message tells of: with all alternatives some 70 KB."""

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


def scored_messages(key: AttemptKey, part: PromptLogprobs) -> Iterator[pb.SessionResponse]:
    """Positions of a prompt as messages of at most ``POSITIONS_A_MESSAGE``."""
    for begin in range(0, len(part.token_ids), POSITIONS_A_MESSAGE):
        rows = slice(begin, begin + POSITIONS_A_MESSAGE)
        response = pb.SessionResponse()
        scored = response.prompt_scored
        scored.id.CopyFrom(key.message())
        scored.logprobs.offset = part.first + begin
        for token, logprob, top, values in zip(
            part.token_ids[rows].tolist(),
            part.logprobs[rows].tolist(),
            part.top_ids[rows].tolist(),
            part.top_logprobs[rows].tolist(),
            strict=True,
        ):
            position = scored.logprobs.positions.add()
            position.chosen.token_id, position.chosen.logprob = token, logprob
            for token_id, value in zip(top, values, strict=True):
                # Field by field: building nested messages from keywords takes three times as long.
                entry = position.top.add()
                entry.token_id, entry.logprob = token_id, value
        yield response
