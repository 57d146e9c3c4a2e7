# SPDX-License-Identifier: Apache-2.0
"""What a worker may say of an attempt, and when. A router takes no worker's word for more than it can check."""

from collections.abc import Callable
from typing import Final

from google.protobuf.duration_pb2 import Duration

from twinpool.v1 import worker_pb2 as pb

RESERVATION: Final = "a reservation"

SECONDS_MAX: Final = 3600.0
"""Longest time that is learned from: one that is off by more says nothing, and would spoil the means for long."""


def seconds_of(duration: Duration) -> float:
    """A duration of a worker, in seconds, 0..SECONDS_MAX."""
    return min(max(duration.ToNanoseconds() / 1e9, 0.0), SECONDS_MAX)


def fault_in_prefill(message: pb.PrefillDone, prompt_tokens: int, n: int) -> str:
    """What is wrong with it for a prompt of so many tokens and so many choices; "" if nothing is."""
    if sorted(token.index for token in message.first_tokens) != list(range(n)):
        return "prefill did not draw one token for each choice"
    if message.cached_tokens > prompt_tokens:
        return f"prefill found {message.cached_tokens} tokens cached of a prompt of {prompt_tokens}"
    return ""


def fault_in_order(kind: str, right_worker: bool, reserved: bool) -> str:
    """Why a message of this kind may not come now, or not from its worker; "" if it may. ``reserved``: decode has said so."""
    if not right_worker:
        return f"{kind}: the other worker of the attempt said so"
    return "" if reserved or kind == RESERVATION else f"{kind} came before decode had reserved"


class Early:
    """What decode says before prefill is heard of: the two streams are not in step. It is as bounded as what a client may leave
    unread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: list[Callable[[], None]] = []

    def keep(self, apply: Callable[[], None]) -> None:
        """For later; what is beyond the limit is dropped, and missed when it is due."""
        if len(self._kept) < self._limit:
            self._kept.append(apply)

    def apply(self, over: Callable[[], bool]) -> None:
        """It is time; what is left once the attempt is over is dropped."""
        kept, self._kept = self._kept, []
        for apply in kept:
            if not over():
                apply()
