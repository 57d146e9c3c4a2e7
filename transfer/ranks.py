# SPDX-License-Identifier: Apache-2.0
"""Pulls from owners that are several ranks: one pull from each rank that holds a part of this rank's blocks.

Each rank has its own pool *and* its own generation table, and its pull reads its data and then its generations, so the
fence of :mod:`~twinpool.transfer.base` holds for each rank by itself. A pull from all of them succeeds only if every
one of them does, and says what every rank's table held: a row for each rank, which
:func:`~twinpool.transfer.fence.check_generations` compares with the ticket row by row. One rank that has given a block to
new content therefore fails the whole of it, and whoever takes the rows for those of one owner fails too.

Digests cover a block as it lies in one pool, so they say nothing across unequal degrees: such a reader has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from twinpool.ids import WorkerKey
from twinpool.transfer.base import Blocks, Fault, Generations
from twinpool.transfer.pull import Pull, PullOutcome
from twinpool.transfer.session import ReadPort


class RankedPort:
    """A :class:`~twinpool.transfer.session.ReadPort` over another one. Calls and callbacks belong to one thread."""

    def __init__(self, port: ReadPort) -> None:
        self._port = port
        self._ranks: dict[WorkerKey, tuple[WorkerKey, ...]] = {}
        self._groups: dict[Pull, _Group] = {}  # by the first rank's pull

    def join(self, owner: WorkerKey, ranks: Sequence[WorkerKey]) -> None:
        """Pulls from ``owner`` go to these ranks of it from now on: those that ``shard.sources`` names, connected already.
        An owner that is not joined is its own only rank. Raises ValueError without a rank or for one named twice."""
        if not ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"{len(ranks)} ranks of {owner}, {len(set(ranks))} of them distinct")
        self._ranks[owner] = tuple(ranks)

    def leave(self, owner: WorkerKey) -> None:
        """Forgets the ranks of an owner. Pulls from them go on until they end."""
        self._ranks.pop(owner, None)

    def pool_blocks(self, peer: WorkerKey) -> int | None:
        """Blocks that every rank of ``peer`` has; None if one of them is not connected."""
        counts = [self._port.pool_blocks(rank) for rank in self._ranks.get(peer, (peer,))]
        known = [count for count in counts if count is not None]
        return min(known) if len(known) == len(counts) else None

    def pull(
        self,
        peer: WorkerKey,
        remote: Blocks,
        local: Blocks,
        *,
        deadline_seconds: float,
        on_done: Callable[[PullOutcome], None],
        on_fenced: Callable[[], None],
    ) -> Pull:
        """As :meth:`TransferPump.pull`, from every rank. The outcome's generations are ``uint64[ranks, n]``."""
        ranks = self._ranks.get(peer)
        if ranks is None:
            return self._port.pull(
                peer, remote, local, deadline_seconds=deadline_seconds, on_done=on_done, on_fenced=on_fenced
            )
        group = _Group(len(ranks), self._port.cancel, on_done, lambda: self._fenced(group, on_fenced))
        for index, rank in enumerate(ranks):
            if group.ended:
                break  # one of them has failed already
            group.pulls.append(
                self._port.pull(
                    rank,
                    remote,
                    local,
                    deadline_seconds=deadline_seconds,
                    on_done=group.done(index),
                    on_fenced=group.fenced,
                )
            )
        self._groups[group.pulls[0]] = group
        group.seal()
        return group.pulls[0]

    def cancel(self, pull: Pull) -> None:
        """Ends a pull from all its ranks as ABORTED; no effect if it has ended."""
        group = self._groups.get(pull)
        for each in group.pulls if group is not None else [pull]:
            self._port.cancel(each)

    def _fenced(self, group: _Group, on_fenced: Callable[[], None]) -> None:
        del self._groups[group.pulls[0]]
        on_fenced()


class _Group:
    """The pulls of one set of blocks. It ends with the first failure or the last success, and is fenced with the last."""

    def __init__(
        self,
        count: int,
        cancel: Callable[[Pull], None],
        on_done: Callable[[PullOutcome], None],
        on_fenced: Callable[[], None],
    ) -> None:
        self.pulls: list[Pull] = []
        self._generations: list[Generations | None] = [None] * count
        self._outcomes: list[PullOutcome] = []
        self.ended = False
        self._fenced = 0
        self._sealed = False
        self._cancel = cancel
        self._on_done = on_done
        self._on_fenced = on_fenced

    def done(self, index: int) -> Callable[[PullOutcome], None]:
        """What is called when the pull from rank ``index`` ends."""

        def one_done(outcome: PullOutcome) -> None:
            if self.ended:
                return
            if outcome.fault is not None or outcome.generations is None:
                self._fail(index, outcome)
                return
            self._generations[index] = outcome.generations
            self._outcomes.append(outcome)
            if len(self._outcomes) == len(self._generations):
                self.ended = True
                self._on_done(self._success())

        return one_done

    def fenced(self) -> None:
        """A rank's pull is fenced; each ends before."""
        self._fenced += 1
        self._check_fence()

    def seal(self) -> None:
        """No rank's pull is added any more."""
        self._sealed = True
        self._check_fence()

    def _check_fence(self) -> None:
        if self._sealed and self._fenced == len(self.pulls):
            self._on_fenced()

    def _fail(self, index: int, outcome: PullOutcome) -> None:
        self.ended = True
        for pull in self.pulls:
            self._cancel(pull)
        fault = outcome.fault or Fault.UNKNOWN
        self._on_done(PullOutcome(fault, f"from rank {index} of those read: {outcome.detail}"))

    def _success(self) -> PullOutcome:
        rows = [generations for generations in self._generations if generations is not None]
        return PullOutcome(
            None,
            "",
            np.stack(rows),
            max(outcome.seconds for outcome in self._outcomes),
            sum(outcome.post_seconds for outcome in self._outcomes),
        )
