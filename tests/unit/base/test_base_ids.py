# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.ids import (
    MAX_NAME_CHARS,
    WorkerKey,
    from_hex64,
    is_name,
    is_request_id,
    new_incarnation,
    new_request_id,
    new_transfer_id,
    to_hex64,
)

names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)
uint64 = st.integers(1, 2**64 - 1)


@given(names, uint64)
def test_worker_key_round_trips_through_text(name: str, incarnation: int) -> None:
    key = WorkerKey(name, incarnation)
    assert WorkerKey.parse(str(key)) == key


@given(names, uint64, uint64)
def test_keys_are_equal_only_with_equal_incarnations(name: str, one: int, two: int) -> None:
    assert (WorkerKey(name, one) == WorkerKey(name, two)) == (one == two)


@given(st.text(max_size=80))
def test_parse_accepts_nothing_that_str_would_not_print(text: str) -> None:
    try:
        key = WorkerKey.parse(text)
    except ValueError:
        return
    assert str(key) == text


@pytest.mark.parametrize(
    "name", ["", "A", "a_b", "-a", "a-", "a.b", "a/b", "ä", "a" * (MAX_NAME_CHARS + 1), "a\n"]
)
def test_names_that_could_leave_their_key_are_refused(name: str) -> None:
    assert not is_name(name)
    with pytest.raises(ValueError, match="DNS label"):
        WorkerKey(name, 1)


@pytest.mark.parametrize("incarnation", [0, -1, 2**64])
def test_incarnation_is_a_positive_64_bit_number(incarnation: int) -> None:
    with pytest.raises(ValueError, match="incarnation"):
        WorkerKey("a", incarnation)


def test_random_numbers_differ_and_are_never_zero() -> None:
    drawn = [draw() for draw in (new_incarnation, new_transfer_id) for _ in range(500)]
    assert len(set(drawn)) == len(drawn)
    assert all(0 < number < 2**64 for number in drawn)


def test_minted_request_ids_are_valid() -> None:
    ids = {new_request_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(is_request_id(request_id) for request_id in ids)


@pytest.mark.parametrize("text", ["", " ", "a b", "a\n", "a" * 129, "ü", "a/b", "{x}"])
def test_request_ids_that_would_break_a_log_line_are_refused(text: str) -> None:
    assert not is_request_id(text)


@given(st.integers(0, 2**64 - 1))
def test_hex_round_trips_at_fixed_width(value: int) -> None:
    assert len(to_hex64(value)) == 16
    assert from_hex64(to_hex64(value)) == value


@pytest.mark.parametrize("text", ["", "0" * 15, "0" * 17, "A" * 16, "+000000000000001", "g" * 16])
def test_hex_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="hex digits"):
        from_hex64(text)
