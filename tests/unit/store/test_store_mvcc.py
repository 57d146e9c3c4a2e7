# SPDX-License-Identifier: Apache-2.0
"""The embedded store's state against the simplest possible model: a copy of everything for each revision."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from twinpool.store.mvcc import Change, Mvcc, MvccError, in_range

KEYS = [b"a", b"a/1", b"a/2", b"a0", b"ab", b"b"]
keys = st.sampled_from(KEYS)
values = st.binary(max_size=3)


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = Mvcc()
        self.past: dict[int, dict[bytes, tuple[bytes, int]]] = {1: {}}
        self.now = 0.0
        self.leases: dict[int, tuple[int, float]] = {}

    @property
    def present(self) -> dict[bytes, tuple[bytes, int]]:
        return dict(self.past[self.state.revision])

    def check(
        self, changes: list[Change], after: dict[bytes, tuple[bytes, int]], before_revision: int
    ) -> None:
        before = self.past[before_revision]
        touched = {change.now.key for change in changes}
        assert self.state.revision == before_revision + bool(changes)
        assert touched >= {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        self.past[self.state.revision] = after

    @rule(key=keys, value=values, lease=st.integers(0, 3))
    def put(self, key: bytes, value: bytes, lease: int) -> None:
        revision, after = self.state.revision, self.present
        if lease and lease not in self.leases:
            with pytest.raises(MvccError, match="lease"):
                self.state.write(lambda: self.state.put(key, value, lease))
            return
        changes = self.state.write(lambda: self.state.put(key, value, lease))
        after[key] = (value, lease)
        self.check(changes, after, revision)

    @rule(start=keys, end=st.sampled_from([b"", b"a0", b"b", b"\0"]))
    def delete(self, start: bytes, end: bytes) -> None:
        revision, after = self.state.revision, self.present
        changes = self.state.write(lambda: self.state.delete(start, end))
        gone = [key for key in after if in_range(key, start, end)]
        assert sorted(change.now.key for change in changes) == sorted(gone)
        for key in gone:
            del after[key]
        self.check(changes, after, revision)

    @rule(lease=st.integers(1, 3), ttl=st.integers(1, 5))
    def grant(self, lease: int, ttl: int) -> None:
        if lease in self.leases:
            with pytest.raises(MvccError, match="lease_exists"):
                self.state.grant(self.now, lease, ttl)
            return
        self.state.grant(self.now, lease, ttl)
        self.leases[lease] = (ttl, self.now + ttl)

    @rule(lease=st.integers(1, 3))
    def renew(self, lease: int) -> None:
        ttl = self.leases.get(lease, (0, 0))[0]
        assert self.state.renew(self.now, lease) == ttl
        if ttl:
            self.leases[lease] = (ttl, self.now + ttl)

    @rule(seconds=st.floats(0, 3))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due = sorted(lease for lease, (_, deadline) in self.leases.items() if deadline <= self.now)
        assert sorted(self.state.expired(self.now)) == due
        for lease in due:
            self._end(lease)

    @rule(lease=st.integers(1, 3))
    def revoke(self, lease: int) -> None:
        if lease in self.leases:
            self._end(lease)
        else:
            with pytest.raises(MvccError, match="lease"):
                self.state.revoke(lease)

    def _end(self, lease: int) -> None:
        revision, after = self.state.revision, self.present
        changes = self.state.revoke(lease)
        after = {key: entry for key, entry in after.items() if entry[1] != lease}
        del self.leases[lease]
        self.check(changes, after, revision)

    @rule(back=st.integers(0, 4))
    def compact(self, back: int) -> None:
        revision = self.state.revision - back
        if revision <= self.state.compacted:
            with pytest.raises(MvccError, match="compacted"):
                self.state.compact(revision)
        else:
            self.state.compact(revision)

    @rule()
    def the_future_is_refused(self) -> None:
        with pytest.raises(MvccError, match="future"):
            self.state.range(b"a", b"\0", self.state.revision + 1)
        with pytest.raises(MvccError, match="future"):
            self.state.compact(self.state.revision + 1)

    @invariant()
    def every_kept_revision_reads_as_it_was(self) -> None:
        for revision, wanted in self.past.items():
            if revision < self.state.compacted:
                with pytest.raises(MvccError, match="compacted"):
                    self.state.range(b"\0", b"\0", revision)
                continue
            found = {
                version.key: (version.value, version.lease)
                for version in self.state.range(b"\0", b"\0", revision)
            }
            assert found == wanted

    @invariant()
    def history_replays_to_the_present(self) -> None:
        first = max(self.state.compacted, 1)
        view = {key: value for key, (value, _) in self.past[first].items()}
        for revision, changes in self.state.changes(first + 1):
            assert all(change.now.mod == revision for change in changes)
            for change in changes:
                if change.now.value is None:
                    del view[change.now.key]
                else:
                    view[change.now.key] = change.now.value
        assert view == {key: value for key, (value, _) in self.present.items()}

    @invariant()
    def versions_count_from_creation(self) -> None:
        for version in self.state.range(b"\0", b"\0"):
            assert 1 <= version.version <= version.mod - version.create + 1
            assert version.create <= version.mod <= self.state.revision


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_history_is_bounded() -> None:
    state = Mvcc(max_history=100)
    for number in range(1000):
        state.write(lambda number=number: state.put(b"k%d" % (number % 3), b"x"))  # type: ignore[misc]
    assert len(list(state.changes(state.compacted))) <= 100
    assert state.revision == 1001
    with pytest.raises(MvccError, match="compacted"):
        list(state.changes(2))


@pytest.mark.parametrize(
    ("start", "end", "inside"),
    [
        (b"a", b"", {b"a"}),
        (b"a", b"\0", {b"a", b"a/1", b"a/2", b"a0", b"ab", b"b"}),
        (b"a/", b"a0", {b"a/1", b"a/2"}),
        (b"b", b"a", set()),
    ],
)
def test_ranges_are_etcds(start: bytes, end: bytes, inside: set[bytes]) -> None:
    assert {key for key in KEYS if in_range(key, start, end)} == inside
