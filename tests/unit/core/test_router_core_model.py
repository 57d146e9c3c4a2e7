# SPDX-License-Identifier: Apache-2.0
"""RouterCore against a small model: states by the table, reservations by state, one end each."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from twinpool._core import Action, AdmissionConfig, CoreError, RouterCore, Transition

TABLE = {(event, state): result for event, state, result in RouterCore.TRANSITIONS}
TERMINAL = {"Finished", "Rejected", "Cancelled", "Expired", "Failed"}
NO_HASHES = np.empty((0, 16), np.uint8)
MAX_ATTEMPTS, MAX_RESUMES, MAX_REFUSALS, TTL = 2, 1, 3, 30.0
# What each state holds on the prefill worker and on the decode worker.
HOLDS = {"Prefilling": (1, 2), "HandingOff": (0, 2), "Decoding": (0, 1)}
DETAILS = {
    "attempt_failed": ["FENCED", "INTERNAL:prefill", "NO_CAPACITY:decode", "INVALID", "DEADLINE", "TRANSFER"],
    "worker_lost": ["prefill", "decode", ""],
    "token": ["", "1", "20"],
}


@dataclass
class ModelRequest:
    """What the model knows of a request."""

    state: str = "Queued"
    attempt: int = 1
    failures: int = 0
    refusals: int = 0
    reserved: bool = False
    delivered: bool = False
    resumes: int = 0
    deadline: float = float("inf")
    queue_until: float = TTL
    pair: tuple[tuple[str, int], tuple[str, int]] = (("", 0), ("", 0))  # names and registrations


@dataclass
class ModelWorker:
    """An incarnation, its role, and which registration of it this is: one that was removed comes back empty."""

    incarnation: int
    role: str
    state: str
    registration: int


@dataclass
class Model:
    """The cluster as the model sees it."""

    workers: dict[str, ModelWorker] = field(default_factory=dict)
    requests: dict[int, ModelRequest] = field(default_factory=dict)

    def alive(self, worker: tuple[str, int]) -> bool:
        """True if that registration still holds."""
        known = self.workers.get(worker[0])
        return known is not None and known.registration == worker[1]

    def reservations(self) -> int:
        """Reservations that live workers hold."""
        count = 0
        for request in self.requests.values():
            on_prefill, on_decode = HOLDS.get(request.state, (0, 0))
            count += on_prefill * self.alive(request.pair[0]) + on_decode * self.alive(request.pair[1])
        return count


class RouterMachine(RuleBasedStateMachine):
    """Random events, in random order, with workers that come and go."""

    @initialize()
    def start(self) -> None:
        self.core = RouterCore(
            AdmissionConfig(
                max_attempts=MAX_ATTEMPTS,
                max_resumes=MAX_RESUMES,
                max_refusals=MAX_REFUSALS,
                queue_ttl_seconds=TTL,
                transfer_window_requests=2,
            )
        )
        self.now = 0.0
        self.model = Model()
        self.count = self.registrations = 0
        for name in ("p0", "p1", "d0", "d1"):
            self.put_worker(name, 1)

    def put_worker(self, name: str, incarnation: int, state: str = "ready") -> None:
        role = "prefill" if name[0] == "p" else "decode"
        self.core.upsert_worker(self.now, name, incarnation, "m", role, state, "fp", 40, 16, 4)
        known = self.model.workers.get(name)
        if known is None or known.incarnation != incarnation:
            self.registrations += 1
            known = ModelWorker(incarnation, role, state, self.registrations)
        self.model.workers[name] = known
        known.state = state

    # --- the cluster ----------------------------------------------------------------------

    @rule(
        name=st.sampled_from(["p0", "p1", "d0", "d1"]),
        restarted=st.booleans(),
        state=st.sampled_from(["ready", "ready", "draining"]),
    )
    def upsert(self, name: str, restarted: bool, state: str) -> None:
        known = self.model.workers.get(name)
        self.put_worker(name, (known.incarnation if known else 0) + int(restarted or known is None), state)

    @rule(name=st.sampled_from(["p0", "p1", "d0", "d1"]), stale=st.booleans())
    def remove(self, name: str, stale: bool) -> None:
        known = self.model.workers.get(name)
        if known is None:
            return
        on_it = {request for request, _ in self.core.requests_on(name, known.incarnation)}
        me = (name, known.registration)
        assert on_it == {
            number
            for number, request in self.model.requests.items()
            if (request.state in ("Prefilling", "HandingOff") and request.pair[0] == me)
            or (request.state in HOLDS and request.pair[1] == me)
        }
        self.core.remove_worker(self.now, name, known.incarnation + int(stale))
        if not stale:
            del self.model.workers[name]

    @rule(name=st.sampled_from(["p0", "d0", "d1"]), available=st.integers(0, 40), running=st.integers(0, 4))
    def report(self, name: str, available: int, running: int) -> None:
        known = self.model.workers.get(name)
        incarnation = known.incarnation if known else 1
        self.core.report_load(self.now, name, incarnation, running, 0, running * 100, available, 0.01)

    @rule(name=st.sampled_from(["p0", "d0"]), seconds=st.floats(0, 5))
    def quarantine(self, name: str, seconds: float) -> None:
        self.core.quarantine(self.now, name, 1, self.now + seconds)

    # --- requests -------------------------------------------------------------------------

    @rule(
        prompt=st.integers(1, 200),
        output=st.integers(1, 50),
        priority=st.integers(-1, 1),
        deadline=st.sampled_from([0.0, 1.0, 20.0]),
    )
    def submit(self, prompt: int, output: int, priority: int, deadline: float) -> None:
        self.count += 1
        at = self.now + deadline if deadline else 0.0
        result = self.core.submit(
            self.now, f"r{self.count}", "m", prompt, output, NO_HASHES, priority=priority, deadline=at
        )
        assert result.accepted, result.reason
        self.model.requests[result.request] = ModelRequest(
            deadline=at or float("inf"), queue_until=self.now + TTL
        )

    @rule(seconds=st.sampled_from([0.0, 0.1, 3.0, 40.0]))
    def plan(self, seconds: float) -> None:
        self.now += seconds
        actions = self.core.plan(self.now)
        for action in actions:
            self.check_action(action)
        for number, request in self.model.requests.items():
            assert request.state in TERMINAL or self.now < request.deadline, number
            assert request.state != "Queued" or self.now < request.queue_until, number
        assert self.core.plan(self.now) == [], "a second plan at once has nothing left to do"
        wake = self.core.next_wake(self.now)
        assert wake is None or wake > self.now

    def check_action(self, action: Action) -> None:
        request = self.model.requests[action.request]
        assert action.attempt == request.attempt
        if action.kind == "end":
            assert request.state not in TERMINAL
            late = self.now >= request.deadline
            assert late or (request.state == "Queued" and self.now >= request.queue_until)
            assert action.cause in ({"DEADLINE_EXCEEDED"} if late else {"QUEUE_TIMEOUT", "NO_WORKERS"})
            request.state = "Expired"
        else:
            assert action.kind == "place"
            assert request.state == "Queued"
            for name, incarnation in (action.prefill, action.decode):
                worker = self.model.workers[name]
                assert (worker.incarnation, worker.state) == (incarnation, "ready")
            assert self.model.workers[action.prefill[0]].role == "prefill"
            assert self.model.workers[action.decode[0]].role == "decode"
            prefill, decode = (
                (name, self.model.workers[name].registration)
                for name in (action.prefill[0], action.decode[0])
            )
            request.state, request.pair, request.reserved = "Prefilling", (prefill, decode), False

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), event=st.sampled_from(RouterCore.EVENTS), late=st.sampled_from([0, 0, 0, 1]))
    def event(self, data: st.DataObject, event: str, late: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.model.requests)))
        request = self.model.requests[number]
        detail = data.draw(st.sampled_from(DETAILS.get(event, [""])))
        attempt = request.attempt - late
        before = request.state
        result = TABLE[event, before]
        if event == "decode_refused" and before == "Prefilling" and request.reserved:
            result = "error"
        if attempt < request.attempt and event not in ("cancel", "deadline"):
            result = "ignored"
        if result == "error":
            with pytest.raises(CoreError, match=f"^event={event}; state={before}"):
                self.core.advance(self.now, number, attempt, event, detail)
            return
        transition = self.core.advance(self.now, number, attempt, event, detail)
        assert transition.applied == (result != "ignored")
        assert transition.terminal == (transition.state in TERMINAL)
        if transition.applied:
            self.check_transition(request, event, detail, result.split(" or "), transition)
        else:
            assert transition.state == before

    def check_transition(
        self, request: ModelRequest, event: str, detail: str, allowed: list[str], transition: Transition
    ) -> None:
        assert transition.state in allowed
        before, request.state = request.state, transition.state
        request.reserved |= event == "decode_reserved"
        request.delivered |= event == "delivered"
        if event in ("attempt_failed", "worker_lost") and transition.state != "Decoding":
            if request.delivered:
                may_retry = request.resumes < MAX_RESUMES
                request.resumes += 1
            else:
                may_retry = request.failures + 1 < MAX_ATTEMPTS
                request.failures += 1
            if not may_retry or detail == "INVALID":
                assert transition.state in ("Failed", "Expired")
            if event == "worker_lost":
                assert transition.state == ("Retrying" if may_retry else "Failed")
        if event == "worker_lost" and before == "Decoding":
            assert (transition.state == "Decoding") == (detail == "prefill")
        if event == "decode_refused":
            request.refusals += 1
            assert transition.state == ("Queued" if request.refusals <= MAX_REFUSALS else "Failed")
        if event == "requeue":
            request.queue_until = self.now + TTL
        if transition.state == "Queued":
            request.attempt += 1
        assert transition.attempt == request.attempt

    @precondition(lambda self: any(r.state in TERMINAL for r in self.model.requests.values()))
    @rule()
    def forget(self) -> None:
        number = next(n for n, r in self.model.requests.items() if r.state in TERMINAL)
        self.core.forget(number)
        del self.model.requests[number]
        assert not self.core.advance(self.now, number, 1, "finished").applied

    # --- always ---------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        stats = self.core.stats()
        states = [request.state for request in self.model.requests.values()]
        for state in RouterCore.STATES:
            assert stats[f"state_{state}"] == states.count(state), state
        assert stats["queued"] == states.count("Queued")
        assert stats["reservations"] == self.model.reservations()
        assert stats["workers"] == len(self.model.workers)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for number in self.model.requests:
            self.core.advance(self.now, number, 0, "cancel")
            self.core.forget(number)
        stats = self.core.stats()
        assert stats["reservations"] == stats["queued"] == stats["queued_tokens"] == stats["requests"] == 0
        for worker in self.core.workers():
            for key in ("reserved_prefill_tokens", "reserved_blocks", "reserved_sequences", "transfers"):
                assert worker[key] == 0, (worker["name"], key)


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
