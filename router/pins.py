# SPDX-License-Identifier: Apache-2.0
"""Asks workers to keep prefixes in their caches, and to let go of them.

Workers keep the books: what is pinned, for whom, until when. A router remembers nothing that it could not find out again, so
any router renews and releases what another one has pinned, and no two can count differently.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import grpc
import grpc.aio
import numpy as np
from google.protobuf.duration_pb2 import Duration
from numpy.typing import NDArray

from twinpool.config import SessionsSection
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.kv_events import HASH_BYTES
from twinpool.logs import get_logger
from twinpool.router.placement import Fleet
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import worker_pb2 as worker
from twinpool.v1 import worker_pb2_grpc
from twinpool.v1.control_pb2 import WorkerRecord

log = get_logger(__name__)

HOLDERS_ASKED_MAX: Final = 8
"""Most workers that are asked whether they have a pin that this router knows nothing of."""

ROUNDS_MAX: Final = 3
"""How often a prompt is computed that is evicted again before it could be pinned."""

T = TypeVar("T")


class Pins:
    """One a router. On the event loop."""

    def __init__(self, config: SessionsSection, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        # Where pins were made or renewed last: asked first, and asked alone if they have it.
        self._where: OrderedDict[bytes, str] = OrderedDict()

    def wanted(
        self,
        tenant: str,
        session: bytes,
        chain: worker.PrefixChain,
        pin: Duration,
        max_tokens: int,
        tokens: int,
    ) -> worker.PinPrefixRequest:
        """What to ask of a worker. ``tokens``: of the chain; ``max_tokens``: the tenant's quota.

        Raises INVALID_PIN, or PIN_QUOTA for what no worker would grant.
        """
        seconds, most = pin.ToNanoseconds() / 1e9, self._config.max_pin_seconds
        if not 0 < seconds <= most:
            detail = f"pin is {seconds:g} s; the limit is above 0 and at most {most:g}"
            raise TwinpoolError("INVALID_PIN", detail, field="pin", metadata={"limit": most})
        if not chain.block_hashes:
            detail = "the prompt is shorter than one block; the limit is at least one"
            raise TwinpoolError("INVALID_PIN", detail, field="request")
        if tokens > max_tokens:
            detail = (
                f"{tokens} tokens are to be pinned; the limit of the tenant on one worker is {max_tokens}"
            )
            raise TwinpoolError("PIN_QUOTA", detail, metadata={"limit": max_tokens})
        return worker.PinPrefixRequest(
            tenant=tenant, session=session, chain=chain, lease=pin, max_tenant_tokens=max_tokens
        )

    async def renew(self, wanted: worker.PinPrefixRequest, hashes: NDArray[np.uint8]) -> pb.PrefixPin | None:
        """Makes the pin longer where it is. None: it is nowhere, as far as can be known. Raises what the worker refuses."""
        request = worker.PinPrefixRequest()
        request.CopyFrom(wanted)
        request.renew = True
        known = self._where.get(_name(wanted), "")
        if known and (pin := await self._pin(known, request)) is not None:
            return pin
        holders = [name for name, blocks in self._fleet.core.longest_prefix(hashes) if blocks == len(hashes)]
        asked = [name for name in holders if name != known][:HOLDERS_ASKED_MAX]
        for found in await asyncio.gather(
            *(self._pin(name, request) for name in asked), return_exceptions=True
        ):
            if isinstance(found, BaseException):
                raise found
            if found is not None:
                return found
        return None

    async def make(
        self, wanted: worker.PinPrefixRequest, compute: Callable[[], Awaitable[pb.GenerateFinished]]
    ) -> tuple[pb.GenerateFinished, pb.PrefixPin]:
        """Pins the prefix where ``compute`` has computed its prompt. Raises NO_CAPACITY if it was evicted each time before."""
        for _ in range(ROUNDS_MAX):
            finished = await compute()
            pin = await self._pin(finished.prefill_worker, wanted)
            if pin is not None:
                return finished, pin
        detail = f"the prompt was computed {ROUNDS_MAX} times and could not be kept"
        raise TwinpoolError("NO_CAPACITY", detail, retry_after=1.0)

    async def release(self, request: worker.ReleasePrefixRequest) -> pb.ReleaseResponse:
        """Asks every worker: a pin may have been made by another router."""
        answer = pb.ReleaseResponse()

        async def ask(record: WorkerRecord) -> None:
            try:
                said = await self._ask(
                    record, lambda stub, seconds: stub.ReleasePrefix(request, timeout=seconds)
                )
            except grpc.aio.AioRpcError as error:
                log.info("pins_not_released", worker=record.worker.name, code=error.code().name)
                answer.unreachable_workers += 1
                return
            answer.pins += said.pins
            answer.tokens += said.tokens
            answer.demoted_tokens += said.demoted_tokens

        await asyncio.gather(*(ask(record) for record in self._fleet.records()))
        return answer

    async def _pin(self, name: str, request: worker.PinPrefixRequest) -> pb.PrefixPin | None:
        """None: the worker has not all of it, or cannot be asked."""
        record = next((record for record in self._fleet.records() if record.worker.name == name), None)
        if record is None:
            return None
        try:
            said = await self._ask(record, lambda stub, seconds: stub.PinPrefix(request, timeout=seconds))
        except grpc.aio.AioRpcError as error:
            found = from_rpc_error(error)
            if found.reason in ("PIN_QUOTA", "PIN_CAPACITY", "INVALID_PIN"):
                raise found from None
            log.info("prefix_not_pinned", worker=name, reason=found.reason)
            return None
        if not said.pin_id:
            return None
        self._note(_name(request), name)
        return pb.PrefixPin(id=said.pin_id, worker=name, tokens=said.tokens, expires_in=said.expires_in)

    async def _ask(
        self,
        record: WorkerRecord,
        call: Callable[["worker_pb2_grpc.WorkerServiceAsyncStub", float], Awaitable[T]],
    ) -> T:
        async with self._fleet.connect(record.endpoint) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            return await call(stub, self._config.call_timeout_seconds)

    def _note(self, name: bytes, where: str) -> None:
        self._where[name] = where
        self._where.move_to_end(name)
        while len(self._where) > self._config.max_sessions:
            self._where.popitem(last=False)


def _name(request: worker.PinPrefixRequest) -> bytes:
    last = request.chain.block_hashes[-HASH_BYTES:]
    return b"\0".join((request.tenant.encode(), request.session.hex().encode(), last))
