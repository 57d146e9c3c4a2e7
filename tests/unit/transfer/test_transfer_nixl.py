# SPDX-License-Identifier: Apache-2.0
"""Real NIXL between two processes: over shared memory (CMA) and over TCP alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.support.nixl_peer import Called, PeerProcess, Worker, pattern
from tests.support.watching import wait_until
from twinpool.ids import WorkerKey, new_incarnation
from twinpool.transfer.base import Blocks, Fault, PoolMemory, TransferError
from twinpool.transfer.descriptor import DescriptorError, from_message, to_message
from twinpool.transfer.fence import HandoffFault, check_generations
from twinpool.transfer.nixl import NixlAgent

NUM_BLOCKS = 48
BLOCK_BYTES = 73_728
SHARED_MEMORY = "tcp,sm,self"
TCP = "tcp,self"


@pytest.fixture(scope="module")
def readers() -> Iterator[Callable[[str], Worker]]:
    """One reader for each list of transports, made when it is first asked for."""
    made: dict[str, Worker] = {}

    def get(ucx_tls: str) -> Worker:
        if ucx_tls not in made:
            made[ucx_tls] = Worker(WorkerKey("reader", new_incarnation()), NUM_BLOCKS, BLOCK_BYTES, ucx_tls)
        return made[ucx_tls]

    yield get
    for worker in made.values():
        worker.thread.stop()


@pytest.fixture(scope="module", params=[SHARED_MEMORY, TCP])
def reader(request: pytest.FixtureRequest, readers: Callable[[str], Worker]) -> Worker:
    return readers(request.param)


@pytest.fixture(scope="module")
def tcp_reader(readers: Callable[[str], Worker]) -> Worker:
    return readers(TCP)


@pytest.fixture(scope="module")
def peer(reader: Worker) -> Iterator[PeerProcess]:
    """An owner that survives its tests, connected."""
    with owner("owner-shared", reader.ucx_tls) as process:
        assert connect(reader, process) is None
        yield process
        process.stop()


def owner(name: str, ucx_tls: str) -> PeerProcess:
    return PeerProcess(name, NUM_BLOCKS, BLOCK_BYTES, ucx_tls)


def connect(reader: Worker, peer: PeerProcess, deadline_seconds: float = 5.0) -> TransferError | None:
    connected = Called()
    reader.thread.connect(peer.descriptor, connected, deadline_seconds)
    result: TransferError | None = connected.wait()
    return result


def start(
    reader: Worker, peer: PeerProcess, remote: Blocks, local: Blocks, deadline_seconds: float = 60.0
) -> tuple[Called, Called]:
    done = Called()
    fenced = Called()
    reader.thread.pull(
        peer.descriptor.worker,
        remote,
        local,
        deadline_seconds=deadline_seconds,
        on_done=done,
        on_fenced=fenced,
    )
    return done, fenced


def polled(reader: Worker) -> None:
    """Returns when the thread has polled what it has in flight a few times: each round takes the commands of the last."""
    for _ in range(5):
        done = Called()
        stranger = WorkerKey("stranger", 1)
        reader.thread.pull(
            stranger, blocks(0), blocks(0), deadline_seconds=60, on_done=done, on_fenced=lambda: None
        )
        assert done.wait().fault is Fault.PEER_UNKNOWN


def blocks(*numbers: int) -> Blocks:
    return np.array(numbers, dtype=np.int32)


def test_bytes_and_generations_are_the_owners(reader: Worker, peer: PeerProcess) -> None:
    peer.fill(list(range(NUM_BLOCKS)), salt=1)
    before = peer.fill([3, 7], salt=2)
    random = np.random.default_rng(7)
    for remote, local in (
        (blocks(5), blocks(9)),
        (blocks(3, 4, 5, 7), blocks(10, 11, 12, 20)),
        (random.permutation(NUM_BLOCKS).astype(np.int32), random.permutation(NUM_BLOCKS).astype(np.int32)),
    ):
        reader.pool[:] = 0
        done, fenced = start(reader, peer, remote, local)
        outcome = done.wait()
        fenced.wait()
        assert outcome.fault is None
        assert outcome.generations is not None
        assert outcome.generations.tolist() == [before[block] for block in remote]
        for theirs, ours in zip(remote, local, strict=True):
            salt = 2 if theirs in (3, 7) else 1
            assert np.array_equal(reader.pool[ours], pattern(int(theirs), salt, BLOCK_BYTES))
        untouched = np.setdiff1d(np.arange(NUM_BLOCKS), local)
        assert not reader.pool[untouched].any()


def test_a_block_that_the_owner_reused_trips_the_fence(reader: Worker, peer: PeerProcess) -> None:
    ticket = peer.fill([1, 2, 3], salt=1)[1:4]
    peer.fill([2], salt=9)
    done, _ = start(reader, peer, blocks(1, 2, 3), blocks(0, 1, 2))
    outcome = done.wait()
    assert outcome.generations is not None
    failure = check_generations(ticket, outcome.generations)
    assert failure is not None
    assert failure.fault is HandoffFault.STALE_GENERATION
    assert f"block 1 of the ticket has generation {ticket[1] + 1}" in failure.detail


def test_a_block_that_the_owner_reuses_in_the_middle_trips_the_fence(
    reader: Worker, peer: PeerProcess
) -> None:
    ticket = peer.fill([1, 2, 3], salt=1)[1:4]
    # Between the end of the data read and the read of the generations.
    reader.faults.after[reader.data_reads + 1] = lambda: peer.fill([2], salt=9)
    done, _ = start(reader, peer, blocks(1, 2, 3), blocks(0, 1, 2))
    outcome = done.wait()
    assert np.array_equal(reader.pool[1], pattern(2, 1, BLOCK_BYTES))  # these bytes happen to be good
    assert outcome.generations is not None
    failure = check_generations(ticket, outcome.generations)
    assert failure is not None
    assert failure.fault is HandoffFault.STALE_GENERATION


def test_blocks_outside_a_pool_are_refused(reader: Worker, peer: PeerProcess) -> None:
    for remote, local in (
        (blocks(NUM_BLOCKS), blocks(0)),
        (blocks(-1), blocks(0)),
        (blocks(0), blocks(NUM_BLOCKS)),
        (blocks(0, 1), blocks(0)),
    ):
        done, fenced = start(reader, peer, remote, local)
        assert done.wait().fault is Fault.INVALID
        fenced.wait()


def test_a_killed_owner_fails_reads_at_once_and_its_next_incarnation_works(reader: Worker) -> None:
    with owner("owner-killed", reader.ucx_tls) as peer:
        assert connect(reader, peer) is None
        if reader.ucx_tls == TCP:
            peer.pause()  # over TCP the read is then in flight; a copy through shared memory would just succeed
            done, fenced = start(reader, peer, blocks(1, 2, 3), blocks(0, 1, 2), deadline_seconds=60)
            peer.kill()
        else:
            peer.kill()
            done, fenced = start(reader, peer, blocks(1, 2, 3), blocks(0, 1, 2), deadline_seconds=60)
        outcome = done.wait()
        assert outcome.fault is Fault.PEER_LOST
        fenced.wait()
        done, fenced = start(reader, peer, blocks(1), blocks(0))
        assert done.wait().fault is Fault.PEER_LOST
        fenced.wait()
    with owner("owner-killed", reader.ucx_tls) as again:
        assert again.descriptor.worker.incarnation != peer.descriptor.worker.incarnation
        again.fill([4], salt=3)
        assert connect(reader, again) is None
        done, _ = start(reader, again, blocks(4), blocks(0))
        assert done.wait().fault is None
        assert np.array_equal(reader.pool[0], pattern(4, 3, BLOCK_BYTES))
        done, _ = start(reader, peer, blocks(4), blocks(0))
        assert done.wait().fault is Fault.PEER_UNKNOWN  # the old incarnation was replaced


def test_a_hung_owner_is_failed_by_deadline_and_its_bytes_still_land(tcp_reader: Worker) -> None:
    with owner("owner-hung", TCP) as peer:
        peer.fill([1, 2], salt=4)
        assert connect(tcp_reader, peer) is None
        tcp_reader.pool[:] = 0xAB
        peer.pause()
        began = time.monotonic()
        done, fenced = start(tcp_reader, peer, blocks(1, 2), blocks(5, 6), deadline_seconds=0.3)
        assert done.wait().fault is Fault.DEADLINE
        assert time.monotonic() - began >= 0.3
        polled(tcp_reader)
        assert not fenced.came  # quarantined: nobody knows yet whether bytes will come
        assert tcp_reader.thread.in_flight == 1
        assert (tcp_reader.pool[5:7] == 0xAB).all()
        peer.resume()
        fenced.wait()
        # This is why the blocks had to wait: the given-up read did overwrite them.
        assert np.array_equal(tcp_reader.pool[5], pattern(1, 4, BLOCK_BYTES))
        assert tcp_reader.thread.in_flight == 0
        done, _ = start(tcp_reader, peer, blocks(1), blocks(9))
        assert done.wait().fault is None


def test_a_hung_owner_that_is_killed_fences_its_reads(tcp_reader: Worker) -> None:
    with owner("owner-hung-killed", TCP) as peer:
        assert connect(tcp_reader, peer) is None
        peer.pause()
        done, fenced = start(tcp_reader, peer, blocks(1, 2), blocks(5, 6), deadline_seconds=0.1)
        assert done.wait().fault is Fault.DEADLINE
        peer.kill()
        fenced.wait()


def test_a_hung_owner_is_asked_once_until_it_answers_or_dies(tcp_reader: Worker) -> None:
    # A second connection under the same name hid the first one's reads: they were never fenced, not even by the owner's death.
    with owner("owner-hung-asked", TCP) as peer:
        assert connect(tcp_reader, peer) is None
        peer.pause()
        hung = connect(tcp_reader, peer, deadline_seconds=0.1)
        assert hung is not None
        assert hung.fault is Fault.DEADLINE
        again = [connect(tcp_reader, peer, deadline_seconds=0.1) for _ in range(3)]
        assert all(error is not None and error.fault is Fault.PEER_LOST for error in again)
        peer.resume()
        wait_until(lambda: tcp_reader.thread.in_flight == 0)
        assert connect(tcp_reader, peer) is None
        peer.pause()
        for _ in range(3):
            assert connect(tcp_reader, peer, deadline_seconds=0.1) is not None
        assert tcp_reader.thread.in_flight == 1
        peer.kill()
        wait_until(lambda: tcp_reader.thread.in_flight == 0)


def test_an_unreachable_owner_is_known_when_connecting(tcp_reader: Worker) -> None:
    with owner("owner-dead", TCP) as peer:
        peer.kill()
        result = connect(tcp_reader, peer)
        assert result is not None
        assert result.fault in (Fault.PEER_LOST, Fault.BACKEND)
        assert tcp_reader.thread.pool_blocks(peer.descriptor.worker) is None


def test_the_end_of_the_agent_fences_a_read_in_flight(tcp_reader: Worker) -> None:
    worker = Worker(WorkerKey("reader-ends", new_incarnation()), NUM_BLOCKS, BLOCK_BYTES, TCP)
    with owner("owner-outlives", TCP) as peer:
        peer.fill([1, 2], salt=4)
        assert connect(worker, peer) is None
        worker.pool[:] = 0xAB
        peer.pause()
        done, fenced = start(worker, peer, blocks(1, 2), blocks(5, 6), deadline_seconds=60)
        polled(worker)
        assert not done.came
        worker.thread.stop()
        assert done.wait().fault is Fault.CLOSED
        fenced.wait()
        peer.resume()
        # UCX ends an owner that finds its reader gone in the middle of a read over TCP. Where it does not, the owner
        # serves another by the time that it would have sent.
        wait_until(lambda: not peer.alive or connect(tcp_reader, peer) is None)
        assert (worker.pool == 0xAB).all()


def test_wrong_metadata_are_refused_and_leave_nothing_behind(
    tcp_reader: Worker, readers: Callable[[str], Worker]
) -> None:
    with owner("owner-metadata", TCP) as peer:
        own = tcp_reader.descriptor
        message = to_message(peer.descriptor)
        for damaged in (
            message.agent_metadata[:-1],
            message.agent_metadata[:20],
            b"",
            message.agent_metadata[:40] + b"\x00" + message.agent_metadata[41:],
        ):
            bad = to_message(peer.descriptor)
            bad.agent_metadata = damaged
            with pytest.raises(DescriptorError, match="agent_metadata") as caught:
                from_message(bad, own=own)
            assert caught.value.field == "agent_metadata"
        # Whole and with the right checksum, but of another agent: only NIXL can tell.
        another = readers(SHARED_MEMORY).descriptor.agent_metadata
        connected = Called()
        tcp_reader.thread.connect(replace(peer.descriptor, agent_metadata=another), connected)
        assert connected.wait().fault is Fault.PEER_REFUSED
        # NIXL would have refused the good ones for ever, had it seen a truncated one.
        assert from_message(message, own=own, expected=peer.descriptor.worker) == peer.descriptor
        assert connect(tcp_reader, peer) is None


def test_an_agent_that_cannot_be_made_says_so() -> None:
    pool = PoolMemory.of_array(np.zeros((4, 64), dtype=np.uint8))
    with pytest.raises(ValueError, match="generation table"):
        NixlAgent(WorkerKey("bad", 1), "f", pool, np.zeros(3, dtype=np.uint64))
