# SPDX-License-Identifier: Apache-2.0
"""The calls of operators, and those of workers but for their streams: servers of their own, with little behind them.

A call is refused with a row of the error table or answered; a refusal is never as large as its request; and whatever was asked,
the next call is answered.
"""

import asyncio
import time
from concurrent.futures import Future
from contextlib import AsyncExitStack
from functools import cache
from typing import Any

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from tests.fuzz.shake import message_mutator
from tests.fuzz.target import Target
from twinpool import rpc
from twinpool._core import BlockManager, SchedulerConfig, StepScheduler
from twinpool.config import RpcConfig, SessionsSection, TwinpoolConfig
from twinpool.control.operations import Operations
from twinpool.control.overview.collect import Collector
from twinpool.control.service import ControlServicer
from twinpool.errors import TABLE, from_rpc_error
from twinpool.ids import WorkerKey
from twinpool.v1 import control_pb2, control_pb2_grpc, worker_pb2, worker_pb2_grpc
from twinpool.worker.commands import Limits, worker_id
from twinpool.worker.prefix_pins import PrefixPins
from twinpool.worker.prefix_take import PrefixTaker
from twinpool.worker.session import WorkerService

METHODS: list[tuple[str, type]] = [
    ("ControlService/ListWorkers", control_pb2.ListWorkersRequest),
    ("ControlService/DrainWorker", control_pb2.DrainWorkerRequest),
    ("ControlService/RestartWorker", control_pb2.RestartWorkerRequest),
    ("ControlService/FlipWorker", control_pb2.FlipWorkerRequest),
    ("ControlService/RebalancePool", control_pb2.RebalancePoolRequest),
    ("ControlService/GetOperation", control_pb2.GetOperationRequest),
    ("ControlService/ListOperations", control_pb2.ListOperationsRequest),
    ("WorkerService/Inspect", worker_pb2.InspectRequest),
    ("WorkerService/TakeOver", worker_pb2.TakeOverRequest),
    ("WorkerService/Drain", worker_pb2.DrainRequest),
    ("WorkerService/ChangeRole", worker_pb2.ChangeRoleRequest),
    ("WorkerService/TakePrefixes", worker_pb2.TakePrefixesRequest),
    ("WorkerService/PinPrefix", worker_pb2.PinPrefixRequest),
    ("WorkerService/ReleasePrefix", worker_pb2.ReleasePrefixRequest),
    ("ControlService/GetOverview", control_pb2.GetOverviewRequest),
    ("ControlService/ListRequests", control_pb2.ListRequestsRequest),
]
KINDS = [kind for _, kind in METHODS]
KEY = WorkerKey("w", 7)
CALL_SECONDS = 60.0


class Records:
    """A store that takes everything, and a view of one worker."""

    def workers(self, pool: str = "") -> list[control_pb2.WorkerRecord]:
        record = control_pb2.WorkerRecord(
            worker=worker_id(KEY), pool="default", role=worker_pb2.ROLE_DECODE, endpoint="127.0.0.1:1"
        )
        return [record] if pool in ("", record.pool) else []

    def routers(self) -> list[control_pb2.RouterRecord]:
        return [control_pb2.RouterRecord(name="r", endpoint="127.0.0.1:1")]

    def put(self, *_args: Any, **_kwargs: Any) -> None: ...

    def delete(self, *_args: Any, **_kwargs: Any) -> None: ...


class Still(Operations):
    """Records operations and takes no step of them."""

    def _spawn(self, operation: control_pb2.Operation) -> None:
        operation.state = control_pb2.OPERATION_STATE_SUCCEEDED


class Loop:
    """A step loop that does at once what it is asked for, for a role that keeps nothing."""

    def __init__(self) -> None:
        self.role = self
        self.attempts = 0

    def call(self, do: Any) -> Any:
        done: Future[Any] = Future()
        done.set_result(do())
        return done

    def post(self, do: Any) -> None:
        do()

    def take_over(self, stream: str, key: bytes, digest: bytes, forget: bool) -> None: ...


class Nothing:
    """Counts nothing and fetches nothing."""

    def __init__(self) -> None:
        self.drained: list[float | None] = []

    async def inspect(self, sessions: int) -> worker_pb2.InspectResponse:
        return worker_pb2.InspectResponse(worker=worker_id(KEY), sessions=sessions)

    def start(self, _key: Any, _prompt: Any, _source: Any, ended: Any) -> None:
        ended(worker_pb2.PrefixFetched(failure=worker_pb2.FAILURE_REASON_NOT_CACHED))


CHAIN = bytes(range(32))


def pins_over(blocks: BlockManager, generations: NDArray[np.uint64], limits: Limits) -> PrefixPins:
    """The books of a worker that has two blocks cached."""
    given = blocks.allocate(2)
    assert given is not None
    blocks.commit(given, np.frombuffer(CHAIN, np.uint8).reshape(2, 16), bytes(16))
    blocks.release(given)
    scheduler = StepScheduler(blocks, SchedulerConfig(max_num_seqs=8))
    return PrefixPins(blocks, generations, scheduler, limits, SessionsSection(), time.monotonic)


class World:
    """Both servers as one, for the life of the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.nothing = Nothing()
        self.stack = AsyncExitStack()
        self.channel: grpc.aio.Channel = self.loop.run_until_complete(self._start())

    async def _start(self) -> grpc.aio.Channel:
        records: Any = Records()
        nothing: Any = self.nothing
        steps: Any = Loop()
        limits = Limits(16, 64, 512, 8, 300)
        generations = np.zeros(64, np.uint64)
        self.blocks = BlockManager(64, 16, generations)
        operations = Still(records, TwinpoolConfig(), records, nothing, nothing)
        collector = Collector(TwinpoolConfig(), records, operations.all)
        self.stack.push_async_callback(collector.close)
        service = WorkerService(
            worker=KEY, limits=limits, loop=steps, inspector=nothing, heat=nothing,
            taker=PrefixTaker(steps, nothing, limits), on_drain=self.nothing.drained.append,
            on_cordon=lambda _cordoned: None,
            pins=pins_over(self.blocks, generations, limits),
            on_change_role=lambda *_asked: worker_pb2.ChangeRoleResponse(),
        )  # fmt: skip
        server = rpc.Server(RpcConfig())
        server.add(
            "twinpool.v1.ControlService",
            control_pb2_grpc.add_ControlServiceServicer_to_server,
            ControlServicer(records, operations, collector=collector),
        )
        server.add("twinpool.v1.WorkerService", worker_pb2_grpc.add_WorkerServiceServicer_to_server, service)
        target = f"127.0.0.1:{server.bind('127.0.0.1')}"
        await server.start()
        self.stack.push_async_callback(server.stop, 0.0)
        return await self.stack.enter_async_context(rpc.channel(target, RpcConfig()))

    async def call(self, method: str, data: bytes) -> grpc.aio.AioRpcError | None:
        plain: Any = {"request_serializer": None, "response_deserializer": None}
        try:
            await self.channel.unary_unary(f"/twinpool.v1.{method}", **plain)(data, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            return error
        return None


@cache
def world() -> World:
    return World()


def close() -> None:
    """Ends the servers."""
    if world.cache_info().currsize:
        made = world()
        world.cache_clear()
        made.loop.run_until_complete(made.stack.aclose())
        made.loop.run_until_complete(made.loop.shutdown_asyncgens())
        made.loop.close()


def run(data: bytes) -> None:
    method, kind = METHODS[data[0] % len(METHODS) if data else 0]
    made = world()
    error = made.loop.run_until_complete(made.call(method, data[1:]))
    if error is not None:
        known = from_rpc_error(error)
        parses = True
        try:
            kind.FromString(data[1:])  # type: ignore[attr-defined]
        except Exception:
            parses = False
        # gRPC's own answer to bytes that are no message.
        assert not parses or error.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), known
        assert known.reason in TABLE
        assert len(known.message) < 2000, "a message of the size of its request"
        assert error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED, known
    made.blocks.check()
    assert made.blocks.prefix_pinned_blocks <= 16, "more than the share of pins"
    asked, made.nothing.drained[:] = list(made.nothing.drained), []
    assert all(seconds is None or 0 <= seconds <= 86400 for seconds in asked), asked


def seeds() -> list[bytes]:
    chain = worker_pb2.PrefixChain(block_hashes=CHAIN, root_hash=bytes(16))
    pinned = worker_pb2.PinPrefixRequest(tenant="t", session=bytes(16), chain=chain, max_tenant_tokens=64)
    pinned.lease.FromSeconds(5)
    taken = worker_pb2.TakePrefixesRequest(
        owner=worker_id(WorkerKey("o", 3)), endpoint="127.0.0.1:1", chains=[chain]
    )
    taken.deadline.FromSeconds(5)
    drain = worker_pb2.DrainRequest(worker=worker_id(KEY))
    drain.timeout.FromSeconds(9)
    left = control_pb2.DrainWorkerRequest(worker="w")
    left.timeout.FromSeconds(9)
    requests: list[Any] = [
        control_pb2.ListWorkersRequest(pool="default"),
        left,
        control_pb2.RestartWorkerRequest(worker="w"),
        control_pb2.RebalancePoolRequest(pool="default", prefill=3, decode=1, dry_run=True),
        control_pb2.GetOperationRequest(id="w-1"),
        control_pb2.ListOperationsRequest(),
        worker_pb2.InspectRequest(),
        worker_pb2.TakeOverRequest(stream_id="s", key=bytes(32), digest=bytes(32)),
        worker_pb2.DrainRequest(worker=worker_id(KEY)),
        drain,
        taken,
        pinned,
        worker_pb2.ReleasePrefixRequest(tenant="t", session=bytes(16)),
        worker_pb2.ReleasePrefixRequest(tenant="t", pin_id="0" * 32),
        worker_pb2.ReleasePrefixRequest(tenant="t", chain=chain),
    ]
    return [bytes([KINDS.index(type(made))]) + made.SerializeToString() for made in requests]


TARGETS = {"cluster": Target("cluster", run, seeds, message_mutator(KINDS), close)}
