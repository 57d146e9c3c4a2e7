# SPDX-License-Identifier: Apache-2.0
"""Asks the other routers, and then the workers, for an answer that is not here.

A router that lives has the answer's journal. Of one that is lost, the decode workers keep the prompt and the tokens drawn.
All are asked at once, and for a bounded time.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import grpc
import grpc.aio

from twinpool.errors import TwinpoolError
from twinpool.errors.table import TABLE
from twinpool.logs import get_logger
from twinpool.membership import EventKind, MemberEvent
from twinpool.router.resume_token import TokenSeal
from twinpool.v1 import router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from twinpool.v1.control_pb2 import RouterRecord
from twinpool.v1.resume_pb2 import PortableState

log = get_logger(__name__)

_MUTED_SECONDS: Final = 1.0


@dataclass(slots=True)
class Found:
    """What came of asking. ``source``: "router" or "worker". ``pending``: names of routers on which a request with the key is
    about to start. ``error``: how the answer has ended. ``answered``: how many of those that were asked said anything."""

    states: list[PortableState] = field(default_factory=list)
    source: str = ""
    pending: list[str] = field(default_factory=list)
    error: TwinpoolError | None = None
    answered: int = 0
    unreachable: int = 0

    def heard(self, router: str, said: router_pb2.HandOverResponse) -> None:
        """What a router said."""
        if said.HasField("state"):
            self.states.append(said.state)
        if said.pending:
            self.pending.append(router)
        if said.error_reason:
            reason = said.error_reason if said.error_reason in TABLE else "INTERNAL"
            self.error = TwinpoolError(reason, said.error_message)


class OtherRouters:
    """Follows the routers of the cluster, but for this one. ``workers`` names the endpoints of all decode workers,
    which ``connect_worker`` dials, as ``connect`` dials routers."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        connect: Callable[[str], grpc.aio.Channel],
        connect_worker: Callable[[str], grpc.aio.Channel],
        workers: Callable[[], list[str]],
        timeout_seconds: float,
        seal: TokenSeal,
    ) -> None:
        self._own = (name, incarnation)
        self._connect = connect
        self._connect_worker = connect_worker
        self._workers = workers
        self._timeout = timeout_seconds
        self._seal = seal
        self._routers: dict[str, RouterRecord] = {}
        self._muted: dict[str, float] = {}

    def on_member(self, event: MemberEvent[RouterRecord]) -> None:
        """A router came, changed or went."""
        record = event.record
        if (record.name, record.incarnation) == self._own:
            return
        if event.kind is EventKind.REMOVED:
            self._routers.pop(record.name, None)
            self._muted.pop(record.name, None)
        else:
            self._routers[record.name] = record

    @property
    def name(self) -> str:
        """Of this router."""
        return self._own[0]

    @property
    def alive(self) -> bool:
        """Whether there are others, as far as their registrations say."""
        return bool(self._routers)

    async def ask_routers(
        self, stream_id: str = "", key: bytes = b"", *, digest: bytes = b"", forget: bool = False
    ) -> Found:
        """Whoever has it hands it over, and makes it no more. By ``key``: only if its request has this ``digest``; and a router
        that has just not answered is not waited for again, since every request with a key waits for this."""
        request = router_pb2.HandOverRequest(
            stream_id=stream_id, key=key, digest=digest, forget=forget, asker=self._own[0]
        )
        self._seal.sign(request)
        found = Found(source="router")

        async def ask(record: RouterRecord) -> None:
            try:
                async with self._connect(record.endpoint) as channel:
                    stub = router_pb2_grpc.RouterServiceStub(channel)
                    said: router_pb2.HandOverResponse = await stub.HandOver(request, timeout=self._timeout)
            except grpc.aio.AioRpcError:
                self._muted[record.name] = time.monotonic() + _MUTED_SECONDS
                raise
            self._muted.pop(record.name, None)
            found.heard(record.name, said)

        now = time.monotonic()
        asked = [one for one in self._routers.values() if stream_id or self._muted.get(one.name, 0.0) <= now]
        found.unreachable = len(self._routers) - len(asked)
        await self._all(found, [ask(record) for record in asked])
        return found

    async def ask_workers(
        self, stream_id: str = "", key: bytes = b"", *, digest: bytes = b"", forget: bool = False
    ) -> Found:
        """What they keep of it; an attempt of it that still runs ends. By ``key``: as for routers."""
        request = worker_pb2.TakeOverRequest(stream_id=stream_id, key=key, digest=digest, forget=forget)
        found = Found(source="worker")

        async def ask(endpoint: str) -> None:
            async with self._connect_worker(endpoint) as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                said: worker_pb2.TakeOverResponse = await stub.TakeOver(request, timeout=self._timeout)
            if said.HasField("state"):
                found.states.append(said.state)

        await self._all(found, [ask(endpoint) for endpoint in self._workers()])
        return found

    async def _all(self, found: Found, asking: "Iterable[asyncio._CoroutineLike[None]]") -> None:
        for result in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(result, grpc.aio.AioRpcError):
                found.unreachable += 1
                log.info("peer_not_asked", code=result.code().name)
            elif isinstance(result, BaseException):
                raise result
            else:
                found.answered += 1
