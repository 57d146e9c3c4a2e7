# SPDX-License-Identifier: Apache-2.0
"""What workers say to one another: hostile readers to an owner, hostile owners to a reader, descriptors of anybody.

Whatever is said, nothing raises, nothing is held once the streams have ended and the leases with them, and no hand-off is
ready that its owner did not complete.
"""

import numpy as np
from google.protobuf.message import DecodeError

from tests.fuzz.shake import frames, frames_mutator, message_mutator, packed
from tests.fuzz.target import Target
from tests.support.handoff_world import BLOCK_TOKENS, LEASE_SECONDS, Listener, Owner, Reader, World
from twinpool._core import hash_blocks, root_hash
from twinpool.ids import WorkerKey
from twinpool.transfer.base import AttemptKey, MemoryRegion, PeerDescriptor
from twinpool.transfer.descriptor import DescriptorError, from_message, to_message
from twinpool.transfer.ticket import PromptShape
from twinpool.v1 import handoff_pb2 as pb
from twinpool.v1 import worker_pb2

ATTEMPT = AttemptKey("r", 1)
ROOT = root_hash(b"f", b"", b"")
HASHES = hash_blocks(ROOT, np.arange(4 * BLOCK_TOKENS, dtype=np.int32), BLOCK_TOKENS)
SHAPE = PromptShape(3 * BLOCK_TOKENS, BLOCK_TOKENS, 0)


def parsed(kind: type, data: bytes) -> list:  # type: ignore[type-arg]
    """The messages of an input, as gRPC would hand them on."""
    found = []
    for frame in frames(data):
        try:
            found.append(kind.FromString(frame[1:]))  # type: ignore[attr-defined]
        except DecodeError:
            continue
    return found


def rest(world: World, owner: Owner, reader: Reader) -> None:
    world.cut(reader, owner)
    # Twice the lease: that of the last pin, and of what waited for it.
    world.run(2 * LEASE_SECONDS + 1, tick_seconds=0.5)
    owner.blocks.reset_cache()
    owner.poison_freed()
    world.assert_at_rest()


def run_owner(data: bytes) -> None:
    world = World()
    owner, reader = world.owner(), world.reader()
    stream = world.link(reader, owner)
    cached = owner.take(len(HASHES))
    owner.blocks.commit(cached, HASHES, ROOT)
    owner.give(cached)
    prefill = owner.prefill(ATTEMPT, [reader], SHAPE)
    prefill.chunk(1)
    messages = parsed(pb.ExchangeRequest, data)
    for at, message in enumerate(messages):
        if at == len(messages) // 2:
            prefill.complete()
        owner.book.on_message(world.now, stream, message)
        world.step()
        world.now += 0.05
        owner.book.tick(world.now)
    if not messages:
        prefill.complete()
    rest(world, owner, reader)


def run_reader(data: bytes) -> None:
    world = World()
    owner, reader = world.owner(), world.reader()
    world.link(reader, owner)
    listener: Listener = reader.expect(ATTEMPT, owner, SHAPE)
    told = False
    for message in parsed(pb.ExchangeResponse, data):
        told |= message.WhichOneof("message") == "complete"
        reader.pulls.on_message(world.now, owner.key, message)
        world.step()
        world.now += 0.05
        reader.pulls.tick(world.now)
    world.step()
    assert told or "ready" not in listener.events
    assert len([event for event in listener.events if event in ("ready", "failed")]) <= 1
    rest(world, owner, reader)


def owner_seeds() -> list[bytes]:
    attempt = ATTEMPT.message()
    requests = [
        pb.ExchangeRequest(expect=pb.Expect(id=attempt)),
        pb.ExchangeRequest(renew=pb.Renew(transfer_ids=[1, 2, 3])),
        pb.ExchangeRequest(fetch=pb.Fetch(id=worker_pb2.AttemptId(request_id="f", attempt=1), block_hashes=HASHES.tobytes())),
        pb.ExchangeRequest(release=pb.Release(id=attempt, success=True)),
        pb.ExchangeRequest(reader=worker_pb2.WorkerId(name="reader", incarnation=1)),
    ]  # fmt: skip
    framed = [b"\0" + request.SerializeToString() for request in requests]
    return [packed(framed), packed(framed[:1]), packed([framed[0], framed[3]]), packed([framed[2]])]


def ticket(first: int, blocks: int) -> pb.Ticket:
    made = pb.Ticket(
        owner=worker_pb2.WorkerId(name="owner", incarnation=1),
        id=ATTEMPT.message(),
        transfer_id=9,
        first_block=first,
        blocks=range(first, first + blocks),
        generations=[0] * blocks,
        length_tokens=(first + blocks) * BLOCK_TOKENS,
    )
    made.lease.FromMilliseconds(int(LEASE_SECONDS * 1000))
    return made


def reader_seeds() -> list[bytes]:
    attempt, first = ATTEMPT.message(), [worker_pb2.FirstToken(token_id=7)]
    responses = [
        pb.ExchangeResponse(chunk_ready=ticket(0, 1)),
        pb.ExchangeResponse(chunk_ready=ticket(1, 1)),
        pb.ExchangeResponse(complete=pb.PrefillComplete(ticket=ticket(2, 1), first_tokens=first)),
        pb.ExchangeResponse(failed=pb.TransferFailed(id=attempt, reason=1, detail="x")),
        pb.ExchangeResponse(released=pb.Released(id=attempt, transfer_id=9, known=True)),
        pb.ExchangeResponse(lease_lost=pb.LeaseLost(transfer_ids=[9])),
    ]
    framed = [b"\0" + response.SerializeToString() for response in responses]
    return [
        packed(framed),
        packed(framed[:3]),
        packed([framed[0], framed[5]]),
        packed([framed[0], framed[3]]),
    ]


OWN = PeerDescriptor(
    worker=WorkerKey("own", 3),
    fingerprint="f",
    pool=MemoryRegion(4096, 24 * 256, "DRAM", 0),
    block_bytes=256,
    num_blocks=24,
    generations=MemoryRegion(8192, 24 * 8, "DRAM", 0),
    agent_name="own@0000000000000003",
    agent_metadata=b"metadata",
)


def run_descriptor(data: bytes) -> None:
    try:
        message = pb.WorkerDescriptor.FromString(data[1:])
    except DecodeError:
        return
    try:
        peer = from_message(message, own=OWN)
    except DescriptorError as error:
        assert error.field
        assert len(error.detail) < 1000
        return
    assert peer.worker != OWN.worker
    assert peer.fingerprint == OWN.fingerprint
    assert peer.block_bytes == OWN.block_bytes
    assert peer.agent_name == str(peer.worker)
    assert peer.pool.length_bytes == peer.num_blocks * OWN.block_bytes


def descriptor_seeds() -> list[bytes]:
    other = PeerDescriptor(
        WorkerKey("peer", 5), "f", OWN.pool, 256, 24, OWN.generations, "peer@0000000000000005", b"metadata"
    )
    return [b"\0" + to_message(other).SerializeToString()]


TARGETS = {
    "handoff_owner": Target(
        "handoff_owner", run_owner, owner_seeds, frames_mutator(message_mutator([pb.ExchangeRequest]))
    ),
    "handoff_reader": Target(
        "handoff_reader", run_reader, reader_seeds, frames_mutator(message_mutator([pb.ExchangeResponse]))
    ),
    "descriptor": Target(
        "descriptor", run_descriptor, descriptor_seeds, message_mutator([pb.WorkerDescriptor])
    ),
}
