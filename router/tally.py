# SPDX-License-Identifier: Apache-2.0
"""Counts each request once, when it ends: not a stream, which may end before the request or after it."""

import asyncio
from functools import cache

from prometheus_client import Counter

from twinpool import metrics
from twinpool.errors import TwinpoolError, as_twinpool_error
from twinpool.router.request import passed
from twinpool.rpc import Deadline
from twinpool.tracing import Span


@cache
def _ended(reason: str) -> Counter:
    """The counter of what ends so. Looking it up by its labels costs more than counting does."""
    return metrics.ROUTER_REQUESTS.labels(TwinpoolError(reason).code.name if reason else "OK", reason)


class Tally:
    """One request, from now on in flight. ``span`` ends with it."""

    def __init__(self, span: Span, deadline: Deadline) -> None:
        self.span = span
        self._deadline = deadline
        self._open = True
        metrics.ROUTER_INFLIGHT_REQUESTS.inc()

    def end(self, error: BaseException | None) -> None:
        """The request has ended, well without an error. Only the first end counts."""
        reason = "" if error is None else self._reason(error)
        if self._close(reason):
            _ended(reason).inc()

    def drop(self) -> None:
        """It was no request of its own: its stream has attached to another one."""
        self._close("")

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, asyncio.CancelledError):
            return "DEADLINE_EXCEEDED" if passed(self._deadline) else "CANCELLED"
        return as_twinpool_error(error).reason

    def _close(self, reason: str) -> bool:
        first, self._open = self._open, False
        if first:
            self.span.end(reason)
            metrics.ROUTER_INFLIGHT_REQUESTS.dec()
        return first
