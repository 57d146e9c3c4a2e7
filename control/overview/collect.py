# SPDX-License-Identifier: Apache-2.0
"""Collects what workers and routers say of themselves into one overview.

Everybody is asked at once, each with a deadline. Whoever does not answer is shown as unreachable, with what it said last.
Nothing is asked while nobody wants to know; what several want to know at the same time is asked once.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

import grpc.aio

from twinpool.config import TwinpoolConfig
from twinpool.control.overview.links import Links, failure, router_links, worker_links
from twinpool.control.overview.rates import WorkerHistory
from twinpool.control.overview.roles import Desired, PoolBook
from twinpool.errors import TwinpoolError
from twinpool.sketch import summary
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import router_pb2, router_pb2_grpc, telemetry_pb2, worker_pb2, worker_pb2_grpc

FRESH_SECONDS: Final = 0.1
"""An overview that is so young is given again."""

ENDED_OPERATIONS: Final = 5
"""Ended operations that an overview shows."""

REQUESTS: Final = 100
REQUESTS_MAX: Final = 1000

Seen = tuple[str, int]


class View(Protocol):
    """What the store says; see ``ClusterView``."""

    def workers(self, pool: str = "") -> list[pb.WorkerRecord]: ...
    def routers(self) -> list[pb.RouterRecord]: ...


class Collector:
    """One a control process, on its event loop. ``overview`` is what `twinpool top`, the console page and the rebalancer see."""

    def __init__(
        self,
        config: TwinpoolConfig,
        view: View,
        operations: Callable[[], Sequence[pb.Operation]],
        desired: Desired | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``operations``: all that are known, the newest first. ``desired``: see ``PoolBook``; by default the configuration says it."""
        self._cluster = config.cluster.name
        self._view = view
        self._operations = operations
        self._clock = clock
        self._workers: Links = worker_links(config)
        self._routers: Links = router_links(config)
        self._pools = PoolBook(desired or partial(configured, config))
        self._histories: dict[Seen, WorkerHistory] = {}
        self._telemetry: dict[Seen, tuple[telemetry_pb2.RouterTelemetry, float]] = {}
        self._last: tuple[float, pb.Overview] | None = None
        self._asking: asyncio.Task[pb.Overview] | None = None

    async def close(self) -> None:
        """Ends what is being asked, and the connections."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await asyncio.gather(self._workers.close(), self._routers.close())

    async def overview(self, pool: str = "") -> pb.Overview:
        """The cluster now, with the workers of one pool or all. The message is the caller's own."""
        if self._last is not None and self._clock() < self._last[0] + FRESH_SECONDS:
            found = self._last[1]
        else:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.ensure_future(self._collect())
            # Another one may wait for the same: it goes on if this one is cancelled.
            found = await asyncio.shield(self._asking)
        copy = pb.Overview()
        copy.CopyFrom(found)
        if pool:
            kept = [worker for worker in copy.workers if worker.record.pool == pool]
            pools = [status for status in copy.pools if status.pool == pool]
            del copy.workers[:], copy.pools[:]
            copy.workers.extend(kept)
            copy.pools.extend(pools)
        return copy

    async def requests(self, asked: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
        """Requests of all routers, the newest first."""
        limit = min(asked.limit or REQUESTS, REQUESTS_MAX)
        request = router_pb2.ListRouterRequestsRequest(state=asked.state, pool=asked.pool, limit=limit)

        async def ask(connection: grpc.aio.Channel, seconds: float) -> router_pb2.ListRouterRequestsResponse:
            stub = router_pb2_grpc.RouterServiceStub(connection)
            return await stub.ListRouterRequests(request, timeout=seconds)

        endpoints = {
            record.name: record.endpoint
            for record in self._view.routers()
            if not asked.router or record.name == asked.router
        }
        if asked.router and not endpoints:
            raise TwinpoolError(
                "INVALID_ARGUMENT", f"there is no router {asked.router[:64]!r}", field="router"
            )
        answer = pb.ListRequestsResponse()
        found: list[telemetry_pb2.RequestSummary] = []
        for name, said in (await self._routers.ask(endpoints, ask)).items():
            if isinstance(said, TwinpoolError):
                answer.unreachable.append(name)
                continue
            answer.found += said.found
            found += said.requests
        found.sort(key=lambda one: one.arrived.ToNanoseconds(), reverse=True)
        answer.requests.extend(found[:limit])
        return answer

    async def prefixes(self, limit: int) -> list[telemetry_pb2.HotPrefix]:
        """The beginnings that prompts of late had in common, those whose blocks were used again most first; what several routers know
        is put together."""
        request = router_pb2.ListHotPrefixesRequest(limit=limit)

        async def ask(connection: grpc.aio.Channel, seconds: float) -> router_pb2.ListHotPrefixesResponse:
            return await router_pb2_grpc.RouterServiceStub(connection).ListHotPrefixes(
                request, timeout=seconds
            )

        endpoints = {record.name: record.endpoint for record in self._view.routers()}
        known: dict[bytes, telemetry_pb2.HotPrefix] = {}
        for said in (await self._routers.ask(endpoints, ask)).values():
            for one in () if isinstance(said, TwinpoolError) else said.prefixes:
                if (other := known.setdefault(one.block_hash, one)) is not one:
                    other.uses += one.uses
                    held = {share.worker.name for share in other.holders}
                    other.holders.extend(share for share in one.holders if share.worker.name not in held)
        return sorted(known.values(), key=lambda one: (-(one.uses - 1) * one.blocks, -one.uses))[:limit]

    async def _collect(self) -> pb.Overview:
        workers, routers = self._view.workers(), self._view.routers()
        told, heard = await asyncio.gather(self._ask_workers(workers), self._ask_routers(routers))
        overview = pb.Overview(
            cluster=self._cluster,
            pools=self._pools.pools(told, self._clock()),
            workers=told,
            routers=heard,
            operations=self._shown(),
        )
        overview.at.GetCurrentTime()
        alive = [router.telemetry for router in heard if router.reachable]
        for field in ("time_to_first_token", "inter_token_latency", "short_time_to_first_token"):
            sketches = [getattr(router, field) for router in alive]
            getattr(overview, field).CopyFrom(summary(sketches))
        self._last = (self._clock(), overview)
        return overview

    async def _ask_workers(self, records: Sequence[pb.WorkerRecord]) -> list[pb.WorkerStatus]:
        async def ask(connection: grpc.aio.Channel, seconds: float) -> worker_pb2.InspectResponse:
            stub = worker_pb2_grpc.WorkerServiceStub(connection)
            return await stub.Inspect(worker_pb2.InspectRequest(), timeout=seconds)

        await self._workers.keep({record.endpoint for record in records})
        answers = await self._workers.ask({one.worker.name: one.endpoint for one in records}, ask)
        seen = {(one.worker.name, one.worker.incarnation) for one in records}
        self._histories = {key: self._histories.get(key) or WorkerHistory() for key in seen}
        return [self._worker(record, answers[record.worker.name]) for record in records]

    def _worker(
        self, record: pb.WorkerRecord, answer: worker_pb2.InspectResponse | TwinpoolError
    ) -> pb.WorkerStatus:
        status = pb.WorkerStatus(record=record)
        history = self._histories[record.worker.name, record.worker.incarnation]
        if isinstance(answer, TwinpoolError):
            status.error = failure(answer)
        elif answer.worker != record.worker:
            status.error = "WORKER_LOST: another incarnation answers at its address"
        else:
            status.reachable = True
            history.hear(answer, self._clock())
        if history.heard is not None:
            status.counts.CopyFrom(history.heard.counts)
            status.age.FromNanoseconds(int((self._clock() - history.heard.at) * 1e9))
        if status.reachable:
            history.tell(status)
        return status

    async def _ask_routers(self, records: Sequence[pb.RouterRecord]) -> list[pb.RouterStatus]:
        async def ask(connection: grpc.aio.Channel, seconds: float) -> router_pb2.GetTelemetryResponse:
            stub = router_pb2_grpc.RouterServiceStub(connection)
            return await stub.GetTelemetry(router_pb2.GetTelemetryRequest(), timeout=seconds)

        await self._routers.keep({record.endpoint for record in records})
        answers = await self._routers.ask({one.name: one.endpoint for one in records}, ask)
        seen = {(one.name, one.incarnation) for one in records}
        self._telemetry = {key: old for key, old in self._telemetry.items() if key in seen}
        return [self._router(record, answers[record.name]) for record in records]

    def _router(
        self, record: pb.RouterRecord, answer: router_pb2.GetTelemetryResponse | TwinpoolError
    ) -> pb.RouterStatus:
        status, key = pb.RouterStatus(record=record), (record.name, record.incarnation)
        if isinstance(answer, TwinpoolError):
            status.error = failure(answer)
        else:
            status.reachable = True
            self._telemetry[key] = (answer.telemetry, self._clock())
        if key in self._telemetry:
            telemetry, at = self._telemetry[key]
            status.telemetry.CopyFrom(telemetry)
            status.age.FromNanoseconds(int((self._clock() - at) * 1e9))
        return status

    def _shown(self) -> list[pb.Operation]:
        """Those under way, then the last ones that ended."""
        known = self._operations()
        running = [one for one in known if one.state == pb.OPERATION_STATE_RUNNING]
        return running + [one for one in known if one.state != pb.OPERATION_STATE_RUNNING][:ENDED_OPERATIONS]


def configured(config: TwinpoolConfig, pool: str, role: "worker_pb2.Role.ValueType") -> int | None:
    """Workers that the configuration wants of a pool's role; None where this process runs none."""
    pools = config.pools
    if pool != config.worker.pool or not (pools.prefill_workers or pools.decode_workers):
        return None
    return pools.prefill_workers if role == worker_pb2.ROLE_PREFILL else pools.decode_workers
