# SPDX-License-Identifier: Apache-2.0
"""The hops of a request: each is one event of the state machine, one histogram and one entry of HopTimings."""

import time
from dataclasses import dataclass
from typing import Final, Self

from prometheus_client import Histogram

from twinpool import metrics
from twinpool.router.recent import PoolModel, Recent
from twinpool.router.request import Prepared
from twinpool.tracing import OFF, Span
from twinpool.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Hop:
    """``event`` is what the core's state machine is told at its end; "" if the core itself made the step."""

    name: str
    event: str
    histogram: Histogram | None


TOKENIZE: Final = Hop("tokenize", "", metrics.ROUTER_TOKENIZE_TIME)
QUEUE: Final = Hop("queue", "", metrics.ROUTER_QUEUE_TIME)
RESERVE: Final = Hop("reserve", "decode_reserved", None)
PREFILL: Final = Hop("prefill", "first_token", metrics.ROUTER_PREFILL_TIME)
HANDOFF: Final = Hop("handoff", "handoff_done", metrics.ROUTER_HANDOFF_TIME)
DECODE: Final = Hop("decode", "finished", metrics.ROUTER_DECODE_TIME)

HOPS: Final = (TOKENIZE, QUEUE, RESERVE, PREFILL, HANDOFF, DECODE)
"""In their order. The names are the fields of HopTimings."""


class HopClock:
    """Where the time went. Every moment between arrival and the last mark belongs to exactly one hop; what a failed
    attempt took stays with the hops that it reached, and the time until it was placed anew with the queue."""

    __slots__ = (
        "_arrival",
        "_first_token",
        "_last",
        "_pool",
        "_prompt_tokens",
        "_recent",
        "_span",
        "_spent",
        "_tokens_at",
    )

    def __init__(
        self,
        arrival: float,
        tokenized: float,
        prompt_tokens: int,
        recent: Recent,
        span: Span = OFF,
        pool: PoolModel = ("", ""),
    ) -> None:
        """The first two in ``time.monotonic`` seconds. ``recent`` hears what clients wait; ``span`` gets a child for each hop.
        ``pool``: pool and model."""
        self._pool = pool
        self._span = span
        self._recent = recent
        self._prompt_tokens = prompt_tokens
        self._arrival = arrival
        self._last = arrival
        self._spent: dict[str, float] = {}
        self._first_token = 0.0
        self._tokens_at = 0.0
        self.mark(TOKENIZE, tokenized)

    @classmethod
    def of(cls, prepared: Prepared, recent: Recent) -> Self:
        """The clock of a request that was tokenised just now."""
        pool = (prepared.group.pool, prepared.group.model)
        return cls(prepared.arrival, prepared.tokenized, prepared.prompt_tokens, recent, prepared.span, pool)

    def mark(self, hop: Hop, now: float | None = None) -> float:
        """``hop`` ends now. Returns what it took, in seconds."""
        at = time.monotonic() if now is None else now
        self._span.child(hop.name, self._last, at)
        took, self._last = at - self._last, at
        self._spent[hop.name] = self._spent.get(hop.name, 0.0) + took
        if hop.histogram is not None:
            hop.histogram.observe(took)
        return took

    def tokens(self) -> bool:
        """Tokens are about to be written. True if they are the first ones."""
        now = time.monotonic()
        before, self._tokens_at = self._tokens_at, now
        if before:
            self._recent.next_tokens(now - before, self._pool)
            return False
        self._first_token = now - self._arrival
        self._recent.first_token(self._first_token, self._prompt_tokens, self._pool)
        return True

    def finish(self, tokens: int) -> pb.HopTimings:
        """Times up to the last mark, the last token; ``tokens`` were generated for each choice, on average."""
        total = self._last - self._arrival
        metrics.ROUTER_E2E.observe(total)
        if tokens > 1:
            metrics.ROUTER_TPOT.observe((total - self._first_token) / (tokens - 1))
        timings = pb.HopTimings()
        for name, seconds in self._spent.items():
            getattr(timings, name).FromNanoseconds(int(seconds * 1e9))
        timings.time_to_first_token.FromNanoseconds(int(self._first_token * 1e9))
        timings.total.FromNanoseconds(int(total * 1e9))
        return timings
