# SPDX-License-Identifier: Apache-2.0
"""Counts each request once, when it ends: not a stream, which may end before the request or after it."""

import asyncio

from twinpool import metrics
from twinpool.errors import TwinpoolError, as_twinpool_error
from twinpool.router.request import passed
from twinpool.rpc import Deadline
from twinpool.tracing import Span


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
            code = TwinpoolError(reason).code.name if reason else "OK"
            metrics.ROUTER_REQUESTS.labels(code, reason).inc()

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
