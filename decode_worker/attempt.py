# SPDX-License-Identifier: Apache-2.0
"""One attempt on a decode worker."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from twinpool.engine.sampling import SequenceDraw
from twinpool.tracing import OFF, Span
from twinpool.transfer.base import AttemptKey
from twinpool.transfer.session import PullSession
from twinpool.v1.worker_pb2 import FirstToken, PrefixFetched
from twinpool.worker.commands import DecodeWork
from twinpool.worker.prefix_fetch import PrefixFetch


@dataclass(slots=True, eq=False)
class Choice:
    """A choice that decodes. ``seq`` is its sequence in the scheduler."""

    attempt: "DecodeAttempt"
    index: int
    seq: int
    draw: SequenceDraw


@dataclass(slots=True, eq=False)
class DecodeAttempt:
    """From the reservation to the last token of the last choice.

    ``reserved`` is the sequence that holds the prompt's blocks, None once a choice has taken it over. ``unforked``
    are first tokens of choices that wait for blocks to start in; until all of them can, none decodes. ``forks`` are
    sequences made for them that have not started. Of a prompt that is computed here, ``computing`` is the sequence until
    the first token is drawn, and ``computed`` the same while several choices wait to be forked from it. Of an answer that can
    be resumed, ``ended`` has the output of choices that have ended; ``forgotten``: the router said that it is over. Times are
    on the step loop's clock.
    """

    work: DecodeWork
    session: int
    deadline: float | None
    arrived: float
    reserved: int | None = None
    cached_blocks: int = 0
    fetch: PrefixFetch | None = None
    fetched: PrefixFetched | None = None
    computing: int | None = None
    computed: int | None = None
    draw: SequenceDraw | None = None
    started: float | None = None
    told_reserved: bool = False
    pull: PullSession | None = None
    transfer_span: Span = OFF
    decode_span: Span = OFF
    prefill_traceparent: str = ""
    unforked: list[FirstToken] = field(default_factory=list)
    forks: list[int] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=dict)
    ended: dict[int, Sequence[int]] = field(default_factory=dict)
    forgotten: bool = False

    @property
    def key(self) -> AttemptKey:
        """Its id."""
        return self.work.key
