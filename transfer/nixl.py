# SPDX-License-Identifier: Apache-2.0
"""The agent that moves bytes with NIXL over UCX: shared memory, TCP, RDMA or NVLink, host or device memory.

Choices, with what was measured for them (two processes, blocks of 281,088 bytes, two cores):

* One strided descriptor list a side, prepared once; a read picks blocks by index. Making a read of 256 scattered
  blocks takes 38 us against 186 us for fresh descriptors, and NIXL joins blocks that are neighbours on both sides
  (256 descriptors become 1), so nothing is coalesced here.
* No progress thread: NIXL's spins on a core. ``poll`` and ``progress`` drive it instead.
* A new incarnation has a new NIXL name, so an old peer stays loaded until its last read is fenced: removing it
  earlier would lose sight of reads whose bytes still land.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.transfer import nixl_backend
from twinpool.transfer.base import (
    GENERATION_BYTES,
    PENDING,
    AgentBusy,
    Blocks,
    Fault,
    Generations,
    MemoryRegion,
    PeerDescriptor,
    PoolMemory,
    ReadHandle,
    ReadState,
    ReadStatus,
    TransferError,
)
from twinpool.transfer.descriptor import agent_name
from twinpool.transfer.shard import KvShard, Share, share_of, strided
from twinpool.transfer.spans import Landing, cover

_log = get_logger(__name__)

_LANDING_ENTRIES_MIN = 1 << 16


class _Link:
    """A connected peer: its prepared descriptor lists and how many reads from it are not fenced."""

    __slots__ = ("descriptor", "generations", "live", "lost", "part", "pool", "retired")

    def __init__(self, descriptor: PeerDescriptor, pool: Any, generations: Any, part: Share | None) -> None:
        self.descriptor = descriptor
        self.pool = pool
        self.generations = generations
        self.part = part  # None: whole blocks
        self.live = 0
        self.lost = False
        self.retired = False


class _Read(ReadHandle):
    """A read and, if it reads generations, where they land and which of them were asked for. ``lists``: made for it alone."""

    __slots__ = ("landing", "link", "lists", "positions", "raw", "state")

    def __init__(self, raw: Any, link: _Link) -> None:
        self.raw = raw
        self.link = link
        self.state = PENDING
        self.landing: int | None = None
        self.positions: Any = None
        self.lists: list[Any] = []


class NixlAgent:
    """See :class:`~twinpool.transfer.base.TransferAgent`. Make it and close it on one thread, and use it on one at a time.

    NIXL is told so (``NIXL_THREAD_SYNC_STRICT``): by default it has UCX expect one thread for ever.
    """

    def __init__(
        self,
        worker: WorkerKey,
        fingerprint: str,
        pool: PoolMemory,
        generations: Generations,
        *,
        ucx_tls: str | None = None,
        shard: KvShard | None = None,
    ) -> None:
        """Registers ``pool`` and the table ``generations`` (``uint64[num_blocks]``, kept by reference) once.

        ``shard``: what of each row the pool holds; None: all. ``ucx_tls``: UCX transports such as "tcp,sm,self"; None leaves
        UCX_TLS as it is. Raises ImportError, ValueError, or TransferError if NIXL refuses.
        """
        _check_table(generations, pool.num_blocks)
        api = nixl_backend.load_api()
        self._pool_memory = pool
        self._table = generations
        # Reads of generations land here. Like the pool it stays registered for the agent's life.
        self._landing = np.zeros(max(_LANDING_ENTRIES_MIN, pool.num_blocks), dtype=np.uint64)
        self._runs = Landing(len(self._landing))
        self._numbers = np.arange(len(self._landing), dtype=np.int32)
        self._threads: set[int] = set()  # that have the pool's device current
        self._links: dict[WorkerKey, _Link] = {}
        self._retired: list[_Link] = []
        self._reads: set[_Read] = set()
        name = agent_name(worker)
        table = MemoryRegion(generations.ctypes.data, generations.nbytes)
        landing = MemoryRegion(self._landing.ctypes.data, self._landing.nbytes)
        try:
            self._enter_device()
            with nixl_backend.ucx_environment(ucx_tls, pool.region.memory_type):
                strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
                config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=strict)
                self._agent: Any = api.nixl_agent(name, config)
            for region in (pool.region, table, landing):
                entry = (region.address, region.length_bytes, region.device_id, "")
                self._agent.register_memory([entry], region.memory_type)
            self._own_pool = self._prepare("", pool.region, pool.block_bytes, pool.num_blocks)
            self._own_landing = self._prepare("", landing, GENERATION_BYTES, len(self._landing))
            metadata = self._agent.get_agent_metadata()
        except Exception as error:
            raise TransferError(nixl_backend.fault_of(error), nixl_backend.describe(error)) from error
        self._descriptor = PeerDescriptor(
            worker, fingerprint, pool.region, pool.block_bytes, pool.num_blocks, table, name, metadata, shard
        )

    @property
    def descriptor(self) -> PeerDescriptor:
        return self._descriptor

    def connect(self, peer: PeerDescriptor) -> None:
        known = self._links.get(peer.worker)
        if known is not None and not known.lost:
            if known.descriptor != peer:
                raise TransferError(Fault.PEER_REFUSED, f"{peer.worker} has changed its descriptor")
            return
        # A second connection under the same NIXL name would hide the first one's reads: their end would never be seen. To itself an
        # agent makes none.
        links = [] if peer == self._descriptor else [known, *self._retired]
        live = sum(link.live for link in links if link and link.descriptor.worker == peer.worker)
        if live:
            raise TransferError(Fault.PEER_LOST, f"{live} reads from {peer.worker} are not fenced yet")
        for worker in [w for w in self._links if w.name == peer.worker.name]:
            self.disconnect(worker)
        try:
            self._links[peer.worker] = self._load(peer)
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(nixl_backend.fault_of(error), nixl_backend.describe(error)) from error

    def disconnect(self, peer: WorkerKey) -> None:
        link = self._links.pop(peer, None)
        if link is None:
            return
        link.retired = True
        self._retired.append(link)
        self._drop_if_idle(link)

    def connected(self, peer: WorkerKey) -> bool:
        link = self._links.get(peer)
        return link is not None and not link.lost

    def read(self, peer: WorkerKey, remote: Blocks, local: Blocks) -> ReadHandle:
        link = self._link(peer)
        # That every block is inside its list is for NIXL to see, which refuses the whole read before it posts anything.
        if len(remote) == 0 or len(remote) != len(local):
            raise TransferError(Fault.INVALID, f"{len(remote)} blocks into {len(local)}")
        if threading.get_ident() not in self._threads:
            self._enter_device()
        if link.part is not None:
            return self._read_part(link, link.part, remote, local)
        return self._post(link, self._own_pool, local, link.pool, remote, None)

    def read_generations(self, peer: WorkerKey, remote: Blocks) -> ReadHandle:
        link = self._link(peer)
        if len(remote) == 0:
            raise TransferError(Fault.INVALID, "generations of no block")
        entries, positions = cover(remote)
        if len(entries) > len(self._landing):
            entries, positions = cover(remote, gap=1)
        if len(entries) > len(self._landing):
            raise TransferError(Fault.INVALID, f"generations of {len(entries)} blocks at once")
        start = self._runs.take(len(entries))
        if start is None:
            raise AgentBusy
        local = self._numbers[start : start + len(entries)]
        try:
            handle = self._post(link, self._own_landing, local, link.generations, entries, start)
        except TransferError:
            self._runs.give(start)
            raise
        handle.positions = positions + start
        return handle

    def generations(self, handle: ReadHandle) -> Generations:
        read = _own(handle)
        if read.positions is None or read.state.status is not ReadStatus.DONE:
            raise ValueError("not a finished read of generations")
        values: Generations = self._landing[read.positions]
        return values

    def poll(self, handle: ReadHandle) -> ReadState:
        read = _own(handle)
        if read.state.status is ReadStatus.PENDING:
            try:
                state = nixl_backend.state_of_word(self._agent.check_xfer_state(read.raw), posting=False)
            except Exception as error:
                state = nixl_backend.state_of_error(error, posting=False)
            self._settle(read, state)
        return read.state

    def release(self, handle: ReadHandle) -> None:
        read = _own(handle)
        if read.state.status is ReadStatus.PENDING:
            raise ValueError("a pending read cannot be released: its bytes would still land")
        if not read.state.fenced or read not in self._reads:
            return  # an unfenced read keeps its resources until close()
        self._reads.discard(read)
        if read.landing is not None:
            self._runs.give(read.landing)
        self._quietly(read.raw.release)
        for made in read.lists:
            self._quietly(made.release)

    def progress(self) -> None:
        try:
            self._agent.get_new_notifs()
        except Exception as error:
            # A peer that died may surface here; its reads report it themselves.
            _log.warning("nixl_progress_failed", error=nixl_backend.describe(error))

    def close(self) -> None:
        for read in self._reads:
            for held in (read.raw, *read.lists):
                self._quietly(held.release)
        self._reads.clear()
        for link in [*self._links.values(), *self._retired]:
            self._quietly(link.pool.release)
            self._quietly(link.generations.release)
        self._links.clear()
        self._retired.clear()
        for own in (self._own_pool, self._own_landing):
            self._quietly(own.release)
        # The last reference: destroying the agent closes its connections, which is what fences. Memory stays
        # registered until then on purpose: an explicit deregistration under a live TCP reader crashes this process.
        del self._own_pool, self._own_landing, self._agent

    def _enter_device(self) -> None:
        nixl_backend.enter_device(self._pool_memory.region)
        self._threads.add(threading.get_ident())

    def _link(self, peer: WorkerKey) -> _Link:
        link = self._links.get(peer)
        if link is None:
            raise TransferError(Fault.PEER_UNKNOWN, f"{peer} is not connected")
        if link.lost:
            raise TransferError(Fault.PEER_LOST, f"the connection to {peer} broke")
        return link

    def _load(self, peer: PeerDescriptor) -> _Link:
        part = share_of(self._descriptor.shard, peer.shard)
        if part is not None and not part.runs:
            raise TransferError(Fault.PEER_REFUSED, f"{peer.worker} holds none of this rank's heads")
        if peer == self._descriptor:
            # This agent itself, for a check of the path: NIXL has its own metadata, and no connection to make.
            pool = self._prepare(peer.agent_name, peer.pool, peer.block_bytes, peer.num_blocks)
            own = self._prepare(peer.agent_name, peer.generations, GENERATION_BYTES, peer.num_blocks)
            return _Link(peer, pool, own, None)
        name = self._agent.add_remote_agent(peer.agent_metadata)
        name = name.decode() if isinstance(name, bytes) else name
        if name != peer.agent_name:
            self._quietly(self._agent.remove_remote_agent, name)
            raise TransferError(Fault.PEER_REFUSED, f"metadata of {peer.agent_name} name another agent")
        try:
            pool = self._prepare(name, peer.pool, peer.block_bytes, peer.num_blocks)
            generations = self._prepare(name, peer.generations, GENERATION_BYTES, peer.num_blocks)
            self._agent.make_connection(name)
        except Exception:
            self._quietly(self._agent.remove_remote_agent, name)
            raise
        return _Link(peer, pool, generations, part)

    def _read_part(self, link: _Link, part: Share, remote: Blocks, local: Blocks) -> ReadHandle:
        """Over lists of these blocks' runs alone: those of a whole pool would have millions of entries."""
        peer, own = link.descriptor, self._descriptor
        _check_range(remote, peer.num_blocks, "remote")
        _check_range(local, own.num_blocks, "local")
        sides = (
            ("", own.pool, local, part.local_row_bytes, [(run.local, run.length) for run in part.runs]),
            (
                peer.agent_name,
                peer.pool,
                remote,
                part.remote_row_bytes,
                [(run.remote, run.length) for run in part.runs],
            ),
        )
        lists: list[Any] = []
        try:
            for agent, pool, blocks, row_bytes, runs in sides:
                table = strided(blocks, pool.address, pool.device_id, part.rows, row_bytes, runs)
                lists.append(self._agent.prep_xfer_dlist(agent, table, pool.memory_type))
            entries = np.arange(len(remote) * part.descriptors, dtype=np.int32)
            read = self._post(link, lists[0], entries, lists[1], entries, None)
        except Exception as error:
            for made in lists:
                self._quietly(made.release)
            if isinstance(error, TransferError):
                raise
            raise TransferError(nixl_backend.fault_of(error), nixl_backend.describe(error)) from error
        read.lists = lists
        return read

    def _prepare(self, agent: str, region: MemoryRegion, entry_bytes: int, count: int) -> Any:
        strided = np.array([[region.address, entry_bytes, region.device_id, entry_bytes, count]], np.uint64)
        return self._agent.prep_xfer_dlist(agent, strided, region.memory_type)

    def _post(
        self, link: _Link, own: Any, local: Blocks, their: Any, remote: Blocks, landing: int | None
    ) -> _Read:
        try:
            raw = self._agent.make_prepped_xfer("READ", own, local, their, remote)
        except Exception as error:
            raise TransferError(nixl_backend.fault_of(error), nixl_backend.describe(error)) from error
        read = _Read(raw, link)
        read.landing = landing
        self._reads.add(read)
        link.live += 1
        try:
            state = nixl_backend.state_of_word(self._agent.transfer(raw), posting=True)
        except Exception as error:
            state = nixl_backend.state_of_error(error, posting=True)
        self._settle(read, state)
        return read

    def _settle(self, read: _Read, state: ReadState) -> None:
        read.state = state
        if state.fault is Fault.PEER_LOST:
            read.link.lost = True
        if state.fenced:
            read.link.live -= 1
            self._drop_if_idle(read.link)

    def _drop_if_idle(self, link: _Link) -> None:
        if not link.retired or link.live:
            return
        self._retired.remove(link)
        self._quietly(link.pool.release)
        self._quietly(link.generations.release)
        if link.descriptor != self._descriptor:
            self._quietly(self._agent.remove_remote_agent, link.descriptor.agent_name)

    def _quietly(self, call: Any, *arguments: Any) -> None:
        """For what gives resources back: a dead peer makes some of these raise, and there is nothing left to do."""
        try:
            call(*arguments)
        except Exception as error:
            _log.debug("nixl_cleanup_failed", error=nixl_backend.describe(error))


def _own(handle: ReadHandle) -> _Read:
    if not isinstance(handle, _Read):
        raise TypeError(f"{type(handle).__name__} is not a read of this agent")
    return handle


def _check_range(blocks: Blocks, limit: int, side: str) -> None:
    low, high = int(blocks.min()), int(blocks.max())
    if low < 0 or high >= limit:
        raise TransferError(
            Fault.INVALID, f"{side} block {low if low < 0 else high} is not in 0..{limit - 1}"
        )


def _check_table(generations: Generations, num_blocks: int) -> None:
    if (
        generations.dtype != np.uint64
        or generations.shape != (num_blocks,)
        or not generations.flags.c_contiguous
    ):
        raise ValueError(
            f"the generation table must be uint64[{num_blocks}], not {generations.dtype}{generations.shape}"
        )
