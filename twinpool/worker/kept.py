# SPDX-License-Identifier: Apache-2.0
"""What is kept of resumable answers for the case that their router is lost: the prompt, the tokens drawn, and the request.

No blocks: those of an attempt that has ended are in the prefix cache, or gone. Each entry stays for the grace of its request,
and all together stay within bounds; the oldest go first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from twinpool import metrics
from twinpool.v1.resume_pb2 import PortableChoice, PortableRequest, PortableState

_ENTRY_BYTES: Final = 1024
_TOKEN_BYTES: Final = 4

Rows = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer that was made here. ``prompt``: int32, as it arrived at its first router. ``rows``: the output of each choice.
    ``deadline`` and ``until`` are on the step loop's clock."""

    request: PortableRequest
    prompt: NDArray[np.int32]
    rows: Rows
    deadline: float | None
    until: float

    @property
    def size_bytes(self) -> int:
        """About what it takes."""
        return _ENTRY_BYTES + self.prompt.nbytes + _TOKEN_BYTES * sum(len(row) for row in self.rows)


class KeptAnswers:
    """Step thread only."""

    def __init__(self, max_answers: int, max_bytes: int, worker: str, clock: Callable[[], float]) -> None:
        self._max_answers = max_answers
        self._max_bytes = max_bytes
        self._worker = worker
        self._clock = clock
        self._by_stream: dict[str, KeptAnswer] = {}
        self._by_key: dict[bytes, str] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._by_stream)

    def keep(
        self, request: PortableRequest, prompt: NDArray[np.int32], rows: Rows, deadline: float | None
    ) -> None:
        """Keeps an answer for its grace from now. What is known of the same stream and is later stays instead."""
        grace = request.grace.ToNanoseconds() / 1e9
        entry = KeptAnswer(request, prompt, rows, deadline, self._clock() + grace)
        before = self._by_stream.get(request.stream_id)
        if before is not None and _progress(before) > _progress(entry):
            return
        self._remove(request.stream_id)
        self._by_stream[request.stream_id] = entry
        if request.key:
            self._by_key[request.key] = request.stream_id
        self._bytes += entry.size_bytes
        while len(self._by_stream) > self._max_answers or (self._by_stream and self._bytes > self._max_bytes):
            self._remove(next(iter(self._by_stream)))
        metrics.WORKER_KEPT_ANSWERS.set(len(self._by_stream))

    def find(self, stream_id: str, key: bytes) -> PortableState | None:
        """By the stream, or by the digest of its idempotency key where ``stream_id`` is empty. It stays kept: who asked may be lost
        as well."""
        now = self._clock()
        self.tick(now)
        entry = self._by_stream.get(stream_id or self._by_key.get(key, ""))
        if entry is None:
            return None
        state = PortableState(
            request=entry.request,
            prompt=entry.prompt.astype("<i4", copy=False).tobytes(),
            choices=[PortableChoice(token_ids=np.array(row, "<i4").tobytes()) for row in entry.rows],
            worker=self._worker,
        )
        if entry.deadline is not None:
            state.deadline.FromNanoseconds(int(max(0.0, entry.deadline - now) * 1e9))
        return state

    def forget(self, stream_id: str) -> None:
        """The answer is over for good."""
        self._remove(stream_id)
        metrics.WORKER_KEPT_ANSWERS.set(len(self._by_stream))

    def tick(self, now: float) -> None:
        """Forgets what has been kept for its grace."""
        # Graces differ, so the order of ends is not that of beginnings; there are few.
        due = [stream for stream, entry in self._by_stream.items() if entry.until <= now]
        for stream in due:
            self.forget(stream)

    def _remove(self, stream_id: str) -> None:
        entry = self._by_stream.pop(stream_id, None)
        if entry is None:
            return
        self._bytes -= entry.size_bytes
        if self._by_key.get(entry.request.key) == stream_id:
            del self._by_key[entry.request.key]


def means(portable: PortableRequest, stream_id: str, key: bytes) -> bool:
    """Whether an answer is the one that is asked for, by its stream or else by its key."""
    return portable.stream_id == stream_id if stream_id else bool(key) and portable.key == key


def told(
    answers: KeptAnswers, stream_id: str, key: bytes, digest: bytes, forget: bool
) -> PortableState | None:
    """What another router hears of an answer that is kept."""
    state = answers.find(stream_id, key)
    if state is not None and forget:
        answers.forget(state.request.stream_id)
    elif state is not None and not stream_id and state.request.digest != digest:
        return PortableState(request=state.request)
    return state


def _progress(entry: KeptAnswer) -> tuple[int, int]:
    return entry.request.moves, sum(len(row) for row in entry.rows)
