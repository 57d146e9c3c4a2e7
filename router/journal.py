# SPDX-License-Identifier: Apache-2.0
"""What is kept of an answer that can be resumed: every token of it, its text, and how it ended.

The request writes into it as into a client's stream; a reader takes it from any position on, as often as wanted. There is
one reader at a time: the newest ends the one before. A token takes some 20 to 40 bytes with its text.
"""

import asyncio
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from twinpool.errors import TwinpoolError
from twinpool.router.stream import MAX_TOKENS_A_MESSAGE
from twinpool.text import TextStream
from twinpool.v1 import inference_pb2 as pb

_TOKEN_BYTES: Final = 4
_MARK_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class JournalSpec:
    """``text`` makes the text side of a choice. ``token``: what a client resumes with. ``max_ahead_tokens``: how far the answer
    may be ahead of its reader, who may have gone. ``logprobs``: whether each token has an entry. ``scored_tokens``: length of the
    prompt, if its log-probabilities come before the tokens; else 0."""

    n: int
    logprobs: bool
    text: Callable[[], TextStream]
    token: bytes
    max_ahead_tokens: int
    scored_tokens: int = 0


class _Choice:
    """Tokens and text of one choice. A mark is a position at which the length of the text is known."""

    __slots__ = ("_mark_bytes", "_mark_tokens", "_text", "logprobs", "logprobs_from", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        # Of an answer that came from a lost router, those of its first tokens may be unknown.
        self.logprobs: list[pb.PositionLogprobs] = []
        self.logprobs_from = 0
        self._text = bytearray()
        self._mark_tokens = array("q", [0])
        self._mark_bytes = array("q", [0])

    def append(self, message: pb.GenerateTokens) -> int:
        """Takes a message; how many bytes it takes here."""
        if message.offset != len(self.tokens):
            raise TwinpoolError(
                "INTERNAL", f"choice {message.index}: token {message.offset} where {len(self.tokens)} was due"
            )
        text = message.text.encode()
        self.tokens.extend(message.token_ids)
        self.logprobs.extend(message.logprobs)
        if not message.logprobs and not self.logprobs:
            self.logprobs_from = len(self.tokens)
        self._text += text
        self._mark_tokens.append(len(self.tokens))
        self._mark_bytes.append(len(self._text))
        size = len(message.token_ids) * _TOKEN_BYTES + len(text) + _MARK_BYTES
        return size + sum([entry.ByteSize() for entry in message.logprobs])

    def message(self, index: int, at: int, text: Callable[[], TextStream]) -> pb.GenerateResponse:
        """As many of the tokens from ``at`` on as one message takes."""
        response = pb.GenerateResponse()
        tokens = response.tokens
        last = max(
            bisect_right(self._mark_tokens, at + MAX_TOKENS_A_MESSAGE) - 1,
            bisect_right(self._mark_tokens, at),
        )
        end = self._mark_tokens[last]
        tokens.index, tokens.offset = index, at
        tokens.token_ids.extend(self.tokens[at:end])
        tokens.text = self._text[self._settled(at, text) : self._mark_bytes[last]].decode()
        if self.logprobs:
            tokens.logprobs.extend(self.logprobs[at - self.logprobs_from : end - self.logprobs_from])
        return response

    def text_before(self, at: int, text: Callable[[], TextStream]) -> str:
        """What the tokens before ``at`` have settled of the text."""
        return self._text[: self._settled(min(at, len(self.tokens)), text)].decode()

    def _settled(self, at: int, text: Callable[[], TextStream]) -> int:
        """Bytes of the text that the first ``at`` tokens have settled."""
        mark = bisect_left(self._mark_tokens, at)
        if self._mark_tokens[mark] == at:
            return self._mark_bytes[mark]
        # In the middle of a message: what tokens settle does not depend on how they were pushed.
        return len(text().push(self.tokens[:at]).text.encode())


class Journal:
    """One answer. Written by its request, read by at most one ``Reader`` at a time; all on the event loop."""

    def __init__(self, spec: JournalSpec, on_grow: Callable[[int], None] = lambda size: None) -> None:
        """``on_grow`` is told of the bytes that were added."""
        self._spec = spec
        self._on_grow = on_grow
        self._choices = [_Choice() for _ in range(spec.n)]
        self._prompt: list[pb.GenerateResponse] = []
        self._scored = 0
        self._reader: Reader | None = None
        # How far the newest reader is, or the last one was.
        self._read = [0] * spec.n
        self.size_bytes = 0
        self.started: pb.GenerateStarted | None = None
        self.finished: pb.GenerateFinished | None = None
        self.error: TwinpoolError | None = None

    # --- the request's side ---------------------------------------------------------------

    async def write(self, message: pb.GenerateResponse) -> None:
        """Takes an event of the request. Raises CLIENT_TOO_SLOW if too much waits for a reader."""
        self.put(message)
        ahead = sum(
            max(0, len(choice.tokens) - at) for choice, at in zip(self._choices, self._read, strict=True)
        )
        if ahead > self._spec.max_ahead_tokens:
            raise TwinpoolError(
                "CLIENT_TOO_SLOW",
                f"{ahead} tokens wait to be read; the limit is {self._spec.max_ahead_tokens}",
                metadata={"limit": self._spec.max_ahead_tokens},
            )

    def put(self, message: pb.GenerateResponse) -> None:
        """As ``write``, for what was drawn before."""
        kind = message.WhichOneof("event")
        if kind == "tokens":
            self._grew(self._choices[message.tokens.index].append(message.tokens))
        elif kind == "prompt_logprobs":
            part = message.prompt_logprobs
            self._prompt.append(message)
            self._scored = part.offset + len(part.positions)
            self._grew(message.ByteSize())
        elif kind == "started":
            self.started = message.started
            self.started.resume_token = self._spec.token
        else:
            self.finished = message.finished
        self._wake()

    def fail(self, error: TwinpoolError) -> None:
        """The request has ended otherwise than well. Only the first end counts."""
        if not self.ended:
            self.error = error
        self._wake()

    @property
    def ended(self) -> bool:
        """Whether nothing will be added any more."""
        return self.finished is not None or self.error is not None

    @property
    def outputs(self) -> "list[array[int]]":
        """All tokens, a row a choice."""
        return [choice.tokens for choice in self._choices]

    @property
    def logprobs(self) -> list[Sequence[pb.PositionLogprobs]]:
        """One entry a token, a row a choice; an empty row where they are not known from the first token on."""
        return [() if choice.logprobs_from else choice.logprobs for choice in self._choices]

    def text_before(self, index: int, at: int) -> str:
        """What the tokens of a choice before position ``at`` have settled of its text; all of it where there are fewer."""
        return self._choices[index].text_before(at, self._spec.text)

    @property
    def whole(self) -> bool:
        """Whether it can be read from its beginning on."""
        known = not self._spec.logprobs or not any(choice.logprobs_from for choice in self._choices)
        return known and not self._prompt_lost

    @property
    def _prompt_lost(self) -> bool:
        """Of an answer that came from another router, those of the prompt are unknown: its client had tokens, and so has them."""
        return self._scored < self._spec.scored_tokens and any(choice.tokens for choice in self._choices)

    # --- the reader's side ----------------------------------------------------------------

    def attach(self, next_index: Sequence[int]) -> "Reader":
        """A reader from these positions on. Raises RESUME_LOST if log-probabilities from there on are not known."""
        positions = [*next_index, *[0] * self._spec.n][: self._spec.n]
        for index, (choice, at) in enumerate(zip(self._choices, positions, strict=True)):
            if self._spec.logprobs and at < choice.logprobs_from:
                raise TwinpoolError(
                    "RESUME_LOST",
                    f"log-probabilities of choice {index} are known from token {choice.logprobs_from} on,"
                    f" not from {at}",
                )
        if not any(positions) and self._prompt_lost:
            raise TwinpoolError("RESUME_LOST", "log-probabilities of the prompt are not known here any more")
        if self._reader is not None:
            self._reader.end(TwinpoolError("STREAM_SUPERSEDED"))
        self._read = positions
        self._reader = Reader(self, positions)
        return self._reader

    def detach(self, reader: "Reader") -> bool:
        """The reader's client is gone. Whether nobody reads now; False if another one has taken its place."""
        if self._reader is not reader:
            return False
        self._reader = None
        return True

    @property
    def attached(self) -> bool:
        """Whether somebody reads."""
        return self._reader is not None

    def send_away(self, error: TwinpoolError) -> None:
        """Ends the reader, and leaves the answer as it is."""
        if self._reader is not None:
            self._reader.end(error)

    def scores(self, at: int) -> list[pb.GenerateResponse]:
        """The message at this place among those about the prompt; none if it has not come."""
        return self._prompt[at : at + 1]

    def pending(self, positions: list[int]) -> list[pb.GenerateResponse]:
        """The next messages from ``positions`` on, at most one a choice; moves the positions behind them."""
        out = []
        for index, choice in enumerate(self._choices):
            if positions[index] < len(choice.tokens):
                out.append(choice.message(index, positions[index], self._spec.text))
                positions[index] += len(out[-1].tokens.token_ids)
        return out

    def _grew(self, size: int) -> None:
        self.size_bytes += size
        self._on_grow(size)

    def _wake(self) -> None:
        if self._reader is not None:
            self._reader.wake()


class Reader:
    """Reads a journal for one client."""

    def __init__(self, journal: Journal, positions: list[int]) -> None:
        self._journal = journal
        self._positions = positions
        # Who has tokens has all that is known of the prompt.
        self._prompt_read = None if any(positions) else 0
        self._ready = asyncio.Event()
        self._ended: TwinpoolError | None = None
        self.wake = self._ready.set
        self.wake()

    def end(self, error: TwinpoolError) -> None:
        """This reader gets no more."""
        self._ended = error
        self.wake()

    def _next(self) -> list[pb.GenerateResponse]:
        if self._prompt_read is not None and (scores := self._journal.scores(self._prompt_read)):
            self._prompt_read += 1
            return scores
        return self._journal.pending(self._positions)

    async def events(self) -> AsyncIterator[pb.GenerateResponse]:
        """``started``, what is known of the prompt to who has no token, the tokens from its positions on, ``finished``.
        Raises what ended the answer, or this reader."""
        journal, told = self._journal, False
        while True:
            await self._ready.wait()
            self._ready.clear()
            if journal.started is not None and not told:
                told = True
                yield pb.GenerateResponse(started=journal.started)
            while told and self._ended is None and (messages := self._next()):
                for message in messages:
                    yield message
            if self._ended is not None:
                raise self._ended
            if journal.error is not None:
                raise journal.error
            if journal.finished is not None and told:
                yield pb.GenerateResponse(finished=journal.finished)
                return
