# SPDX-License-Identifier: Apache-2.0
"""From the events of an answer to those of a turn, for one client."""

from collections.abc import Awaitable, Callable, Sequence

from twinpool.errors import TwinpoolError
from twinpool.router.chat.turn import TextBefore, Turn, nothing_before
from twinpool.router.request import Prepared
from twinpool.text.calls import Format, Thinking, find_format
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb


class TurnStream:
    """Once ``open``, takes the answer's events by ``write``. ``positions``: what the client has."""

    def __init__(
        self,
        write: Callable[[chat.ChatResponse], Awaitable[None]],
        positions: Sequence[chat.ChatPosition] = (),
    ) -> None:
        self._write = write
        self._positions = positions
        self._turn: Turn | None = None

    @property
    def next_index(self) -> list[int]:
        """For each choice, how many tokens the client was told of as a whole."""
        return [position.next_index for position in self._positions]

    def open(self, prepared: Prepared, before: TextBefore = nothing_before) -> None:
        """``write`` takes the answer of ``prepared`` from ``next_index`` on; ``before`` is its text up to there. Raises INVALID_RESUME
        if it is no turn of a conversation."""
        form, portable = prepared.turn, prepared.portable
        if form is None:
            raise TwinpoolError(
                "INVALID_RESUME",
                "token is of no turn of a conversation: InferenceService.Resume goes on with it",
                field="token",
            )
        ids = prepared.request_id.encode()
        if portable is not None:
            # The same wherever it goes; under a key also if it is made anew.
            ids = portable.key + portable.digest or portable.stream_id.encode()
        self._turn = Turn(
            prepared.n,
            _format(form.call_format),
            Thinking(open=form.reasoning_open) if form.reasons else None,
            opening=form.opening,
            single_call=form.single_call,
            ids=ids,
            resumable=portable is not None,
            had=self._positions,
            before=before,
        )

    async def write(self, event: pb.GenerateResponse) -> None:
        """Tells of an event of the answer. Raises INVALID_RESUME if what the client has is of another turn."""
        assert self._turn is not None
        for response in self._turn.responses(event):
            await self._write(response)


def _format(name: str) -> Format | None:
    try:
        return find_format(name) if name else None
    except KeyError:
        raise TwinpoolError(
            "RESUME_UNREACHABLE", "this router does not know the format of the turn's calls", retry_after=0.5
        ) from None
