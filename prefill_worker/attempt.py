# SPDX-License-Identifier: Apache-2.0
"""One attempt on a prefill worker."""

from dataclasses import dataclass

from twinpool.engine.sampling import SequenceDraw
from twinpool.transfer.base import AttemptKey
from twinpool.v1.worker_pb2 import PrefixFetched
from twinpool.worker.commands import PrefillWork
from twinpool.worker.prefix_fetch import PrefixFetch


@dataclass(slots=True, eq=False)
class PrefillAttempt:
    """From the command until the reader has let go of the last block.

    ``seq`` is the sequence that is computed: None while a prefix is fetched, and once the prompt is done and only the
    offer holds its blocks. ``compute_seconds`` is its share of the steps that computed it. ``offered`` is the prompt block
    that is announced next. Times are on the step loop's clock.
    """

    work: PrefillWork
    session: int
    deadline: float | None
    draw: SequenceDraw
    offered: int
    arrived: float
    seq: int | None = None
    done: bool = False
    started: float | None = None
    compute_seconds: float = 0.0
    fetch: PrefixFetch | None = None
    fetched: PrefixFetched | None = None

    @property
    def key(self) -> AttemptKey:
        """Its id."""
        return self.work.key
