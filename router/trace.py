# SPDX-License-Identifier: Apache-2.0
"""The last requests with their steps and the reasons of their placements, for ``twinpool trace``.

Costs some 10 microseconds a placement. Holds no text, no tokens and no hashes.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from twinpool._core import Action, RouterCore, Transition
from twinpool.router.prediction import Prediction
from twinpool.router.request import Prepared

EVENTS_MAX: Final = 200
"""Most steps of a request that are kept; a request has some ten an attempt."""

_MANY: Final = frozenset({"token", "delivered"})
# Told again and again while an answer runs: they say nothing about placement.


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a request. ``at``: seconds since its arrival."""

    at: float
    attempt: int
    event: str
    detail: str
    state: str


@dataclass(slots=True)
class Placement:
    """One placement. ``why``: what the core's ``explain`` said at that moment."""

    number: int
    at: float
    why: dict[str, object]
    prediction: Prediction | None = None


@dataclass(slots=True)
class Trace:
    """One request. ``arrived``: seconds since the epoch. ``ended``: seconds from then to its end; 0: it runs. ``output_tokens``: as
    the core was told, a few of a running answer behind. ``started``: its arrival on the monotonic clock."""

    client_id: str
    request_id: str
    model: str
    arrived: float
    prompt_tokens: int
    max_tokens: int
    pool: str = ""
    pool_reason: str = ""
    tenant: str = ""
    output_tokens: int = 0
    ended: float = 0.0
    placements: list[Placement] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    state: str = ""
    cause: str = ""
    obstacle: str = ""
    started: float = 0.0

    def step(self, attempt: int, event: str, detail: str, state: str) -> None:
        """Notes a step that is made now."""
        if len(self.steps) < EVENTS_MAX:
            self.steps.append(Step(time.monotonic() - self.started, attempt, event, detail, state))
        self.state = state


class TraceBook:
    """Bounded by the number of requests; the oldest goes first. All methods on the event loop."""

    def __init__(self, core: RouterCore, max_requests: int) -> None:
        """``max_requests`` 0: nothing is kept."""
        self._core = core
        self._max_requests = max_requests
        self._traces: OrderedDict[str, Trace] = OrderedDict()
        self._running: dict[int, Trace] = {}
        self._by_client: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._traces)

    def find(self, request_id: str) -> Trace | None:
        """By the client's id (the last one of that id) or by the router's own. Says of a waiting one why it waits."""
        trace = self._traces.get(self._by_client.get(request_id, request_id))
        if trace is None:
            return None
        number = next((number for number, running in self._running.items() if running is trace), None)
        if number is not None:
            why = self._core.explain(number)
            trace.state = str(why["state"])
            trace.obstacle = "" if why["obstacle"] == "none" else str(why["obstacle"])
        return trace

    def newest(self) -> Iterator[tuple[Trace, bool]]:
        """All of them and whether they run, the newest first. Those that run are known however many there are."""
        live = {trace.request_id for trace in self._running.values()}
        forgotten = [trace for trace in self._running.values() if trace.request_id not in self._traces]
        for trace in (*reversed(self._traces.values()), *reversed(forgotten)):
            yield trace, trace.request_id in live

    # --- what admission tells

    def begin(self, number: int, prepared: Prepared) -> None:
        """The core has accepted a request; ``number`` is its own for it."""
        if not self._max_requests:
            return
        waited = time.monotonic() - prepared.arrival
        trace = Trace(
            client_id=prepared.client_id,
            request_id=prepared.request_id,
            model=prepared.group.model,
            pool=prepared.group.pool,
            pool_reason=prepared.pool_reason,
            tenant=prepared.tenant,
            arrived=time.time() - waited,
            prompt_tokens=prepared.prompt_tokens,
            max_tokens=prepared.max_tokens,
            started=prepared.arrival,
        )
        self._running[number] = trace
        self._traces[prepared.request_id] = trace
        self._by_client[prepared.client_id] = prepared.request_id
        while len(self._traces) > self._max_requests:
            _, oldest = self._traces.popitem(last=False)
            if self._by_client.get(oldest.client_id) == oldest.request_id:
                del self._by_client[oldest.client_id]
        trace.step(0, "accepted", "", "Queued")

    def acted(self, action: Action) -> None:
        """The core decided something."""
        trace = self._running.get(action.request)
        if trace is None:
            return
        if action.kind == "place":
            at = time.monotonic() - trace.started
            trace.placements.append(Placement(action.attempt, at, self._core.explain(action.request)))
            trace.step(action.attempt, "placed", f"{action.prefill[0]} -> {action.decode[0]}", action.state)
        else:
            trace.step(action.attempt, action.kind, action.cause, action.state)
            trace.cause = action.cause or trace.cause

    def predicted(self, request_id: str, attempt: int, prediction: Prediction) -> None:
        """What was known of caches when an attempt was placed; it learns later what came of it."""
        trace = self._traces.get(request_id)
        if trace is not None and trace.placements and trace.placements[-1].number == attempt:
            trace.placements[-1].prediction = prediction

    def advanced(self, number: int, attempt: int, event: str, detail: str, after: Transition) -> None:
        """An event was applied, or ignored because it came too late."""
        trace = self._running.get(number)
        if trace is None or not after.applied:
            return
        if event in _MANY:
            trace.output_tokens += int(detail or 1) if event == "token" else 0
            return
        trace.step(attempt, event, detail, after.state)
        trace.cause = after.cause

    def end(self, number: int) -> None:
        """The core forgets the request."""
        trace = self._running.pop(number, None)
        if trace is not None:
            trace.ended = time.monotonic() - trace.started
