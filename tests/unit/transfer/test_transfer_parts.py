# SPDX-License-Identifier: Apache-2.0
"""The small parts: spans, fence, NIXL's words and errors, descriptors, digests."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinpool.ids import WorkerKey
from twinpool.transfer import nixl_backend
from twinpool.transfer.base import Fault, MemoryRegion, PeerDescriptor, PoolMemory, ReadStatus
from twinpool.transfer.descriptor import (
    METADATA_BYTES_MAX,
    DescriptorError,
    agent_name,
    from_message,
    to_message,
    worker_key,
)
from twinpool.transfer.digest import pool_digest, wanted
from twinpool.transfer.fence import HandoffFailure, HandoffFault, check_digests, check_generations
from twinpool.transfer.spans import Landing, count_runs, cover
from twinpool.v1 import handoff_pb2, worker_pb2
from twinpool.v1.worker_pb2 import FailureReason

# --- spans

block_lists = st.lists(st.integers(0, 3000), max_size=60)


@given(block_lists, st.integers(1, 700))
def test_a_cover_holds_every_block_and_no_gap_wider_than_allowed(numbers: list[int], gap: int) -> None:
    blocks = np.array(numbers, dtype=np.int32)
    entries, positions = cover(blocks, gap)
    assert np.array_equal(entries[positions], blocks) if len(blocks) else len(entries) == 0
    assert np.array_equal(entries, np.unique(entries))
    wanted_set = np.unique(blocks)
    # An entry that nobody asked for lies between two that are at most ``gap`` apart.
    for extra in np.setdiff1d(entries, wanted_set):
        at = int(np.searchsorted(wanted_set, extra))
        assert wanted_set[at] - wanted_set[at - 1] <= gap


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=80))
def test_landing_runs_never_overlap(steps: list[tuple[bool, int]]) -> None:
    landing = Landing(100)
    taken: dict[int, int] = {}
    for take, size in steps:
        if take:
            start = landing.take(size)
            if start is None:
                free = np.ones(100, dtype=bool)
                for low, count in taken.items():
                    free[low : low + count] = False
                runs = "".join("1" if f else "0" for f in free).split("0")
                assert max(len(run) for run in runs) < size
                continue
            assert 0 <= start <= 100 - size
            assert all(start + size <= low or low + count <= start for low, count in taken.items())
            taken[start] = size
        elif taken:
            start = sorted(taken)[size % len(taken)]
            landing.give(start)
            del taken[start]
        assert landing.free == 100 - sum(taken.values())
    with pytest.raises(KeyError):
        landing.give(100)


def test_runs_are_counted_as_nixl_joins_them() -> None:
    def runs(remote: list[int], local: list[int]) -> int:
        return count_runs(np.array(remote, np.int32), np.array(local, np.int32))

    assert runs([], []) == 0
    assert runs([1, 2, 3], [7, 8, 9]) == 1
    assert runs([1, 2, 3], [7, 8, 10]) == 2
    assert runs([3, 2, 1], [3, 2, 1]) == 3


# --- fence


def test_generations_must_all_be_equal() -> None:
    def check(expected: list[int], actual: list[int]) -> HandoffFailure | None:
        return check_generations(expected, np.array(actual, dtype=np.uint64))

    assert check([], []) is None
    assert check([1, 2**64 - 1], [1, 2**64 - 1]) is None
    for expected, actual in (([1, 2], [1, 3]), ([2**63], [2**63 + 1]), ([1], [1, 1]), ([1, 1], [1])):
        failure = check(expected, actual)
        assert failure is not None
        assert failure.fault is HandoffFault.STALE_GENERATION
        assert failure.fenced


def test_digests_must_all_be_equal() -> None:
    assert check_digests([5, 6], [5, 6]) is None
    for actual in ([5, 7], [5], [5, 6, 7]):
        failure = check_digests([5, 6], actual)
        assert failure is not None
        assert failure.fault is HandoffFault.DIGEST_MISMATCH


@pytest.mark.parametrize("fault", list(HandoffFault))
def test_every_hand_off_fault_has_a_reason_for_the_wire(fault: HandoffFault) -> None:
    assert HandoffFailure.of(fault, "").reason != FailureReason.FAILURE_REASON_UNSPECIFIED


@pytest.mark.parametrize("fault", list(Fault))
def test_every_read_fault_becomes_a_hand_off_failure(fault: Fault) -> None:
    failure = HandoffFailure.of_read(fault, "why")
    assert not failure.fenced
    assert failure.detail == f"{fault}: why"


def test_an_owners_failure_without_a_reason_is_internal() -> None:
    assert HandoffFailure.of_owner(0, "").reason == FailureReason.FAILURE_REASON_INTERNAL
    assert HandoffFailure.of_owner(12345, "").reason == FailureReason.FAILURE_REASON_INTERNAL  # type: ignore[arg-type]


# --- NIXL's words and errors


@pytest.mark.parametrize("posting", [True, False])
def test_nixls_words(posting: bool) -> None:
    def state(word: str) -> tuple[ReadStatus, Fault | None, bool]:
        got = nixl_backend.state_of_word(word, posting=posting)
        return got.status, got.fault, got.fenced

    assert state("DONE") == (ReadStatus.DONE, None, True)
    assert state("PROC") == (ReadStatus.PENDING, None, False)
    assert state("ERR") == (ReadStatus.FAILED, Fault.BACKEND, not posting)
    for word in ("", "done", "CANCELLED", "SOMETHING_NEW"):
        assert state(word) == (ReadStatus.FAILED, Fault.UNKNOWN, False)


def test_every_exception_of_nixl_is_mapped() -> None:
    bindings = __import__(nixl_backend.load_api().__package__ + "._bindings", fromlist=["nixlAgent"])
    names = [name for name in dir(bindings) if name.endswith("Error")]
    assert len(names) >= 10
    unmapped = [name for name in names if name not in nixl_backend._FAULTS]
    assert unmapped == ["nixlNoTelemetryError"]  # telemetry is not asked for
    for name in names:
        error = getattr(bindings, name)("text\nsecond line")
        for posting in (True, False):
            state = nixl_backend.state_of_error(error, posting=posting)
            assert state.status is ReadStatus.FAILED
            assert "\n" not in state.detail


def test_which_errors_fence() -> None:
    def fenced(name: str, posting: bool) -> bool:
        return nixl_backend.state_of_error(type(name, (Exception,), {})(), posting=posting).fenced

    assert fenced("nixlRemoteDisconnectError", True)
    assert fenced("nixlRemoteDisconnectError", False)
    assert fenced("nixlInvalidParamError", True)  # refused before anything was sent
    assert not fenced("nixlBackendError", True)  # the first descriptors may be on their way
    assert fenced("nixlBackendError", False)
    assert not fenced("nixlNotFoundError", False)  # its peer was removed: bytes still land
    assert not fenced("SomethingNew", False)
    assert not fenced("SomethingNew", True)


@pytest.mark.parametrize("before", [None, "all"])
def test_the_environment_is_set_for_the_agent_alone(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    if before is not None:
        monkeypatch.setenv("UCX_TLS", before)
    with nixl_backend.ucx_environment("tcp,self"):
        assert os.environ["UCX_TLS"] == "tcp,self"
    assert os.environ.get("UCX_TLS") == before
    with nixl_backend.ucx_environment(None):
        assert os.environ.get("UCX_TLS") == before


@pytest.mark.parametrize("before", [None, "off"])
def test_pools_in_vram_are_read_over_cuda_ipc_unless_an_operator_says_otherwise(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = nixl_backend.GET_OVER_IPC
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with nixl_backend.ucx_environment(None):
        assert os.environ.get(name) == before
    with nixl_backend.ucx_environment(None, "VRAM"):
        assert os.environ[name] == (before or "on")
    assert os.environ.get(name) == before


# --- descriptors

OWN = PeerDescriptor(
    worker=WorkerKey("own", 1),
    fingerprint="model-a",
    pool=MemoryRegion(0x10000, 4 * 100),
    block_bytes=100,
    num_blocks=4,
    generations=MemoryRegion(0x20000, 32),
    agent_name=agent_name(WorkerKey("own", 1)),
    agent_metadata=b"metadata of own",
)
PEER = replace(
    OWN,
    worker=WorkerKey("peer", 2),
    pool=MemoryRegion(0x30000, 900, "VRAM", 3),
    num_blocks=9,
    generations=MemoryRegion(0x40000, 72),
    agent_name=agent_name(WorkerKey("peer", 2)),
    agent_metadata=b"metadata of peer",
)


def test_a_descriptor_survives_the_wire() -> None:
    message = to_message(PEER)
    assert from_message(type(message).FromString(message.SerializeToString()), own=OWN) == PEER


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("worker", {"worker": worker_pb2.WorkerId(name="peer", incarnation=0)}),
        ("worker", {"worker": worker_pb2.WorkerId(name="Not A Label", incarnation=2)}),
        ("worker", {"worker": worker_pb2.WorkerId(name="own", incarnation=1)}),
        ("worker", {"worker": worker_pb2.WorkerId(name="peer", incarnation=3)}),
        ("fingerprint", {"fingerprint": "model-b"}),
        ("block_bytes", {"block_bytes": 200}),
        ("num_blocks", {"num_blocks": 0}),
        ("num_blocks", {"num_blocks": 2**31}),
        ("pool", {"num_blocks": 8}),
        ("pool", {"pool": handoff_pb2.MemoryRegion(address=1, length_bytes=899, memory_type="DRAM")}),
        ("pool", {"pool": handoff_pb2.MemoryRegion(address=0, length_bytes=900, memory_type="DRAM")}),
        ("pool", {"pool": handoff_pb2.MemoryRegion(address=1, length_bytes=900, memory_type="FILE")}),
        ("pool", {"pool": handoff_pb2.MemoryRegion(address=2**64 - 5, length_bytes=900, memory_type="DRAM")}),
        (
            "generations",
            {"generations": handoff_pb2.MemoryRegion(address=8, length_bytes=64, memory_type="DRAM")},
        ),
        (
            "generations",
            {"generations": handoff_pb2.MemoryRegion(address=9, length_bytes=72, memory_type="DRAM")},
        ),
        (
            "generations",
            {"generations": handoff_pb2.MemoryRegion(address=8, length_bytes=72, memory_type="VRAM")},
        ),
        ("agent_name", {"agent_name": "peer"}),
        ("agent_metadata", {"agent_metadata": b""}),
        ("agent_metadata", {"agent_metadata": b"metadata of pee"}),
        ("agent_metadata", {"agent_metadata": b"x" * (METADATA_BYTES_MAX + 1)}),
        ("agent_metadata", {"agent_metadata_sha256": b""}),
    ],
)
def test_a_wrong_descriptor_is_refused_by_name(field: str, change: dict[str, object]) -> None:
    message = to_message(PEER)
    for name, value in change.items():
        if hasattr(value, "DESCRIPTOR"):
            getattr(message, name).CopyFrom(value)
        else:
            setattr(message, name, value)
    with pytest.raises(DescriptorError) as caught:
        from_message(message, own=OWN, expected=PEER.worker)
    assert caught.value.field == field
    assert caught.value.fault is Fault.PEER_REFUSED


def test_a_mismatch_names_both_sides() -> None:
    message = to_message(PEER)
    message.fingerprint = "model-b"
    with pytest.raises(DescriptorError, match=r"'model-b'.*'model-a'"):
        from_message(message, own=OWN)


@given(st.binary(max_size=60))
def test_garbage_never_becomes_a_descriptor(data: bytes) -> None:
    message = handoff_pb2.WorkerDescriptor()
    try:
        message.ParseFromString(data)
    except Exception:
        return
    with pytest.raises(DescriptorError):
        from_message(message, own=OWN)


def test_worker_keys_from_the_wire() -> None:
    assert worker_key(worker_pb2.WorkerId(name="a", incarnation=2**64 - 1)) == WorkerKey("a", 2**64 - 1)
    with pytest.raises(DescriptorError):
        worker_key(worker_pb2.WorkerId())


# --- pools and digests


def test_a_pool_of_a_tensor_is_the_pool_of_its_memory() -> None:
    tensor = torch.zeros(4, 3, 5, 7, dtype=torch.bfloat16)
    pool = PoolMemory.of_tensor(tensor)
    assert pool.region == MemoryRegion(tensor.data_ptr(), 4 * 3 * 5 * 7 * 2)
    assert (pool.block_bytes, pool.num_blocks) == (210, 4)
    with pytest.raises(ValueError, match="contiguous"):
        PoolMemory.of_tensor(tensor.transpose(0, 1))
    with pytest.raises(ValueError, match="no transfer from device meta"):
        PoolMemory.of_tensor(torch.empty(4, 2, device="meta"))
    with pytest.raises(ValueError, match="contiguous"):
        PoolMemory.of_array(np.zeros((4, 6))[:, ::2])
    with pytest.raises(ValueError, match="is not 3 x 64"):
        PoolMemory(MemoryRegion(1, 100), 64, 3, None)


def test_digests_see_every_byte_of_a_block_and_nothing_else() -> None:
    random = np.random.default_rng(3)
    array = random.integers(0, 256, (6, 200), dtype=np.uint8)
    digest = pool_digest(PoolMemory.of_array(array))
    order = np.array([4, 1, 5], dtype=np.int32)
    before = digest(order)
    assert before == [digest(order[i : i + 1])[0] for i in range(3)]
    array[[0, 2, 3]] = 0
    assert digest(order) == before
    for position in (0, 99, 199):
        array[1, position] ^= 1
        changed = digest(order)
        assert (changed[0], changed[2]) == (before[0], before[2])
        assert changed[1] != before[1]
        array[1, position] ^= 1
    assert digest(np.empty(0, np.int32)) == []
    for outside in (-1, 6):
        with pytest.raises(ValueError, match="outside the pool"):
            digest(np.array([outside], np.int32))


def test_a_device_pool_is_not_read_as_host_memory() -> None:
    with pytest.raises(ValueError, match="host memory"):
        pool_digest(PoolMemory(MemoryRegion(1, 128, "VRAM"), 64, 2, None))


def test_digest_policies() -> None:
    assert not any(wanted("off", number) for number in range(100))
    assert all(wanted("always", number) for number in range(100))
    assert 0 < sum(wanted("sample", number) for number in range(1000)) < 100
