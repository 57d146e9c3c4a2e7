# SPDX-License-Identifier: Apache-2.0
"""RouterService: what operators ask of a router."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.router.index import WorkerLocality
from twinpool.router.locality import Locality
from twinpool.router.models import ModelTable
from twinpool.router.placement import Fleet
from twinpool.router.tenants import Tenants
from twinpool.router.tokenize import TokenizeHop
from twinpool.router.trace import Placement, Trace, TraceBook
from twinpool.rpc import Caller
from twinpool.v1 import control_pb2, router_pb2_grpc, worker_pb2
from twinpool.v1 import router_pb2 as pb

SERVICE: Final = pb.DESCRIPTOR.services_by_name["RouterService"].full_name

_CHUNK_BYTES: Final = 1 << 20
ROLES: Final = {"prefill": worker_pb2.ROLE_PREFILL, "decode": worker_pb2.ROLE_DECODE}
_STATES: Final = {
    "starting": control_pb2.WORKER_STATE_STARTING,
    "ready": control_pb2.WORKER_STATE_READY,
    "draining": control_pb2.WORKER_STATE_DRAINING,
    "flipping": control_pb2.WORKER_STATE_FLIPPING,
}
_TERMS: Final = ("prefill_wait", "fetch", "compute", "transfer", "decode_wait", "harm", "total")
_COUNTS: Final = ("prefill_cached_blocks", "decode_cached_blocks", "uncached_tokens")

Row = dict[str, Any]
Context = grpc.aio.ServicerContext[Any, Any]


class RouterInspection(router_pb2_grpc.RouterServiceServicer):
    """Reads; changes nothing. Raises TwinpoolError; the server turns it into a status."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        fleet: Fleet,
        locality: Locality,
        models: ModelTable,
        tokenize: TokenizeHop,
        traces: TraceBook,
        tenants: Tenants,
        *,
        max_message_bytes: int,
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._fleet = fleet
        self._core = fleet.core
        self._locality = locality
        self._models = models
        self._tokenize = tokenize
        self._traces = traces
        self._tenants = tenants
        # Half a message leaves room for what frames the piece.
        self._chunk_bytes = min(_CHUNK_BYTES, max_message_bytes // 2)

    async def InspectRouter(
        self, request: pb.InspectRouterRequest, context: Context
    ) -> pb.InspectRouterResponse:
        """See the protocol."""
        self._tenants.admit_operator(Caller.of(context))
        condition, stats = self._locality.condition, self._core.stats()
        known = {status.key: status for status in self._locality.statuses()}
        return pb.InspectRouterResponse(
            router=self._name,
            incarnation=self._incarnation,
            conditions=[
                pb.Condition(type="LocalityDegraded", cause=one.cause, detail=one.detail)
                for one in condition.causes
            ],
            workers=[self._worker(row, known) for row in sorted(self._rows(), key=lambda row: row["name"])],
            prediction_error=condition.error,
            predictions=condition.samples,
            index_blocks=stats["index_blocks"],
            index_bytes=stats["index_bytes"],
            index_evicted=stats["index_evicted"],
            token_cache_bytes=self._tokenize.cache.size_bytes,
        )

    async def LookupPrefix(
        self, request: pb.LookupPrefixRequest, context: Context
    ) -> pb.LookupPrefixResponse:
        """See the protocol."""
        self._tenants.admit_operator(Caller.of(context))
        target = self._models.resolve(request.model)
        tokens, _ = await self._tokenize.prompt(request, target.tokenizer, target.group)
        _, hashes = self._tokenize.hash(tokens, target.group, request.tenant, request.adapter)
        rows = {row["name"]: row for row in self._rows()}
        found = self._core.longest_prefix(hashes) if len(hashes) else []
        holders = [
            pb.PrefixHolder(
                worker=worker_pb2.WorkerId(name=name, incarnation=rows[name]["incarnation"]),
                role=ROLES[rows[name]["role"]],
                blocks=blocks,
                tokens=blocks * target.group.block_tokens,
            )
            for name, blocks in sorted(found, key=lambda one: (-one[1], one[0]))
            if name in rows
        ]
        return pb.LookupPrefixResponse(prompt_tokens=len(tokens), prompt_blocks=len(hashes), holders=holders)

    async def TraceRequest(
        self, request: pb.TraceRequestRequest, context: Context
    ) -> pb.TraceRequestResponse:
        """See the protocol."""
        self._tenants.admit_operator(Caller.of(context))
        trace = self._traces.find(request.request_id)
        if trace is None:
            raise TwinpoolError(
                "REQUEST_NOT_FOUND",
                "this router has no request of that id; it keeps the last ones only",
                field="request_id",
            )
        return trace_message(trace)

    async def FetchRecording(
        self, request: pb.FetchRecordingRequest, context: Context
    ) -> AsyncIterator[pb.FetchRecordingResponse]:
        """See the protocol."""
        self._tenants.admit_operator(Caller.of(context))
        # Compressing takes some 10 ms a megabyte: not on the loop of the streams.
        log = await asyncio.to_thread(self._core.recorded)
        if not log:
            raise TwinpoolError("RECORDING_OFF")
        for at in range(0, len(log), self._chunk_bytes):
            yield pb.FetchRecordingResponse(total_bytes=len(log), data=log[at : at + self._chunk_bytes])

    def _rows(self) -> list[Row]:
        return self._core.workers()

    def _worker(self, row: Row, known: dict[WorkerKey, WorkerLocality]) -> pb.RouterWorker:
        key = WorkerKey(row["name"], row["incarnation"])
        message = pb.RouterWorker(
            worker=worker_pb2.WorkerId(name=key.name, incarnation=key.incarnation),
            role=ROLES[row["role"]],
            state=_STATES[row["state"]],
            reserved=pb.ReservedLoad(
                reservations=row["reservations"],
                prefill_tokens=row["reserved_prefill_tokens"],
                blocks=row["reserved_blocks"],
                sequences=row["reserved_sequences"],
                transfers=row["transfers"],
            ),
            locality=pb.LocalityStatus(indexed_blocks=row["indexed_blocks"]),
            served=row["served"],
        )
        reported = self._fleet.reported(key)
        if reported is not None:
            age, report = reported
            message.reported.age.CopyFrom(_duration(age))
            message.reported.running = report.running_requests
            message.reported.waiting = report.waiting_requests
            message.reported.queued_prefill_tokens = report.waiting_prefill_tokens
            message.reported.available_blocks = report.available_blocks
            message.reported.prefix_pinned_blocks = report.prefix_pinned_blocks
        status = known.get(key)
        if status is not None:
            _tell_locality(message.locality, status)
        return message


def _tell_locality(message: pb.LocalityStatus, status: WorkerLocality) -> None:
    message.state, message.cause, message.blocks = status.state, status.cause, status.blocks
    message.next_sequence = status.next_sequence
    message.resyncs, message.failures = status.resyncs, status.failures
    if status.heard_seconds >= 0:
        message.heard.CopyFrom(_duration(status.heard_seconds))


def trace_message(trace: Trace) -> pb.TraceRequestResponse:
    """A trace as operators get it."""
    message = pb.TraceRequestResponse(
        client_id=trace.client_id,
        request_id=trace.request_id,
        model=trace.model,
        pool=trace.pool,
        pool_reason=trace.pool_reason,
        prompt_tokens=trace.prompt_tokens,
        max_tokens=trace.max_tokens,
        state=trace.state,
        cause=trace.cause,
        obstacle=trace.obstacle,
        attempts=[_attempt(placement) for placement in trace.placements],
        events=[
            pb.TraceEvent(
                at=_duration(step.at),
                attempt=step.attempt,
                event=step.event,
                detail=step.detail,
                state=step.state,
            )
            for step in trace.steps
        ],
    )
    message.arrived.FromNanoseconds(int(trace.arrived * 1e9))
    return message


def _attempt(placement: Placement) -> pb.TraceAttempt:
    why: Row = placement.why
    message = pb.TraceAttempt(
        number=placement.number,
        placed=_duration(placement.at),
        pairs=why["pairs"],
        chosen=_candidate(why["chosen"]) if why["chosen"] is not None else None,
        others=[_candidate(other) for other in why["others"]],
    )
    if placement.prediction is not None:
        known = placement.prediction
        message.locality.query_tokens = known.query
        message.locality.best_tokens = known.best
        message.locality.selected_tokens = known.selected
        if known.actual is not None:
            message.locality.actual_tokens = known.actual
    return message


def _candidate(row: Row) -> pb.TraceCandidate:
    message = pb.TraceCandidate(local=row["local"], **{name: row[name] for name in _COUNTS})
    for name in ("prefill", "decode", "fetch_from"):
        if row[name] is not None:
            worker: worker_pb2.WorkerId = getattr(message, name)
            worker.name, worker.incarnation = row[name]
    for name in _TERMS:
        getattr(message, name).CopyFrom(_duration(row[f"{name}_seconds"]))
    return message


def _duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(max(0, int(seconds * 1e9)))
    return message
