# SPDX-License-Identifier: Apache-2.0
"""The log-probabilities of a prompt on their way to the client.

They are passed on as a worker computes them, so a long prompt takes no more memory here than its client leaves unread. Each
position goes to the client once, whatever the attempts: one that is placed anew computes the prompt from its beginning, and what
its client has is dropped. An answer that goes on behind tokens has no part in this: who has tokens has these.
"""

from math import isfinite

from twinpool.errors import TwinpoolError
from twinpool.router.request import Prepared
from twinpool.v1 import inference_pb2 as pb


class PromptScores:
    """Of one request. ``hear`` takes what the present attempt's worker says, ``take`` what the client is to get next."""

    def __init__(self, max_buffered: int) -> None:
        """``max_buffered``: most positions that may wait for the client."""
        self._max_buffered = max_buffered
        self._prompt: list[int] = []
        self._alternatives = 0
        self._vocab = 0
        # The position that is due next: from the worker, and to the client, who also hears of the first token.
        self._heard = 1
        self._told = 0
        self._buffered = 0
        self._waiting: list[pb.GenerateResponse] = []

    def begin(self, prepared: Prepared) -> None:
        """A new attempt starts, of which nothing was heard."""
        wanted = prepared.prompt_logprobs
        self._prompt = prepared.tokens.tolist() if wanted is not None else []
        self._vocab = prepared.group.vocab_size
        self._alternatives = min(wanted or 0, self._vocab)
        self._heard = 1
        if len(self._prompt) == 1:
            self._tell(pb.PromptLogprobs(offset=1))

    def hear(self, part: pb.PromptLogprobs) -> TwinpoolError | None:
        """Takes what the worker says of the positions that are due. Returns what is wrong: INTERNAL for what no worker may
        say, CLIENT_TOO_SLOW if too much waits."""
        fault = self._fault_in(part)
        if fault:
            return TwinpoolError("INTERNAL", fault)
        self._heard += len(part.positions)
        self._tell(part)
        if self._buffered <= self._max_buffered:
            return None
        return TwinpoolError(
            "CLIENT_TOO_SLOW",
            f"{self._buffered} positions of the prompt wait to be read; the limit is {self._max_buffered}",
            metadata={"limit": self._max_buffered},
        )

    def missing(self) -> str:
        """What prefill has left out, now that it is done; "" if nothing."""
        if self._heard >= len(self._prompt):
            return ""
        return (
            f"prefill is done, and {len(self._prompt) - self._heard} positions of the prompt were not scored"
        )

    def take(self) -> list[pb.GenerateResponse]:
        """All that waits for the client."""
        taken, self._waiting, self._buffered = self._waiting, [], 0
        return taken

    def _fault_in(self, part: pb.PromptLogprobs) -> str:
        count, due = len(part.positions), self._heard
        if part.offset != due or not 1 <= count <= len(self._prompt) - due:
            return f"{count} positions of the prompt came from {part.offset} on where {due} was due of {len(self._prompt)}"
        for at, position in enumerate(part.positions, due):
            tokens = (position.chosen, *position.top)
            if position.chosen.token_id != self._prompt[at] or len(position.top) != self._alternatives:
                return f"position {at} of the prompt came with another token, or {len(position.top)} alternatives"
            if not all([isfinite(token.logprob) and token.token_id < self._vocab for token in tokens]):
                return f"position {at} of the prompt came with what is no log-probability of a token"
        return ""

    def _tell(self, part: pb.PromptLogprobs) -> None:
        """Puts what the client has not heard of yet in the line."""
        end = part.offset + len(part.positions)
        if end <= self._told:
            return
        response = pb.GenerateResponse()
        told = response.prompt_logprobs
        told.offset = max(part.offset, self._told)
        told.positions.extend(part.positions[told.offset - part.offset :])
        if told.offset == 1:
            told.first_token_id = self._prompt[0]
        self._told = end
        self._buffered += len(told.positions)
        self._waiting.append(response)
