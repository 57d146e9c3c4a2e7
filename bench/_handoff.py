# SPDX-License-Identifier: Apache-2.0
"""An owner process and two readers of its blocks: one through the product, one with bare NIXL calls.

The owner's :class:`OfferBook` pins blocks and writes tickets; the reader's :class:`PullManager` parses them, pulls over
its transfer thread, reads the generations and compares. Between the processes a pipe stands for the gRPC stream.
"""

from __future__ import annotations

import multiprocessing
import queue
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from bench._common import Figures
from twinpool._core import BlockManager
from twinpool.engine.kv.pool import KVPool
from twinpool.ids import WorkerKey, new_incarnation
from twinpool.transfer.base import AttemptKey, Blocks, PeerDescriptor, PoolMemory, TransferError
from twinpool.transfer.digest import Digest, DigestPolicy, pool_digest
from twinpool.transfer.fence import HandoffFailure
from twinpool.transfer.nixl import NixlAgent
from twinpool.transfer.nixl_backend import enter_device, load_api, ucx_environment
from twinpool.transfer.owner import OfferBook
from twinpool.transfer.reader import PullManager
from twinpool.transfer.session import PullSession
from twinpool.transfer.thread import TransferThread
from twinpool.transfer.ticket import PromptShape
from twinpool.v1 import handoff_pb2, worker_pb2

BLOCK_TOKENS = 64
V3_LAYERS, V3_WIDTH = 61, 576
DEADLINE_SECONDS = 60.0
LEASE_SECONDS = 600.0

Pair = tuple[Blocks, Blocks]
"""Remote and local blocks of one read."""

_STREAM = 1
_BLOCK_STEP, _WORD_STEP = 0x1D8E4E27C47D124F, 0x2545F4914F6CDD1D


@dataclass(frozen=True, slots=True)
class Setting:
    """Pools of ``num_blocks`` blocks of DeepSeek-V3's shape, in bfloat16, with ``layers`` layers."""

    num_blocks: int
    layers: int = V3_LAYERS
    device: str = "cpu"
    owner_device: str = ""
    """Where the owner's pool lies; empty: on ``device``, as the reader's."""
    ucx_tls: str = "tcp,sm,self"
    digest: DigestPolicy = "off"

    @property
    def poll_seconds(self) -> float:
        """As docs/operations.md advises: a machine with GPUs has cores to spare for the thread that moves their blocks."""
        return 20e-6 if self.device.startswith("cuda") else 150e-6

    @property
    def block_bytes(self) -> int:
        return self.layers * BLOCK_TOKENS * V3_WIDTH * 2

    def pool(self) -> KVPool:
        """A pool whose pages are all there."""
        pool = KVPool(self.num_blocks, self.layers, BLOCK_TOKENS, V3_WIDTH, torch.bfloat16, self.device)
        pool.tensor.fill_(1)
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)
        return pool


def words_of(setting: Setting, block: int, device: torch.device) -> torch.Tensor:
    """What the owner's block holds, as ``int64[words]``: no two blocks share a word in the same place."""
    words = torch.arange(setting.block_bytes // 8, dtype=torch.int64, device=device)
    return words * _WORD_STEP + (block + 1) * _BLOCK_STEP % (1 << 63)


def digest_of(pool: KVPool) -> Digest:
    """The digest for the device that the pool is on."""
    if pool.device.type == "cpu":
        return pool_digest(PoolMemory.of_tensor(pool.tensor))
    from twinpool.engine.kernels.triton_digest import device_digest

    return device_digest(pool.tensor)


class Half:
    """What both processes have: a pool, its generations, a transfer thread whose callbacks run in ``drain``."""

    def __init__(self, name: str, setting: Setting) -> None:
        torch.set_num_threads(1)
        self.key = WorkerKey(name, new_incarnation())
        self.pool = setting.pool()
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        memory = PoolMemory.of_tensor(self.pool.tensor)

        def make() -> NixlAgent:
            return NixlAgent(self.key, "bench", memory, self.pool.generations, ucx_tls=setting.ucx_tls)

        # As a worker has it: see ``worker.serving``.
        self.thread = TransferThread(
            make, dispatch=self.calls.put, poll_seconds=setting.poll_seconds, pull_here=True
        )
        self.descriptor = self.thread.start()


def serve(connection: Connection, setting: Setting, reader: WorkerKey) -> None:
    """The owner's process. It answers the pipe: ``bytes`` is a reader's message, an offer is (request, chunks, pace), with
    ``pace`` seconds before each chunk in which it stands for being computed."""
    owner = Half("owner", replace(setting, device=setting.owner_device or setting.device))
    for block in range(setting.num_blocks):
        owner.pool.block_bytes_view(block).view(torch.int64).copy_(
            words_of(setting, block, owner.pool.device)
        )
    if owner.pool.device.type == "cuda":
        torch.cuda.synchronize(owner.pool.device)
    blocks = BlockManager(setting.num_blocks, BLOCK_TOKENS, owner.pool.generations)
    assert blocks.allocate(setting.num_blocks) is not None
    book = OfferBook(
        owner.key,
        blocks,
        owner.pool.generations,
        lambda _stream, message: connection.send(message.SerializeToString()),
        lease_seconds=LEASE_SECONDS,
        digest=digest_of(owner.pool),
        digest_policy=setting.digest,
        on_count=owner.thread.set_offers,
    )
    book.reader_opened(_STREAM, reader)
    connection.send(owner.descriptor)
    while True:
        message = connection.recv()
        if isinstance(message, bytes):
            request = handoff_pb2.ExchangeRequest.FromString(message)
            book.on_message(time.monotonic(), _STREAM, request)
        elif message is None:
            break
        else:
            offer(book, reader, *message)
    owner.thread.stop()


def offer(book: OfferBook, reader: WorkerKey, request_id: str, chunks: list[Blocks], pace: float) -> None:
    """Announces the chunks of one prompt, one by one."""
    attempt, first = AttemptKey(request_id, 1), 0
    book.begin(attempt, [reader])
    token = [worker_pb2.FirstToken(index=0, token_id=7)]
    for number, blocks in enumerate(chunks, start=1):
        time.sleep(pace)  # computing, on a GPU
        length = (first + len(blocks)) * BLOCK_TOKENS
        if number < len(chunks):
            book.announce(time.monotonic(), attempt, first, blocks, length)
        else:
            book.complete(time.monotonic(), attempt, first, blocks, length, token)
        first += len(blocks)


@dataclass(slots=True)
class _End:
    """The listener of one pull."""

    ready: float | None = None  # when
    failure: HandoffFailure | None = None
    seconds: list[float] = field(default_factory=list)

    def on_ready(self, session: PullSession, first_tokens: Sequence[worker_pb2.FirstToken]) -> None:
        self.ready = time.perf_counter()

    def on_failed(self, session: PullSession, failure: HandoffFailure) -> None:
        self.failure = failure

    def on_drained(self, session: PullSession) -> None:
        pass


class Product:
    """Pulls through tickets, fence and transfer thread."""

    def __init__(self, setting: Setting) -> None:
        self.half = Half("reader", setting)
        context = multiprocessing.get_context("spawn")
        self._owner, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, setting, self.half.key), daemon=True)
        self._process.start()
        theirs.close()
        self.owner: PeerDescriptor = self._owner.recv()
        self._pulls = PullManager(
            self.half.thread,
            lambda _owner, message: self._outbox.append(message.SerializeToString()),
            block_bytes=setting.block_bytes,
            read_deadline_seconds=DEADLINE_SECONDS,
            digest=digest_of(self.half.pool),
        )
        self._count = 0
        self._outbox: list[bytes] = []  # as a worker's: what is said goes out after the turn
        connected: list[TransferError | None] = []
        self.half.thread.connect(self.owner, connected.append)
        while not connected:
            self.half.calls.get()()
        assert connected == [None], connected

    def read(self, remote: Blocks, local: Blocks) -> float:
        """Seconds from the ticket's arrival to the proof that its blocks are here."""
        end = self._expect([remote], local, 0.0)
        ticket = self._owner.recv()
        began = time.perf_counter()
        self._hear(ticket)
        return self._finish(end) - began

    def read_many(self, pairs: Sequence[Pair]) -> float:
        """Seconds from the arrival of the tickets of several prompts, all at once, until all their blocks are proven."""
        ends = [self._expect([remote], local, 0.0) for remote, local in pairs]
        tickets = [self._owner.recv() for _ in pairs]
        began = time.perf_counter()
        for ticket in tickets:
            self._hear(ticket)
        done = max(self._proven(end) for end in ends)
        self._released()
        return done - began

    def read_chunks(self, chunks: list[Blocks], local: Blocks, pace: float) -> tuple[float, float]:
        """Seconds of a whole prompt from its start, and from the arrival of its last ticket, until all is proven."""
        began = time.perf_counter()
        end = self._expect(chunks, local, pace)
        heard, last = 0, began
        while heard < len(chunks):
            # Callbacks of earlier chunks run while later ones are computed.
            if self._owner.poll(50e-6):
                ticket = self._owner.recv()
                last = time.perf_counter()
                self._hear(ticket)
                heard += 1
            while not self.half.calls.empty():
                self.half.calls.get()()
        done = self._finish(end)
        return done - began, done - last

    def _expect(self, chunks: list[Blocks], local: Blocks, pace: float) -> _End:
        self._count += 1
        attempt = AttemptKey(f"pull-{self._count}", 1)
        shape = PromptShape(sum(map(len, chunks)) * BLOCK_TOKENS, BLOCK_TOKENS, 0)
        end = _End()
        self._pulls.expect(time.monotonic(), attempt, self.owner.worker, shape, local, end)
        self._flush()
        self._owner.send((attempt.request_id, chunks, pace))
        return end

    def _finish(self, end: _End) -> float:
        """Waits for the end of a pull and of its release; when the former was."""
        done = self._proven(end)
        self._released()
        return done

    def _proven(self, end: _End) -> float:
        while end.ready is None and end.failure is None:
            self.half.calls.get()()
        assert end.failure is None, end.failure
        assert end.ready is not None
        return end.ready

    def _released(self) -> None:
        self._flush()
        while self._pulls.unreleased:
            self._hear(self._owner.recv())

    def _flush(self) -> None:
        for message in self._outbox:
            self._owner.send(message)
        self._outbox.clear()

    def close(self) -> None:
        """Ends the owner's process."""
        self._owner.send(None)
        self._process.join(30)
        self._process.kill()
        self.half.thread.stop()

    def _hear(self, message: bytes) -> None:
        response = handoff_pb2.ExchangeResponse.FromString(message)
        self._pulls.on_message(time.monotonic(), self.owner.worker, response)


class Raw:
    """NIXL by itself: the same blocks from lists that were prepared once, polled without a pause, nothing proven."""

    def __init__(self, owner: PeerDescriptor, setting: Setting) -> None:
        self.pool = setting.pool()
        region = PoolMemory.of_tensor(self.pool.tensor).region
        enter_device(region)
        with ucx_environment(setting.ucx_tls, region.memory_type):
            api = load_api()
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = api.nixl_agent(f"raw-{new_incarnation():x}", config)
        entry = (region.address, region.length_bytes, region.device_id, "")
        self._agent.register_memory([entry], region.memory_type)
        self._agent.add_remote_agent(owner.agent_metadata)
        size, count = setting.block_bytes, setting.num_blocks

        def prepare(agent: str, address: int, device: int, memory: str) -> Any:
            strided = np.array([[address, size, device, size, count]], np.uint64)
            return self._agent.prep_xfer_dlist(agent, strided, memory)

        self._ours = prepare("", region.address, region.device_id, region.memory_type)
        theirs = owner.pool
        self._theirs = prepare(owner.agent_name, theirs.address, theirs.device_id, theirs.memory_type)

    def read(self, remote: Blocks, local: Blocks) -> float:
        """Seconds of one READ."""
        agent = self._agent
        began = time.perf_counter()
        handle = agent.make_prepped_xfer("READ", self._ours, local, self._theirs, remote)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        seconds = time.perf_counter() - began
        assert state == "DONE", state
        handle.release()
        return seconds

    def read_many(self, pairs: Sequence[Pair]) -> float:
        """Seconds of several READs that are posted at once."""
        agent = self._agent
        began = time.perf_counter()
        handles, live = [], []
        for remote, local in pairs:
            handle = agent.make_prepped_xfer("READ", self._ours, local, self._theirs, remote)
            handles.append(handle)
            if agent.transfer(handle) == "PROC":
                live.append(handle)
        while live:
            live = [handle for handle in live if agent.check_xfer_state(handle) == "PROC"]
        seconds = time.perf_counter() - began
        for handle in handles:
            assert agent.check_xfer_state(handle) == "DONE"
            handle.release()
        return seconds


class Copy:
    """The same blocks copied inside this process: one memcpy a block, or the device's gather."""

    def __init__(self, setting: Setting) -> None:
        self._source, self._target = setting.pool().tensor, setting.pool().tensor

    def read(self, remote: Blocks, local: Blocks) -> float:
        """Seconds of one copy."""
        device = self._source.device
        began = time.perf_counter()
        if device.type == "cpu":
            for theirs, ours in zip(remote.tolist(), local.tolist(), strict=True):
                self._target[ours].copy_(self._source[theirs])
        else:
            theirs_, ours_ = (torch.from_numpy(x.astype(np.int64)).to(device) for x in (remote, local))
            self._target.index_copy_(0, ours_, self._source.index_select(0, theirs_))
            torch.cuda.synchronize(device)
        return time.perf_counter() - began


def scattered(count: int, num_blocks: int, seed: int) -> tuple[Blocks, Blocks]:
    """``count`` physical blocks of each side, at random places."""
    random = np.random.default_rng([seed, count])
    remote, local = (random.permutation(num_blocks)[:count].astype(np.int32) for _ in range(2))
    return remote, local


def measure(side: Product | Raw | Copy, setting: Setting, count: int, repeats: int) -> Figures:
    """Median of a few reads of ``count`` scattered blocks, one at a time."""
    seconds = statistics.median(
        side.read(*scattered(count, setting.num_blocks, seed)) for seed in range(repeats)
    )
    return {"us": seconds * 1e6, "GB_per_s": count * setting.block_bytes / seconds / 1e9}


def measure_many(side: Product | Raw, setting: Setting, count: int, in_flight: int, repeats: int) -> Figures:
    """The same of ``in_flight`` reads of ``count`` blocks that are there at once, as a worker has them: their rate together."""

    def pairs(seed: int) -> list[Pair]:
        remote, local = scattered(count * in_flight, setting.num_blocks, seed)
        return list(zip(np.split(remote, in_flight), np.split(local, in_flight), strict=True))

    seconds = statistics.median(side.read_many(pairs(seed)) for seed in range(repeats))
    return {"us": seconds * 1e6, "GB_per_s": count * in_flight * setting.block_bytes / seconds / 1e9}


def wrong_blocks(setting: Setting, pool: KVPool, remote: Blocks, local: Blocks) -> int:
    """How many of ``pool``'s blocks ``local`` do not hold what the owner's ``remote`` hold."""
    wrong = 0
    for theirs, ours in zip(remote.tolist(), local.tolist(), strict=True):
        got = pool.block_bytes_view(ours).view(torch.int64)
        wrong += not torch.equal(got, words_of(setting, theirs, pool.device))
    return wrong
