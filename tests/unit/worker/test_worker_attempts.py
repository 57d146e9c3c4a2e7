# SPDX-License-Identifier: Apache-2.0
"""The table of attempts, also against a plain model of it."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.transfer.base import AttemptKey
from twinpool.worker.attempts import AttemptTable


@dataclass(frozen=True)
class Entry:
    key: AttemptKey
    session: int
    deadline: float | None


def _entry(number: int, session: int = 1, deadline: float | None = None) -> Entry:
    return Entry(AttemptKey(f"r{number}", 1), session, deadline)


def test_a_second_of_the_same_key_is_refused_and_changes_nothing() -> None:
    table: AttemptTable[Entry] = AttemptTable()
    first = _entry(1)
    table.add(first)
    with pytest.raises(KeyError):
        table.add(_entry(1, session=2))
    assert table.get(first.key) is first
    assert table.of_session(2) == []


def test_another_attempt_of_the_same_request_is_another_entry() -> None:
    table: AttemptTable[Entry] = AttemptTable()
    table.add(Entry(AttemptKey("r", 1), 1, None))
    table.add(Entry(AttemptKey("r", 2), 1, None))
    assert len(table) == 2


def test_deadlines_come_once_and_not_for_the_ended() -> None:
    table: AttemptTable[Entry] = AttemptTable()
    for number, deadline in ((1, 5.0), (2, 3.0), (3, None), (4, 9.0)):
        table.add(_entry(number, deadline=deadline))
    assert table.next_deadline() == 3.0
    table.pop(AttemptKey("r2", 1))
    assert table.next_deadline() == 5.0
    assert [entry.key.request_id for entry in table.expired(6.0)] == ["r1"]
    assert table.expired(6.0) == []
    assert table.next_deadline() == 9.0


def test_ending_while_iterating() -> None:
    table: AttemptTable[Entry] = AttemptTable()
    for number in range(4):
        table.add(_entry(number))
    for entry in table:
        assert table.pop(entry.key) is entry
    assert len(table) == 0
    assert table.pop(AttemptKey("r0", 1)) is None


_operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "pop", "expire"]), st.integers(0, 9), st.integers(1, 3), st.integers(0, 20)
    ),
    max_size=60,
)


@given(_operations)
@settings(max_examples=200, deadline=None)
def test_agrees_with_a_plain_dict(operations: list[tuple[str, int, int, int]]) -> None:
    table: AttemptTable[Entry] = AttemptTable()
    model: dict[AttemptKey, Entry] = {}
    told: set[AttemptKey] = set()
    for kind, number, session, time in operations:
        entry = _entry(number, session, None if time % 4 == 0 else float(time))
        if kind == "add" and entry.key not in model:
            table.add(entry)
            model[entry.key] = entry
            told.discard(entry.key)
        elif kind == "pop":
            assert table.pop(entry.key) is model.pop(entry.key, None)
        elif kind == "expire":
            found = {item.key for item in table.expired(float(time))}
            due = {item.key for item in model.values() if item.deadline is not None and item.deadline <= time}
            assert found == due - told
            told |= found
        assert len(table) == len(model)
        for which in (1, 2, 3):
            assert set(table.of_session(which)) == {item for item in model.values() if item.session == which}
        left = [
            item.deadline for item in model.values() if item.deadline is not None and item.key not in told
        ]
        assert table.next_deadline() == (min(left) if left else None)
