# SPDX-License-Identifier: Apache-2.0
"""What the rebalancer has done in a pool, and since when which role has asked for a worker."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from twinpool.control.rebalance.telemetry import Role

Wish = Literal["more prefill", "more decode", "fewer prefill", "fewer decode"]
"""What a pool's load asks for."""

KEPT = 256
"""Flips that are remembered."""


@dataclass(frozen=True, slots=True)
class Move:
    """A flip that was begun."""

    worker: str
    to: Role
    began: float
    ended: float | None = None
    """None while it is under way."""
    succeeded: bool = True

    @property
    def seconds(self) -> float:
        """How long it took; 0 while it is under way."""
        return 0.0 if self.ended is None else self.ended - self.began


@dataclass(frozen=True, slots=True)
class History:
    """Of one pool, oldest first. Each change returns a new one."""

    moves: tuple[Move, ...] = ()
    asking: Wish | None = None
    """What the load asked for at the last decision."""
    asking_since: float = 0.0
    scaled_at: float = float("-inf")

    def asked(self, wish: Wish | None, now: float) -> "History":
        """A decision was made, and the load asked for this."""
        if wish == self.asking:
            return self
        return replace(self, asking=wish, asking_since=now)

    def asks_for(self, wish: Wish, now: float) -> float:
        """Seconds since when the load has asked for this without a pause; 0 if it is new."""
        return now - self.asking_since if self.asking == wish else 0.0

    def began(self, worker: str, to: Role, now: float) -> "History":
        """A flip was begun."""
        return replace(self, moves=(*self.moves, Move(worker, to, now))[-KEPT:])

    def ended(self, worker: str, now: float, succeeded: bool = True) -> "History":
        """The worker's flip has ended. One that is not known does nothing."""
        moves = [
            replace(move, ended=now, succeeded=succeeded)
            if move.worker == worker and move.ended is None
            else move
            for move in self.moves
        ]
        return replace(self, moves=tuple(moves))

    def scaled(self, now: float) -> "History":
        """The pool was given another number of workers."""
        return replace(self, scaled_at=now)

    @property
    def under_way(self) -> int:
        """Flips that have not ended."""
        return sum(move.ended is None for move in self.moves)

    @property
    def last_change(self) -> float:
        """When the last flip ended, or the pool was scaled."""
        ends = [move.ended for move in self.moves if move.ended is not None]
        return max([*ends, self.scaled_at])

    def given_at(self, worker: str) -> float:
        """When a worker got its role by a flip, or was tried; minus infinity if it never was."""
        return max(
            (
                move.ended if move.ended is not None else move.began
                for move in self.moves
                if move.worker == worker
            ),
            default=float("-inf"),
        )

    def flip_seconds(self, otherwise: float) -> float:
        """What the last flips took on average; ``otherwise`` while none was measured."""
        taken = [move.seconds for move in self.moves if move.ended is not None and move.succeeded][-8:]
        return sum(taken) / len(taken) if taken else otherwise

    def reversals_since(self, time: float) -> int:
        """Flips begun after ``time`` that went against the one before them."""
        return reversals(self.moves, time)

    @property
    def direction(self) -> Role | None:
        """Where the last flip that did not fail went; None before the first."""
        return next((move.to for move in reversed(self.moves) if move.succeeded), None)


def reversals(moves: Iterable[Move], since: float = float("-inf")) -> int:
    """Flips begun after ``since`` whose direction is not that of the one before. Those that failed changed nothing."""
    found, before = 0, None
    for move in (each for each in moves if each.succeeded):
        found += before is not None and move.to != before and move.began > since
        before = move.to
    return found
