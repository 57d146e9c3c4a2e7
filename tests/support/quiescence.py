# SPDX-License-Identifier: Apache-2.0
"""The quiescence check: a cluster at rest holds nothing."""

import asyncio
import time
from collections.abc import Iterable

from twinpool.config import RpcConfig
from twinpool.rpc import channel
from twinpool.v1 import worker_pb2, worker_pb2_grpc

QUIET_SECONDS = 20.0
"""Many times what it takes, and still well under the usual lease of 30 s: nothing may have waited for a lease to end."""


async def inspect(endpoint: str) -> worker_pb2.InspectResponse:
    """A worker's own counts."""
    async with channel(endpoint, RpcConfig()) as connection:
        return await worker_pb2_grpc.WorkerServiceStub(connection).Inspect(
            worker_pb2.InspectRequest(), timeout=10
        )


def unrest(counts: worker_pb2.InspectResponse) -> list[str]:
    """What a worker still holds; empty at rest."""
    held = {
        "requests": counts.requests,
        "held blocks": counts.held_blocks,
        "pinned blocks": counts.pinned_blocks,
        "quarantined blocks": counts.quarantined_blocks,
        "transfers": counts.transfers,
    }
    found = [f"{name}: {value}" for name, value in held.items() if value]
    if counts.free_blocks + counts.cached_blocks != counts.total_blocks:
        found.append(
            f"free {counts.free_blocks} + cached {counts.cached_blocks} != total {counts.total_blocks}"
        )
    return found


async def assert_quiescent(endpoints: Iterable[str], *, within: float = QUIET_SECONDS) -> None:
    """Polls every worker until it holds nothing; fails with what is left after ``within`` seconds."""
    deadline = time.monotonic() + within
    pending = list(endpoints)
    while True:
        left = {}
        for endpoint in pending:
            counts = await inspect(endpoint)
            if found := unrest(counts):
                left[f"{counts.worker.name}@{endpoint}"] = found
        if not left:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"not quiescent after {within} s: {left}")
        await asyncio.sleep(0.02)
