# SPDX-License-Identifier: Apache-2.0
"""What another router needs of an attempt that ends here."""

from collections.abc import Sequence

from twinpool.decode_worker.attempt import DecodeAttempt
from twinpool.v1.worker_pb2 import FirstToken
from twinpool.worker.kept import KeptAnswers


def note_ended(attempt: DecodeAttempt, index: int, output: Sequence[int]) -> None:
    """A choice has its last token, and its draw goes."""
    if attempt.work.portable is not None:
        attempt.ended[index] = output


def note_first(attempt: DecodeAttempt, tokens: Sequence[FirstToken]) -> None:
    """First tokens, of which some end their choice."""
    if attempt.work.portable is not None:
        earlier = _earlier(attempt)
        for token in tokens:
            if token.finish:
                attempt.ended[token.index] = [*earlier, token.token_id]


def keep(attempt: DecodeAttempt, answers: KeptAnswers) -> None:
    """Keeps it, if it can be resumed and its router did not say that it is over."""
    work = attempt.work
    if work.portable is None:
        return
    if attempt.forgotten:
        answers.forget(work.portable.stream_id)
        return
    earlier = _earlier(attempt)
    rows: list[Sequence[int]] = [earlier for _ in range(work.draw.n)]
    for token in attempt.unforked:
        rows[token.index] = [*earlier, token.token_id]
    for index, choice in attempt.choices.items():
        rows[index] = choice.draw.outputs
    for index, output in attempt.ended.items():
        rows[index] = output
    asked = len(work.prompt) - work.draw.drawn
    answers.keep(work.portable, work.prompt.tokens[:asked], rows, attempt.deadline)


def _earlier(attempt: DecodeAttempt) -> list[int]:
    """Output that was drawn before this attempt."""
    work = attempt.work
    earlier: list[int] = work.prompt.tokens[len(work.prompt) - work.draw.drawn :].tolist()
    return earlier
