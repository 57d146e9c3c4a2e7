# SPDX-License-Identifier: Apache-2.0
"""How often failed attempts may be placed anew, and whom they are put down to.

What may be retried at all is the state machine's decision: only what can give no token twice. On top of it stands a budget,
so that failures that nothing cures do not multiply the load: each request pays ``retry_ratio`` of a retry in, at most
``retry_burst`` are kept, and each attempt that a worker failed costs one. Without budget a request that has no token yet fails with
its cause at once.

These cost nothing, or the budget would cost answers: refusals for lack of room and by workers that leave, which ran nowhere; and a
worker that is lost, whose requests are lost with it once. An answer of which the client has tokens goes on even without budget, and
takes it below zero, down to ``-retry_burst``.
"""

from typing import Protocol

from twinpool import metrics
from twinpool.config import RouterSection
from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.router.breaker import Breakers
from twinpool.router.outcome import Outcome


class FailedAttempt(Protocol):
    """What is to be known of an attempt that has failed."""

    number: int
    prefill: WorkerKey
    decode: WorkerKey


class RetryBudget:
    """Retries that may still be made. Pure."""

    def __init__(self, config: RouterSection) -> None:
        """``config``: read at each use."""
        self._config = config
        self.left = config.retry_burst

    def request(self) -> None:
        """A request has come."""
        self.left = min(self._config.retry_burst, self.left + self._config.retry_ratio)

    def take(self, *, forced: bool) -> bool:
        """Whether a retry may be made; ``forced``: it is made anyway."""
        if self.left < 1 and not forced:
            return False
        self.left = max(-self._config.retry_burst, self.left - 1)
        return True


class Retries:
    """What the router makes of failed attempts. One a router, on the event loop alone."""

    def __init__(self, config: RouterSection, breakers: Breakers) -> None:
        self.budget = RetryBudget(config)
        self._breakers = breakers

    def requested(self) -> None:
        """A request was admitted."""
        self.budget.request()
        metrics.ROUTER_RETRY_BUDGET.set(self.budget.left)

    def handed_off(self, prefill: WorkerKey, decode: WorkerKey) -> None:
        """Both workers have done what may go wrong between them."""
        self._breakers.succeeded(prefill, decode)

    def verdict(
        self, outcome: Outcome, attempt: FailedAttempt, terminal: bool, delivered: bool
    ) -> TwinpoolError | None:
        """What a failed attempt ends its request with; None: it may be placed anew. ``terminal``: the state machine has ended it.
        ``delivered``: its client has tokens."""
        self.failed(outcome, attempt.prefill, attempt.decode)
        if terminal:
            return outcome.as_error(attempt.number, delivered)
        return None if self.allows(outcome, delivered) else outcome.without_budget(attempt.number)

    def failed(self, outcome: Outcome, prefill: WorkerKey, decode: WorkerKey) -> None:
        """An attempt has failed; breakers learn from it."""
        if outcome.blames_pair and prefill != decode:
            self._breakers.failed(prefill, decode)
            self._breakers.failed(decode, prefill)
            return
        said_by_prefill = outcome.worker == prefill.name
        if outcome.blames_worker:
            self._breakers.failed(prefill if said_by_prefill else decode)
        elif outcome.blames_peer and prefill != decode:
            # One that cannot be reached by one peer may be well: see the number of peers.
            blamed, by = (decode, prefill) if said_by_prefill else (prefill, decode)
            self._breakers.failed(blamed, by)

    def allows(self, outcome: Outcome, delivered: bool) -> bool:
        """Whether the state machine's wish to place the request anew is granted. Counts it."""
        granted = not outcome.costs_budget or self.budget.take(forced=delivered)
        metrics.ROUTER_RETRY_BUDGET.set(self.budget.left)
        placed_anew = metrics.ROUTER_RESUMES if delivered else metrics.ROUTER_RETRIES
        (placed_anew if granted else metrics.ROUTER_RETRIES_DENIED).labels(outcome.reason).inc()
        return granted
