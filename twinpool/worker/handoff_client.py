# SPDX-License-Identifier: Apache-2.0
"""Links to the owners that this worker reads from: dial, connect, then one Exchange stream each.

A link is made when the first message for an owner is due and lives until either side ends. What was expected over
a link that ends has failed, so a link is never repaired: the next message for the owner makes a new one.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import grpc.aio

from twinpool import errors, metrics, rpc
from twinpool.config import RpcConfig, TlsConfig
from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.transfer.base import AttemptKey, PeerDescriptor, TransferError
from twinpool.transfer.descriptor import DescriptorError, from_message, to_message, worker_message
from twinpool.v1 import handoff_pb2, handoff_pb2_grpc
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.commands import Reason
from twinpool.worker.handoff_server import descriptor_error
from twinpool.worker.step_loop import StepLoop
from twinpool.worker.streams import MessageQueue

log = get_logger(__name__)

_FENCED = frozenset({"FINGERPRINT_MISMATCH", "INCARNATION_MISMATCH", "DESCRIPTOR_INVALID"})


class Peers(Protocol):
    """Loads and forgets peers' metadata; the calls run on the transfer thread."""

    async def connect(self, peer: PeerDescriptor) -> None:
        """Raises TransferError."""

    def disconnect(self, peer: WorkerKey) -> None:
        """Unknown peers are ignored. Returns at once."""


@dataclass(slots=True)
class OwnerLink:
    """The link to one incarnation of one owner. ``expected`` are the attempts that fail if it ends."""

    owner: WorkerKey
    endpoint: str
    out: MessageQueue[handoff_pb2.ExchangeRequest] = field(default_factory=MessageQueue)
    expected: set[AttemptKey] = field(default_factory=set)
    task: asyncio.Task[None] | None = None

    def send(self, message: handoff_pb2.ExchangeRequest) -> None:
        """Queues a message and keeps count of what is expected over this link."""
        kind = message.WhichOneof("message")
        if kind == "expect":
            self.expected.add(AttemptKey.of(message.expect.id))
        elif kind == "fetch":
            self.expected.add(AttemptKey.of(message.fetch.id))
        elif kind == "release":
            self.expected.discard(AttemptKey.of(message.release.id))
        self.out.send(message)


class OwnerLinks:
    """All links of this worker as a reader. Used on the asyncio thread alone."""

    def __init__(
        self, *, own: PeerDescriptor, peers: Peers, loop: StepLoop, config: RpcConfig, tls: TlsConfig
    ) -> None:
        self._own = own
        self._own_message = to_message(own)
        self._peers = peers
        self._loop = loop
        self._config = config
        self._tls = tls
        self._links: dict[WorkerKey, OwnerLink] = {}
        self._closed = False

    @property
    def links(self) -> int:
        """Links that are up or being made."""
        return len(self._links)

    def deliver(self, owner: WorkerKey, endpoint: str, message: handoff_pb2.ExchangeRequest) -> None:
        """Queues a message. With an ``endpoint`` a missing link is made first; without, the message is dropped:
        it concerns something that ended with the link."""
        link = self._links.get(owner)
        if link is None:
            if not endpoint or self._closed:
                return
            link = OwnerLink(owner, endpoint)
            self._links[owner] = link
            metrics.HANDOFF_PEERS.set(len(self._links))
            link.task = asyncio.create_task(self._run(link), name=f"owner-{owner.name}")
        link.send(message)

    async def close(self) -> None:
        """Ends every link and waits for it."""
        self._closed = True
        tasks = [link.task for link in self._links.values() if link.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, link: OwnerLink) -> None:
        reason, detail = pb.FAILURE_REASON_PEER_LOST, "the link was closed"
        try:
            async with rpc.channel(link.endpoint, self._config, self._tls, role="worker") as channel:
                stub: handoff_pb2_grpc.HandoffServiceAsyncStub = handoff_pb2_grpc.HandoffServiceStub(channel)
                peer = await self._connect(link, stub)
                await self._exchange(link, peer, stub)
            detail = "the owner ended the stream"
        except asyncio.CancelledError:
            # Only close() cancels: the worker stops, and so do its attempts.
            raise
        except Exception as error:
            reason, detail = _failure(error)
        finally:
            # All without an await: a message that comes later finds no link and makes a new one, which this end
            # must not touch.
            link.out.close()
            del self._links[link.owner]
            metrics.HANDOFF_PEERS.set(len(self._links))
            lost = (link.owner, list(link.expected), reason, detail)
            self._loop.post(lambda: self._loop.role.on_owner_lost(*lost))
            log.info(
                "owner_link_ended", owner=str(link.owner), reason=pb.FailureReason.Name(reason), detail=detail
            )
            self._peers.disconnect(link.owner)

    async def _connect(
        self, link: OwnerLink, stub: "handoff_pb2_grpc.HandoffServiceAsyncStub"
    ) -> PeerDescriptor:
        request = handoff_pb2.ConnectRequest(reader=self._own_message, owner=worker_message(link.owner))
        timeout = self._config.connect_timeout_seconds
        # gRPC fails a call at once while a peer is unreachable, which is what a placement wants to know.
        answer = await stub.Connect(request, timeout=timeout)
        peer = from_message(answer.owner, own=self._own, expected=link.owner)
        async with asyncio.timeout(timeout):
            await self._peers.connect(peer)
        return peer

    async def _exchange(
        self, link: OwnerLink, peer: PeerDescriptor, stub: "handoff_pb2_grpc.HandoffServiceAsyncStub"
    ) -> None:
        call = stub.Exchange(self._requests(link))
        # The owner sends its metadata once it has taken the stream.
        async with asyncio.timeout(self._config.connect_timeout_seconds):
            await call.initial_metadata()
        # The role is the one that the worker has when it hears of it.
        self._loop.post(lambda: self._loop.role.on_owner_opened(peer))
        log.info("owner_link_opened", owner=str(link.owner), endpoint=link.endpoint)
        async for message in call:
            self._loop.post(partial(self._heard, link.owner, message))

    def _heard(self, owner: WorkerKey, message: handoff_pb2.ExchangeResponse) -> None:
        """On the step thread."""
        self._loop.role.on_owner_message(owner, message)

    async def _requests(self, link: OwnerLink) -> AsyncIterator[handoff_pb2.ExchangeRequest]:
        yield handoff_pb2.ExchangeRequest(reader=worker_message(self._own.worker))
        async for message in link.out.messages():
            yield message


def _failure(error: Exception) -> tuple[Reason, str]:
    """Why a link could not be made or ended, as an attempt's failure. Never a success, never silent."""
    if isinstance(error, DescriptorError):
        error = descriptor_error(error)
    elif isinstance(error, grpc.aio.AioRpcError):
        error = errors.from_rpc_error(error)
    if isinstance(error, TwinpoolError):
        fenced = error.reason in _FENCED
        return (pb.FAILURE_REASON_FENCED if fenced else pb.FAILURE_REASON_PEER_LOST), str(error)
    if isinstance(error, TransferError):
        return pb.FAILURE_REASON_TRANSFER, str(error)
    if isinstance(error, TimeoutError):
        return pb.FAILURE_REASON_PEER_LOST, "the owner could not be connected in time"
    log.error("owner_link_failed", exc_info=error)
    return pb.FAILURE_REASON_INTERNAL, f"{type(error).__name__} on the link to the owner"
