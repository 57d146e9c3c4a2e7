# SPDX-License-Identifier: Apache-2.0
"""From drawn tokens to what the client reads: text, stop strings, log-probabilities, offsets.

Tokens are only appended to lists as they arrive. Text is made when the client can take a message, for all tokens that
wait by then: the first one at once, later ones in as few messages as the client's pace allows. What may wait is bounded.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from twinpool.errors import TwinpoolError
from twinpool.text import TextStream, UnknownTokenError
from twinpool.v1 import inference_pb2 as pb

# A client that was slow for long gets what has gathered in messages of a size that every client takes.
MAX_TOKENS_A_MESSAGE: Final = 1024

# About a block: a call of the core for each token would cost more than it tells.
TOKENS_A_REPORT: Final = 32

# As wide as the ids of an answer are kept.
TOKEN_ID_MAX: Final = (1 << 31) - 1

_FINISHES: Final = frozenset(pb.FinishReason.values())
_RUNNING = pb.FINISH_REASON_UNSPECIFIED
_STOP = pb.FINISH_REASON_STOP


@dataclass(frozen=True, slots=True)
class AnswerSpec:
    """What an answer needs to know of its request."""

    n: int
    logprobs: bool
    max_buffered_tokens: int


class Choice:
    """One choice: what arrived, what was sent, how it ended."""

    __slots__ = (
        "_ids",
        "_logprobs",
        "_text",
        "_worker_finish",
        "finish",
        "index",
        "output",
        "received",
        "stop_string",
        "stop_token_id",
    )

    def __init__(self, index: int, text: TextStream) -> None:
        self.index = index
        self.received = 0
        # What was sent, four bytes a token: the answer may have to go on from it.
        self.output = array("i")
        self.finish: pb.FinishReason.ValueType = _RUNNING
        self.stop_string: str | None = None
        self.stop_token_id: int | None = None
        self._text = text
        self._ids: list[int] = []
        self._logprobs: list[pb.PositionLogprobs] = []
        self._worker_finish: pb.FinishReason.ValueType = _RUNNING

    @property
    def sent(self) -> int:
        """Tokens that were sent."""
        return len(self.output)

    @property
    def drawn(self) -> bool:
        """Whether the workers have drawn its last token."""
        return self._worker_finish != _RUNNING or self.finish != _RUNNING

    @property
    def exhausted(self) -> bool:
        """Whether the decode worker has ended it by itself."""
        return self._worker_finish != _RUNNING

    def push(
        self,
        token_id: int,
        offset: int,
        finish: pb.FinishReason.ValueType,
        logprobs: pb.PositionLogprobs | None,
    ) -> bool:
        """Takes a token. False if it is one too many (a repeat, or one after the end); raises INTERNAL for a gap, WORKER_LOST
        if an answer that is drawn again is another one."""
        if self.drawn or offset < self.received:
            if offset < self.sent and token_id != self.output[offset]:
                raise TwinpoolError(
                    "WORKER_LOST", f"choice {self.index} was drawn again and parted at token {offset}"
                )
            # A choice that ended at a stop string is drawn on by the worker, until it is told or ends by itself.
            self._worker_finish = self._worker_finish or finish
            return False
        if offset > self.received:
            raise TwinpoolError(
                "INTERNAL", f"choice {self.index}: token {offset} came where {self.received} was due"
            )
        self.received += 1
        self._ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self._worker_finish = finish
        return True

    def drop(self) -> None:
        """Forgets what was not taken: the answer has failed, or goes on behind what was."""
        self._ids.clear()
        self._logprobs.clear()
        self.received = self.sent
        self._worker_finish = _RUNNING

    def take(self, out: list[pb.GenerateResponse]) -> None:
        """Puts what waits into ``out``, as a rule as one message. Sets ``finish`` if the choice ends here.

        Raises DETOKENIZE_FAILED if a token has no text.
        """
        while self._ids and self.finish == _RUNNING:
            ids, logprobs = self._ids[:MAX_TOKENS_A_MESSAGE], self._logprobs[:MAX_TOKENS_A_MESSAGE]
            del self._ids[:MAX_TOKENS_A_MESSAGE], self._logprobs[:MAX_TOKENS_A_MESSAGE]
            try:
                used, text = self._decode(ids)
            except UnknownTokenError as error:
                raise TwinpoolError("DETOKENIZE_FAILED", f"choice {self.index}: {error}") from error
            if used < len(ids):
                del ids[used:], logprobs[used:]
            # Field by field: building nested messages from keywords takes three times as long.
            response = pb.GenerateResponse()
            message = response.tokens
            message.index = self.index
            message.offset = self.sent
            message.token_ids.extend(ids)
            message.text = text
            if logprobs:
                message.logprobs.extend(logprobs)
            out.append(response)
            self.output.extend(ids)

    def _decode(self, ids: list[int]) -> tuple[int, str]:
        """How many of ``ids`` belong to the answer, and their text."""
        final = _RUNNING if self._ids else self._worker_finish
        # The token that stops a choice is counted and returned, but is no part of the text.
        delta = self._text.push(ids[:-1] if final == _STOP else ids)
        if delta.stop is None and final == _RUNNING:
            return len(ids), delta.text
        used, text = delta.tokens, delta.text
        if delta.stop is None:
            delta = self._text.finish()
            used, text = len(ids), text + delta.text
        if delta.stop is not None:
            self.finish, self.stop_string = _STOP, delta.stop.value
        else:
            self.finish = final
            self.stop_token_id = ids[-1] if final == _STOP else None
        return used, text

    def summary(self) -> pb.ChoiceFinish:
        """How it ended."""
        return pb.ChoiceFinish(
            index=self.index,
            reason=self.finish,
            stop_string=self.stop_string,
            stop_token_id=self.stop_token_id,
        )


class Answer:
    """All choices of one request."""

    def __init__(self, spec: AnswerSpec, text: Callable[[], TextStream]) -> None:
        self._spec = spec
        self.choices = [Choice(index, text()) for index in range(spec.n)]
        self._buffered = 0
        self._told = 0

    def push(
        self,
        index: int,
        token_id: int,
        offset: int,
        finish: pb.FinishReason.ValueType,
        logprobs: pb.PositionLogprobs | None,
    ) -> None:
        """Takes a token. Raises INTERNAL for what no worker may send, CLIENT_TOO_SLOW if too much waits."""
        if index >= len(self.choices):
            raise TwinpoolError("INTERNAL", f"a token came for choice {index} of {len(self.choices)}")
        if token_id > TOKEN_ID_MAX or finish not in _FINISHES:
            raise TwinpoolError("INTERNAL", f"choice {index}: token {token_id} came with finish {finish}")
        if not self._spec.logprobs:
            logprobs = None
        elif logprobs is None:
            raise TwinpoolError("INTERNAL", f"choice {index}: token {offset} came without log-probabilities")
        if self.choices[index].push(token_id, offset, finish, logprobs):
            self._buffered += 1
            if self._buffered > self._spec.max_buffered_tokens:
                raise TwinpoolError(
                    "CLIENT_TOO_SLOW",
                    f"{self._buffered} tokens wait to be read; the limit is {self._spec.max_buffered_tokens}",
                    metadata={"limit": self._spec.max_buffered_tokens},
                )

    def take(self) -> list[pb.GenerateResponse]:
        """Everything that waits, as a rule one message a choice."""
        self._buffered = 0
        out: list[pb.GenerateResponse] = []
        for choice in self.choices:
            choice.take(out)
        return out

    def drop(self) -> None:
        """Forgets what waits."""
        self._buffered = 0
        for choice in self.choices:
            choice.drop()

    def replay(
        self,
        index: int,
        token_ids: list[int],
        finish: pb.FinishReason.ValueType,
        logprobs: list[pb.PositionLogprobs],
    ) -> list[pb.GenerateResponse]:
        """Takes what was drawn of a choice before this answer was made, and returns its messages. ``finish``: of the last
        token; ``logprobs``: one a token, or none."""
        choice, last = self.choices[index], len(token_ids) - 1
        for offset, token_id in enumerate(token_ids):
            entry = logprobs[offset] if logprobs else None
            choice.push(token_id, offset, finish if offset == last else _RUNNING, entry)
        out: list[pb.GenerateResponse] = []
        choice.take(out)
        # A worker that draws it again ends it again.
        choice.drop()
        self._told = self.completion_tokens
        return out

    @property
    def drawn(self) -> bool:
        """Whether the workers have drawn every choice's last token."""
        # A list, here and below: with one choice, as a rule, a generator would cost more than the work in it.
        return all([choice.drawn for choice in self.choices])

    @property
    def exhausted(self) -> bool:
        """Whether the workers have ended every choice by themselves: nothing is left to stop."""
        return all([choice.exhausted for choice in self.choices])

    @property
    def finished(self) -> bool:
        """Whether every choice has ended and all of it was taken."""
        return all([choice.finish for choice in self.choices])

    @property
    def outputs(self) -> "list[array[int]]":
        """The tokens that the client has or will be sent next, a row a choice."""
        return [choice.output for choice in self.choices]

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer, over all choices."""
        return sum([choice.sent for choice in self.choices])

    def untold(self, at_least: int) -> int:
        """Tokens since the last call that was given any; 0 if they are fewer than ``at_least``."""
        new = self.completion_tokens - self._told
        if new < at_least:
            return 0
        self._told += new
        return new

    def summaries(self) -> list[pb.ChoiceFinish]:
        """How each choice ended."""
        return [choice.summary() for choice in self.choices]
