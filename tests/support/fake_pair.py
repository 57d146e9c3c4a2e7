# SPDX-License-Identifier: Apache-2.0
"""Two real routers over the same fake workers, and streams that a test leaves and resumes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from tests.support.fake_cluster import Answer, FakeCluster, fake_cluster
from tests.support.fake_worker import Script
from tests.support.waiting import until
from twinpool.errors import from_rpc_error
from twinpool.membership import EventKind, MemberEvent
from twinpool.router.app import Router
from twinpool.v1 import control_pb2
from twinpool.v1 import inference_pb2 as pb

KEY = b"a key for both routers"


class Stream:
    """A stream of an answer, read in the background. ``leave`` drops it as a client that dies does."""

    def __init__(
        self, call: "grpc.aio.UnaryStreamCall[Any, pb.GenerateResponse | pb.ResumeResponse]"
    ) -> None:
        self.answer = Answer()
        self.offsets: dict[int, int] = {}
        self._call = call
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for event in self._call:
                self.answer.events.append(event.response if isinstance(event, pb.ResumeResponse) else event)
            self.answer.code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            self.answer.error, self.answer.code = from_rpc_error(error), error.code()
        except asyncio.CancelledError:
            self.answer.code = grpc.StatusCode.CANCELLED

    @property
    def token(self) -> bytes:
        """The resume token."""
        return self.answer.started.resume_token

    def next_index(self, n: int = 1) -> list[int]:
        """Tokens of each choice, those that an earlier stream of the client had included."""
        counts = [self.offsets.get(index, 0) for index in range(n)]
        for event in self.answer.events:
            if event.HasField("tokens"):
                counts[event.tokens.index] = event.tokens.offset + len(event.tokens.token_ids)
        return counts

    async def has(self, tokens: int) -> None:
        """Waits until so many tokens have come, over all choices."""
        await until(lambda: self._count() >= tokens or self._task.done(), 60.0)
        assert self._count() >= tokens, f"ended: {self.answer.error}"

    def _count(self) -> int:
        return sum(len(event.tokens.token_ids) for event in self.answer.events)

    async def started(self) -> None:
        await until(lambda: self.answer.events or self._task.done(), 60.0)

    async def leave(self) -> None:
        self._call.cancel()
        await self._task

    async def ended(self) -> Answer:
        await self._task
        return self.answer


class FakePair:
    """``one`` and ``other``: clusters that share their workers. Only the other one may be lost."""

    def __init__(self, one: FakeCluster, other: FakeCluster) -> None:
        self.one = one
        self.other = other
        self.lost = False
        for cluster in (one, other):
            cluster.router.seal.use(KEY)
        self.meet()

    def meet(self) -> None:
        """Each router learns of the other one, as from etcd."""
        for cluster, peer in ((self.one, self.other), (self.other, self.one)):
            record = control_pb2.RouterRecord(
                name=peer.router.name, incarnation=peer.router.incarnation, endpoint=peer.router.endpoint
            )
            cluster.router.others.on_member(MemberEvent(EventKind.ADDED, record))

    async def lose(self) -> None:
        """The other router's streams break, to workers first: as near to a kill as one process allows. Its record stays."""
        self.lost = True
        await self.other.router.fleet.close()
        await self.other.router.stop(0.0)
        await until(lambda: all(len(made.sessions) <= 1 for made in self.one.workers.values()))

    def generate(self, cluster: FakeCluster, request: pb.GenerateRequest) -> Stream:
        return Stream(cluster.stub.Generate(request))

    def resume(
        self, cluster: FakeCluster, token: bytes, next_index: Sequence[int] = (), tenant: str = ""
    ) -> Stream:
        request = pb.ResumeRequest(token=token, next_index=next_index, tenant=tenant)
        stream = Stream(cluster.stub.Resume(request))
        stream.offsets = dict(enumerate(next_index))
        return stream

    async def assert_quiescent(self) -> None:
        """Nothing is left on workers, and nothing runs on a router."""
        for cluster in (self.one,) if self.lost else (self.one, self.other):
            await cluster.assert_quiescent()


def whole(before: Stream, after: Stream, index: int = 0) -> tuple[list[int], str]:
    """Tokens and text of a choice over two streams; fails if a token is missing or came twice."""
    ids = before.answer.tokens(index)
    text = before.answer.text(index)
    for event in after.answer.events:
        if event.HasField("tokens") and event.tokens.index == index:
            assert event.tokens.offset == len(ids), "a token was skipped or came twice"
            ids += event.tokens.token_ids
            text += event.tokens.text
    return ids, text


@asynccontextmanager
async def fake_pair(
    model_path: Path,
    *,
    prefill: int = 1,
    decode: int = 2,
    script: Script | None = None,
    prefill_script: Script | None = None,
    settings: dict[str, object] | None = None,
    pools: dict[str, object] | None = None,
    **record: object,
) -> AsyncIterator[FakePair]:
    """``script``: of the decode workers. The rest: see ``fake_cluster``."""
    async with fake_cluster(
        model_path,
        prefill=prefill,
        decode=decode,
        prefill_script=prefill_script,
        decode_script=script,
        settings=settings,
        pools=pools,
        **record,
    ) as one:
        router = Router(one.router.config, "router-other")
        await router.start()
        other = FakeCluster(router, one.fabric, one.live)
        other.workers = one.workers
        for made in one.workers.values():
            router.fleet.upsert(made.record())
        pair = FakePair(one, other)
        try:
            await other.ready()
            yield pair
        finally:
            await other.channel.close(None)
            if not pair.lost:
                await router.stop(0.0)
