# SPDX-License-Identifier: Apache-2.0
"""A worker that leaves offers its most used prefixes to those that stay, so that what it has computed is not computed again.

It names them to workers of its kind, those of its role first, and each of them pulls its share while this worker still
answers. Bounded by time and by bytes; whatever fails of it costs a prefix, never the drain.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import grpc
import grpc.aio

from twinpool import metrics
from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.membership import RecordError, parse, takes_work
from twinpool.store import Keys, Store
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1 import worker_pb2_grpc
from twinpool.v1.control_pb2 import WorkerRecord
from twinpool.worker.chains import CHAINS_MAX, chain_message
from twinpool.worker.heat import Chain

TAKERS_MAX: Final = 4
"""Workers that a prefix set is shared out to. More would each hold too little of it to draw anybody."""

GRACE_SECONDS: Final = 1.0
"""How much longer than the pulls the answer may take."""

log = get_logger(__name__)


def takers(records: list[WorkerRecord], own: WorkerRecord) -> list[WorkerRecord]:
    """Who may take prefixes of ``own``: ready workers with the same layout; those of the same role if there are any."""
    fit = [
        record
        for record in records
        if takes_work(record)
        and record.fingerprint == own.fingerprint
        and record.worker.name != own.worker.name
    ]
    alike = [record for record in fit if record.role == own.role]
    return sorted(alike or fit, key=lambda record: record.worker.name)[:TAKERS_MAX]


def share_out(chains: list[Chain], count: int) -> list[list[Chain]]:
    """Each chain to the share with the fewest blocks; the most used ones first in each."""
    shares: list[list[Chain]] = [[] for _ in range(count)]
    blocks = [0] * count
    for chain in chains:
        least = blocks.index(min(blocks))
        shares[least].append(chain)
        blocks[least] += len(chain.hashes)
    return shares


class PrefixOffer:
    """One a worker. On the event loop."""

    def __init__(
        self,
        store: Store,
        cluster: str,
        own: WorkerRecord,
        connect: Callable[[str], grpc.aio.Channel],
        seconds: float,
    ) -> None:
        self._store = store
        self._keys = Keys(cluster)
        self._own = own
        self._connect = connect
        self._seconds = seconds

    async def make(self, chains: list[Chain]) -> int:
        """Offers ``chains``; how many blocks were taken. Never raises; takes little more than the configured time."""
        try:
            async with asyncio.timeout(self._seconds + GRACE_SECONDS):
                records = await asyncio.to_thread(self._records)
                chosen = takers(records, self._own)
                if not chosen or not chains:
                    return 0
                shares = share_out(chains[: CHAINS_MAX * len(chosen)], len(chosen))
                asked = [self._ask(*pair) for pair in zip(chosen, shares, strict=True) if pair[1]]
                blocks = sum(await asyncio.gather(*asked))
        except TimeoutError:
            log.warning("prefix_offer_timeout", seconds=self._seconds)
            return 0
        except TwinpoolError as error:
            log.warning("prefix_offer_failed", reason=error.reason, detail=error.message)
            return 0
        metrics.WORKER_OFFERED_BLOCKS.inc(blocks)
        log.info("prefixes_offered", workers=len(chosen), chains=len(chains), blocks_taken=blocks)
        return blocks

    def _records(self) -> list[WorkerRecord]:
        items = self._store.list_prefix(self._keys.workers(self._own.pool)).items
        records = []
        for key, item in items.items():
            with contextlib.suppress(RecordError):
                records.append(parse(self._keys, WorkerRecord, key, item.value))
        return records

    async def _ask(self, taker: WorkerRecord, share: list[Chain]) -> int:
        request = pb.TakePrefixesRequest(
            owner=self._own.worker,
            endpoint=self._own.endpoint,
            chains=[chain_message(chain) for chain in share[:CHAINS_MAX]],
        )
        request.deadline.FromNanoseconds(int(self._seconds * 1e9))
        key = WorkerKey(taker.worker.name, taker.worker.incarnation)
        try:
            async with self._connect(taker.endpoint) as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                taken = await stub.TakePrefixes(request, timeout=self._seconds + GRACE_SECONDS)
        except grpc.RpcError as error:
            log.warning("prefixes_not_taken", taker=str(key), detail=str(error)[:200])
            return 0
        return int(taken.blocks)
