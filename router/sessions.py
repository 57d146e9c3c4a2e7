# SPDX-License-Identifier: Apache-2.0
"""Where the last turn of each session ran, so that the next one is placed there if other workers are no better.

A wish, not a rule: placement prefers these workers among those that cost about the same, so load, quarantine and drain win.
What they cache is known from their KV events like everything else; only for the moment in which those may be on their way
the last turn's own prompt is believed to be there.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from twinpool import metrics
from twinpool.config import SessionsSection
from twinpool.ids import WorkerKey
from twinpool.router.request import Prepared

UNSEEN_SECONDS: Final = 2.0
"""After so long a worker's KV events have told what a turn has left there; and what has been evicted since."""

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """The last turn of a session. ``blocks``: full ones of its prompt, the last of which has the hash ``last``."""

    prefill: WorkerKey
    decode: WorkerKey
    blocks: int
    last: bytes
    ended: float

    @property
    def workers(self) -> set[WorkerKey]:
        """Those that hold its prompt."""
        return {self.prefill, self.decode}


class Sessions:
    """One a router, on the event loop. The session that was used least recently is forgotten first."""

    def __init__(self, config: SessionsSection, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._turns: OrderedDict[Key, Turn] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def prefer(self, prepared: Prepared) -> list[tuple[str, int, int]]:
        """For ``RouterCore.submit``: the workers of the session's last turn, and how much of this prompt they then had."""
        turn = self._turn(prepared)
        if turn is None:
            return []
        blocks = 0
        if self._clock() < turn.ended + UNSEEN_SECONDS and 0 < turn.blocks <= len(prepared.hashes):
            # A block's hash says what comes before it, too.
            blocks = turn.blocks if prepared.hashes[turn.blocks - 1].tobytes() == turn.last else 0
        return [(key.name, key.incarnation, blocks) for key in sorted(turn.workers, key=str)]

    def ended(self, prepared: Prepared, prefill: WorkerKey, decode: WorkerKey) -> None:
        """A turn has ended well on these workers."""
        if not prepared.session_id:
            return
        turn, hashes = self._turn(prepared), prepared.hashes
        last = hashes[-1].tobytes() if len(hashes) else b""
        now = Turn(prefill, decode, len(hashes), last, self._clock())
        if turn is not None:
            metrics.ROUTER_SESSION_TURNS.labels("kept" if turn.workers & now.workers else "moved").inc()
        key = _key(prepared)
        self._turns[key] = now
        self._turns.move_to_end(key)
        while len(self._turns) > self._config.max_sessions:
            self._turns.popitem(last=False)

    def forget(self, tenant: str, session_id: str) -> None:
        """The session is over, of whatever model it was."""
        for key in [key for key in self._turns if key[1:] == (tenant, session_id)]:
            del self._turns[key]

    def _turn(self, prepared: Prepared) -> Turn | None:
        turn = self._turns.get(_key(prepared)) if prepared.session_id else None
        if turn is not None and self._clock() >= turn.ended + self._config.ttl_seconds:
            del self._turns[_key(prepared)]
            return None
        return turn


def _key(prepared: Prepared) -> Key:
    return prepared.group.label, prepared.tenant, prepared.session_id
