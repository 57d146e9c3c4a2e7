# SPDX-License-Identifier: Apache-2.0
"""Segments: what is written can be read at every moment, within the limits of a value and of the number of writes."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.ids import WorkerKey
from twinpool.kv_events import CacheState, digest, join, read_state, split
from twinpool.store import Keys
from twinpool.v1.locality_pb2 import LocalitySegment
from twinpool.worker.kv_events import segment_log
from twinpool.worker.kv_events.segment_log import (
    DELTA_SLACK,
    DELTAS_MAX,
    HASHES_MAX,
    MAX_VALUE_BYTES,
    Drop,
    Position,
    Put,
    SegmentLog,
)

INCARNATION = 7


def name(number: int) -> bytes:
    return random.Random(number).randbytes(16)


class Etcd:
    """A worker's set, its log, and what lies in etcd of it."""

    def __init__(self) -> None:
        self.held: dict[bytes, None] = {}
        self.next = 0
        self.log = SegmentLog(INCARNATION, lambda: join(self.held))
        self.values: dict[tuple[int, str], bytes] = {}
        self.writes = 0

    def change(self, *names: bytes, stored: bool = True) -> None:
        for one in names:
            if stored:
                self.held[one] = None
            else:
                del self.held[one]
        self.next += 1
        self.log.changed(self.position, list(names), stored=stored)

    @property
    def position(self) -> Position:
        return Position(self.next, len(self.held), digest(join(self.held)))

    def write(self) -> bool:
        write = self.log.next_write()
        if write is None:
            return False
        self.writes += 1
        if isinstance(write, Put):
            assert len(write.value) <= MAX_VALUE_BYTES
            self.values[write.generation, write.segment] = write.value
        else:
            self.values = {key: value for key, value in self.values.items() if key[0] != write.generation}
        self.log.done(write)
        return True

    def flush(self) -> None:
        while self.write():
            pass

    def read(self) -> CacheState | None:
        # In whatever order a listing gives them.
        values = list(self.values.values())
        random.Random(len(values)).shuffle(values)
        return read_state(values, INCARNATION)

    def assert_complete(self) -> None:
        state = self.read()
        assert state is not None
        assert set(split(state.hashes)) == set(self.held)
        assert state.next_sequence == self.next


def test_an_empty_set_is_known_to_be_empty() -> None:
    etcd = Etcd()
    assert etcd.read() is None
    etcd.flush()
    assert etcd.read() == CacheState(b"", 0)


def test_all_that_happens_between_two_writes_is_one_value() -> None:
    etcd = Etcd()
    etcd.flush()
    for number in range(500):
        etcd.change(name(number))
    for number in range(400):
        etcd.change(name(number), stored=False)
    before = etcd.writes
    etcd.flush()
    assert etcd.writes == before + 1
    etcd.assert_complete()
    delta = LocalitySegment.FromString(etcd.values[1, "delta-0000"])
    assert len(delta.stored) == 100 * 16
    assert not delta.removed


def test_what_comes_and_goes_between_two_writes_is_not_written() -> None:
    etcd = Etcd()
    etcd.change(name(1))
    etcd.flush()
    etcd.change(name(1), stored=False)
    etcd.change(name(1))
    etcd.change(name(2))
    etcd.change(name(2), stored=False)
    before = etcd.writes
    etcd.flush()
    assert etcd.writes == before
    # The stream went on while nothing was worth a write: a reader replays from where the segments stand.
    state = etcd.read()
    assert state is not None
    assert state.next_sequence < etcd.next


def test_a_set_larger_than_a_value_is_written_in_parts() -> None:
    etcd = Etcd()
    etcd.change(*(name(number) for number in range(HASHES_MAX + 1)))
    assert etcd.write()
    assert etcd.read() is None
    assert etcd.write()
    etcd.assert_complete()
    assert sorted(segment for _, segment in etcd.values) == ["base-0000", "base-0001"]


def test_deltas_out_of_proportion_begin_a_new_generation() -> None:
    etcd = Etcd()
    etcd.change(name(0))
    etcd.flush()
    for number in range(1, 2 * DELTAS_MAX):
        etcd.change(name(number))
        etcd.flush()
        etcd.assert_complete()
        assert len(etcd.values) <= DELTAS_MAX + 2
    assert {generation for generation, _ in etcd.values} == {2}
    etcd.change(*(name(number) for number in range(1000, 1001 + DELTA_SLACK)))
    etcd.change(*(name(number) for number in range(10_000, 10_000 + DELTA_SLACK)))
    etcd.flush()
    etcd.assert_complete()
    assert {generation for generation, _ in etcd.values} == {3}


def test_a_reader_always_finds_a_complete_generation(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Also in the middle of writing a new one, while the set goes on changing."""
    monkeypatch.setattr(segment_log, "HASHES_MAX", 50)
    monkeypatch.setattr(segment_log, "DELTA_SLACK", 20)
    etcd = Etcd()
    etcd.flush()
    seen = -1
    for number in range(2000):
        etcd.change(name(number))
        if number >= 300:
            etcd.change(name(number - 300), stored=False)
        if number % 5 == 0:
            etcd.write()
        state = etcd.read()
        assert state is not None
        assert state.next_sequence >= seen
        seen = state.next_sequence
    etcd.flush()
    etcd.assert_complete()


def test_a_lost_lease_begins_anew() -> None:
    etcd = Etcd()
    etcd.change(name(1))
    etcd.flush()
    etcd.change(name(2))
    unfinished = etcd.log.next_write()
    assert unfinished is not None
    etcd.values.clear()
    etcd.log.restart()
    etcd.log.done(unfinished)
    etcd.flush()
    etcd.assert_complete()
    assert {generation for generation, _ in etcd.values} == {2}


def test_a_write_that_failed_is_given_out_again() -> None:
    etcd = Etcd()
    etcd.flush()
    etcd.change(name(1))
    first = etcd.log.next_write()
    etcd.change(name(2))
    assert etcd.log.next_write() is first
    etcd.flush()
    etcd.assert_complete()


def test_without_etcd_for_long_memory_is_bounded() -> None:
    etcd = Etcd()
    etcd.flush()
    for start in range(0, 3 * HASHES_MAX, 1000):
        names = [name(number) for number in range(start, start + 1000)]
        etcd.change(*names)
        etcd.change(*names, stored=False)
        assert etcd.log.pending <= 2 * HASHES_MAX
    kept = [name(number) for number in range(HASHES_MAX + 10)]
    etcd.change(*kept)
    etcd.change(*kept[:20], stored=False)
    etcd.change(name(-1))
    etcd.flush()
    etcd.assert_complete()


def test_values_that_make_no_sense_are_as_good_as_missing() -> None:
    etcd = Etcd()
    etcd.change(name(1))
    etcd.flush()
    etcd.change(name(2))
    etcd.flush()
    base, delta = etcd.values[1, "base-0000"], etcd.values[1, "delta-0000"]
    assert read_state([b"\xff", base], INCARNATION) == CacheState(name(1), 1)
    assert read_state([base, delta], INCARNATION + 1) is None
    assert read_state([delta], INCARNATION) is None
    torn = LocalitySegment.FromString(base)
    torn.stored = torn.stored[:-1]
    assert read_state([torn.SerializeToString()], INCARNATION) is None
    other = LocalitySegment.FromString(base)
    other.stored = name(9)
    assert read_state([other.SerializeToString()], INCARNATION) is None
    later = LocalitySegment.FromString(delta)
    later.from_sequence += 1
    assert read_state([base, later.SerializeToString()], INCARNATION) == CacheState(name(1), 1)
    wrong = LocalitySegment.FromString(delta)
    wrong.stored = name(9)
    assert read_state([base, wrong.SerializeToString()], INCARNATION) == CacheState(name(1), 1)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("store"), st.integers(0, 40)),
            st.tuples(st.just("remove"), st.integers(0, 40)),
            st.tuples(st.just("write"), st.integers(1, 3)),
            st.tuples(st.just("lose"), st.just(0)),
        ),
        max_size=120,
    )
)
def test_segments_follow_any_history(steps: list[tuple[str, int]]) -> None:
    etcd = Etcd()
    for kind, number in steps:
        if kind == "store" and name(number) not in etcd.held:
            etcd.change(name(number))
        elif kind == "remove" and name(number) in etcd.held:
            etcd.change(name(number), stored=False)
        elif kind == "write":
            for _ in range(number):
                etcd.write()
        elif kind == "lose":
            etcd.values.clear()
            etcd.log.restart()
    etcd.flush()
    state = etcd.read()
    assert state is not None
    assert set(split(state.hashes)) == set(etcd.held)
    assert isinstance(etcd.log.next_write(), Drop | None)


def test_keys_are_read_back() -> None:
    keys = Keys("c")
    key = keys.locality_segment("w-1", 255, 3, "delta-0001")
    assert key == "/twinpool/v1/c/locality/w-1/00000000000000ff/00000003/delta-0001"
    assert key.startswith(keys.locality_generation("w-1", 255, 3))
    assert keys.parse_locality(key) == WorkerKey("w-1", 255)
