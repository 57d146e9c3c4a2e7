# SPDX-License-Identifier: Apache-2.0
"""More than the cluster can do, and clients that do not read: who is not served hears so at once and before any work, and
nobody's memory grows. Nothing here depends on how fast the machine is; ``bench/overload.py`` has the figures."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest

from tests.support.asking import Outcome, ask
from tests.support.fleet import BLOCK, Fleet, running_fleet
from tests.support.steps import prompt
from tests.support.waiting import until
from twinpool.client import request
from twinpool.errors import from_rpc_error
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import inference_pb2_grpc

pytestmark = [pytest.mark.integration, pytest.mark.faults]

QUEUE = 6
BUFFERED = 100
PLACED_AT_MOST = 8
"""By the prefill window below, with one to spare."""
PROMPT = 4 * BLOCK
ROUTER = {
    "router.max_queue_requests": QUEUE,
    "router.prefill_window_tokens": 4 * PROMPT,
    "router.max_buffered_tokens": BUFFERED,
    "router.client_stall_seconds": 2,
    "router.queue_ttl_seconds": 600,
    "router.reserve_timeout_seconds": 300,
    "router.local_prefill": False,
    # Workers stand still for as long as a test needs, and are not to be taken for dead.
    "rpc.keepalive_seconds": 300,
}
LITTLE_AHEAD = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]
Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]

CROWD = 60
LARGE_CROWDS = 9
GROWTH_BYTES = 24 << 20
"""Far less than what the refused requests of all crowds would take, had anybody kept them."""
LONG_WAIT = 240.0


@pytest.fixture(scope="module")
def busy_fleet(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One worker of each role behind a router that queues little."""
    settings = {"kv.num_blocks": 400, "rpc.keepalive_seconds": 300}
    workers = {"prefill-0": "prefill", "decode-0": "decode"}
    with running_fleet(tmp_path_factory.mktemp("busy"), checkpoint, workers, settings) as made:
        asyncio.run(made.start_router(ROUTER))
        yield made


@pytest.fixture
async def busy(busy_fleet: Fleet) -> AsyncIterator[Fleet]:
    yield busy_fleet
    await busy_fleet.assert_quiet(within=LONG_WAIT)
    await busy_fleet.assert_router_quiet(within=LONG_WAIT)


@contextlib.contextmanager
def standing_still(fleet: Fleet) -> Iterator[None]:
    """No worker does anything meanwhile."""
    pids = [worker.process.pid for worker in fleet.live]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def crowd(fleet: Fleet, size: int, length: int = PROMPT) -> tuple[list[Outcome], list[Outcome]]:
    """Asks all at once while the workers stand still. Who was served in the end, and who was not."""
    async with fleet.client() as client, asyncio.timeout(LONG_WAIT):
        tasks = [
            asyncio.create_task(ask(client, fleet.oracle, prompt(length, 1000 + number), 3))
            for number in range(size)
        ]
        fit = PLACED_AT_MOST + QUEUE
        with standing_still(fleet):
            # Who does not fit is told while nobody can be served.
            await until(lambda: sum(task.done() for task in tasks) >= size - fit, LONG_WAIT)
        outcomes = await asyncio.gather(*tasks)
    served = [outcome for outcome in outcomes if outcome.error is None]
    assert len(served) >= QUEUE
    return served, [outcome for outcome in outcomes if outcome.error is not None]


async def test_who_does_not_fit_hears_so_at_once_with_a_reason_and_before_any_work(busy: Fleet) -> None:
    before = busy.router_metric("twinpool_router_attempts_total")
    served, refused = await crowd(busy, CROWD)
    assert len(refused) >= CROWD - PLACED_AT_MOST - QUEUE
    for outcome in refused:
        assert (outcome.reason, outcome.tokens) == ("QUEUE_FULL", [])
        assert outcome.error is not None
        assert outcome.error.metadata["limit"] == f"max_queue_requests={QUEUE}"
        assert outcome.error.retry_after is not None
        assert outcome.error.retry_after > 0
    # Nobody who was refused had been placed on any worker.
    assert busy.router_metric("twinpool_router_attempts_total") - before == len(served)


@pytest.mark.slow
@pytest.mark.timeout(2400)
async def test_nobody_keeps_anything_of_whom_it_refused(busy: Fleet) -> None:
    """The memory of router and workers after many crowds is that after the first ones."""
    processes = [psutil.Process(worker.process.pid) for worker in busy.live]
    assert busy.router is not None
    processes.append(psutil.Process(busy.router.pid))
    sizes: list[list[int]] = []
    for _ in range(LARGE_CROWDS):
        await crowd(busy, 2 * CROWD, length=3000)
        sizes.append([process.memory_info().rss for process in processes])
    growth = [last - early for early, last in zip(sizes[LARGE_CROWDS // 3], sizes[-1], strict=True)]
    print("growth in MiB:", [round(value / (1 << 20), 1) for value in growth])
    assert max(growth) < GROWTH_BYTES, sizes


@asynccontextmanager
async def unread(fleet: Fleet, message: pb.GenerateRequest) -> AsyncIterator[Call]:
    """A call of a client that reads the first event and then nothing. Its connection takes little ahead of its reads."""
    async with grpc.aio.insecure_channel(fleet.router_record.endpoint, LITTLE_AHEAD) as connection:
        call = inference_pb2_grpc.InferenceServiceStub(connection).Generate(message)
        assert isinstance(await call.read(), pb.GenerateResponse)
        try:
            yield call
        finally:
            call.cancel()


async def read_all(call: Call) -> None:
    """Raises what ended it."""
    while await call.read() is not grpc.aio.EOF:
        pass
    raise grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


@pytest.mark.parametrize("grace", [0, 30], ids=["plain", "resumable"])
async def test_a_client_that_does_not_read_is_ended_and_disturbs_nobody(busy: Fleet, grace: int) -> None:
    message = request(prompt(PROMPT, 5), max_tokens=3000, temperature=0.0, ignore_eos=True, logprobs=20)
    message.resume_grace.FromSeconds(grace)
    labels = {"reason": "CLIENT_TOO_SLOW"}
    before = busy.router_metric("twinpool_router_requests_total", **labels)
    async with unread(busy, message) as call, busy.client() as client:
        # Others are served while its answer is drawn, and after it was ended.
        for seed in range(3):
            outcome = await ask(client, busy.oracle, prompt(PROMPT, 50 + seed), 5)
            assert outcome.error is None
        # It was given up without one more read of it: no block, no seat and no answer is held for it.
        await busy.assert_quiet(within=LONG_WAIT)
        await busy.assert_router_quiet(within=LONG_WAIT)
        assert busy.router_metric("twinpool_router_requests_total", **labels) == before + 1
        # What it had been sent by then is there, then the reason.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        assert from_rpc_error(caught.value).reason == "CLIENT_TOO_SLOW"
