# SPDX-License-Identifier: Apache-2.0
"""One question to a worker's replay socket, and its answer."""

from collections.abc import Callable
from typing import Final

import zmq

from twinpool.kv_events import END_SEQUENCE, SNAPSHOT, EventDecodeError, decode, read_sequence, write_sequence
from twinpool.router.index.mirror import Kind, Numbered

MESSAGE_BYTES_MAX: Final = 4 << 20
"""Longest message that is taken. A worker's are below 100 KB."""


ANSWER_BYTES_MAX: Final = 512 << 20
"""Longest answer that is taken: a set of some 16 million blocks, more than a worker can have."""

ANSWER_TIMEOUTS_MAX: Final = 12
"""An answer must be whole after so many times what the next message of it may take."""

MESSAGES_A_TURN: Final = 4096
"""What one worker says must not keep the thread from the others."""


class Resync:
    """A connection of its own, so that a late answer to an earlier question is never taken for this one's."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        kind: Kind,
        start: int,
        timeout_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """``start``: of a replay, the first batch to send. ``timeout_seconds``: longest wait for the next message."""
        self.kind = kind
        self.messages: list[Numbered] = []
        self.done = False
        self.failed = ""
        self._timeout = timeout_seconds
        self._clock = clock
        self.deadline = clock() + timeout_seconds
        self._give_up = clock() + ANSWER_TIMEOUTS_MAX * timeout_seconds
        self._bytes = 0
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IPV6, 1)
        # The answer is bounded by what the worker keeps; a limit here would only lose the rest of it.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        self.socket.connect(f"tcp://{endpoint}")
        request = [b"", SNAPSHOT, b""] if kind == "snapshot" else [b"", write_sequence(start)]
        self.socket.send_multipart(request, zmq.NOBLOCK)

    @property
    def over(self) -> bool:
        """Whether the answer is complete or can't be had."""
        if not self.done and not self.failed and self._clock() >= self.deadline:
            self.failed = "no answer"
        return self.done or bool(self.failed)

    def read(self) -> None:
        """Takes what has come."""
        for _ in range(MESSAGES_A_TURN):
            if self.done or self.failed:
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.deadline = min(self._clock() + self._timeout, self._give_up)
            try:
                self._take(frames)
            except EventDecodeError as error:
                self.failed = str(error)

    def close(self) -> None:
        """Closes the connection."""
        self.socket.close(0)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            raise EventDecodeError(f"an answer has {len(frames)} frames, not 3")
        self._bytes += sum(map(len, frames))
        if self._bytes > ANSWER_BYTES_MAX:
            raise EventDecodeError(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
        if frames[1] == END_SEQUENCE:
            self.done = True
        else:
            self.messages.append((read_sequence(frames[1]), decode(frames[2])))
