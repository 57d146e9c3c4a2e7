# SPDX-License-Identifier: Apache-2.0
"""The attempts that a worker works on: found by id, by session, by deadline."""

import heapq
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from twinpool.transfer.base import AttemptKey


class AttemptLike(Protocol):
    """What the table needs to know of an attempt. ``deadline`` is on the step loop's clock; None: never."""

    @property
    def key(self) -> AttemptKey: ...
    @property
    def session(self) -> int: ...
    @property
    def deadline(self) -> float | None: ...


A = TypeVar("A", bound=AttemptLike)


class AttemptTable(Generic[A]):
    """One entry an attempt. Not thread-safe: the step thread's own."""

    def __init__(self) -> None:
        self._by_key: dict[AttemptKey, A] = {}
        self._by_session: dict[int, dict[AttemptKey, A]] = {}
        # Entries of ended attempts stay until they surface: removing from a heap's middle costs more.
        self._deadlines: list[tuple[float, AttemptKey]] = []

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[A]:
        """Over a copy: the caller may end attempts while it iterates."""
        return iter(list(self._by_key.values()))

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._by_key

    def get(self, key: AttemptKey) -> A | None:
        """The attempt, or None if it is not (any more) here."""
        return self._by_key.get(key)

    def add(self, attempt: A) -> None:
        """Raises KeyError if one of this key is here: the caller has to refuse it before."""
        if attempt.key in self._by_key:
            raise KeyError(f"attempt {attempt.key} is in the table")
        self._by_key[attempt.key] = attempt
        self._by_session.setdefault(attempt.session, {})[attempt.key] = attempt
        if attempt.deadline is not None:
            heapq.heappush(self._deadlines, (attempt.deadline, attempt.key))

    def pop(self, key: AttemptKey) -> A | None:
        """Takes an attempt out; None if it is not here."""
        attempt = self._by_key.pop(key, None)
        if attempt is None:
            return None
        mates = self._by_session[attempt.session]
        del mates[key]
        if not mates:
            del self._by_session[attempt.session]
        return attempt

    def of_session(self, session: int) -> list[A]:
        """What this session started and has not ended."""
        return list(self._by_session.get(session, {}).values())

    def expired(self, now: float) -> list[A]:
        """Attempts whose deadline has passed, each once: the caller ends them."""
        found: list[A] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            found.append(self._by_key[heapq.heappop(self._deadlines)[1]])
        return found

    def next_deadline(self) -> float | None:
        """The earliest deadline of an attempt that is here."""
        while self._deadlines:
            deadline, key = self._deadlines[0]
            attempt = self._by_key.get(key)
            if attempt is not None and attempt.deadline == deadline:
                return deadline
            heapq.heappop(self._deadlines)
        return None
