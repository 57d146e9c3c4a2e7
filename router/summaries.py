# SPDX-License-Identifier: Apache-2.0
"""Requests as operators see them in lists: their way so far, no text, no tokens, no hashes."""

import time
from collections.abc import Callable
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration

from twinpool.router.timing import DECODE, HANDOFF, PREFILL, QUEUE, RESERVE, TOKENIZE
from twinpool.router.trace import Trace, TraceBook
from twinpool.v1 import router_pb2, worker_pb2
from twinpool.v1 import telemetry_pb2 as pb

LIMIT: Final = 100
LIMIT_MAX: Final = 1000

_ENDS: Final = {
    "accepted": TOKENIZE.name,
    "placed": QUEUE.name,
    "decode_reserved": RESERVE.name,
    "first_token": PREFILL.name,
    "handoff_done": HANDOFF.name,
    "finished": DECODE.name,
}
"""The hop that a step ends."""

_BACK: Final = frozenset({"requeue", "decode_refused"})
"""Steps after which a request waits again."""

_NEXT: Final = dict(zip(_ENDS.values(), [*list(_ENDS.values())[1:], ""], strict=True))


def listed(
    book: TraceBook,
    router: str,
    tenant_shown: Callable[[str], str],
    asked: router_pb2.ListRouterRequestsRequest,
) -> router_pb2.ListRouterRequestsResponse:
    """What ``asked`` is about. ``tenant_shown``: how operators know a tenant."""
    answer = router_pb2.ListRouterRequestsResponse()
    limit = min(asked.limit or LIMIT, LIMIT_MAX)
    for trace, live in book.newest():
        if asked.pool and trace.pool != asked.pool:
            continue
        if asked.state and asked.state != ("live" if live else "ended") and asked.state != trace.state:
            continue
        answer.found += 1
        if len(answer.requests) < limit:
            answer.requests.append(summary(trace, live, router, tenant_shown(trace.tenant)))
    return answer


def summary(trace: Trace, live: bool, router: str, tenant: str) -> pb.RequestSummary:
    """One request."""
    age = time.monotonic() - trace.started if live else trace.ended
    message = pb.RequestSummary(
        request_id=trace.request_id,
        client_id=trace.client_id,
        router=router,
        pool=trace.pool,
        model=trace.model,
        tenant=tenant,
        state=trace.state,
        live=live,
        cause=trace.cause,
        age=_duration(age),
        prompt_tokens=trace.prompt_tokens,
        output_tokens=trace.output_tokens,
        max_tokens=trace.max_tokens,
        attempts=len(trace.placements),
        hops=_hops(trace, live, age),
    )
    message.arrived.FromNanoseconds(int(trace.arrived * 1e9))
    if trace.placements:
        last = trace.placements[-1]
        chosen: Any = last.why.get("chosen")
        for side in ("prefill", "decode"):
            if chosen is not None and chosen[side] is not None:
                worker: worker_pb2.WorkerId = getattr(message, side)
                worker.name, worker.incarnation = chosen[side]
        if last.prediction is not None and last.prediction.actual is not None:
            message.cached_tokens = last.prediction.actual
    return message


def _hops(trace: Trace, live: bool, age: float) -> list[pb.RequestHop]:
    hops: list[pb.RequestHop] = []
    began, name, attempt = 0.0, TOKENIZE.name, 0
    for step in trace.steps:
        ended = _ENDS.get(step.event)
        if ended is not None:
            # What was skipped (a hand-off overtook the first token) took no time of its own.
            hops.append(_hop(ended, step.attempt, began, step.at))
            began, name, attempt = step.at, _NEXT[ended], step.attempt
        elif step.event in _BACK and name != QUEUE.name:
            hops.append(_hop(name, attempt, began, step.at))
            began, name, attempt = step.at, QUEUE.name, step.attempt
    if name:
        hops.append(_hop(name, attempt, began, None if live else max(began, age)))
    return hops


def _hop(name: str, attempt: int, began: float, ended: float | None) -> pb.RequestHop:
    hop = pb.RequestHop(name=name, attempt=attempt, began=_duration(began))
    if ended is not None:
        hop.ended.CopyFrom(_duration(ended))
    return hop


def _duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(max(0, int(seconds * 1e9)))
    return message
