# SPDX-License-Identifier: Apache-2.0
"""Plans against a model of a pool that carries them out: they end at what is wanted, and never go below it on the way."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from twinpool.control.reconcile.plan import (
    ROLES,
    Change,
    Drain,
    End,
    Replica,
    Stage,
    Start,
    first_role,
    free_names,
    number_of,
    plan,
)

POOL = "p"
NAMES = [f"{POOL}-{role}-{number}" for role in ROLES for number in range(6)]

counts = st.fixed_dictionaries({role: st.integers(0, 5) for role in ROLES})
replicas = st.builds(
    Replica,
    name=st.sampled_from(NAMES),
    # After a flip a name says nothing of the role.
    role=st.sampled_from(ROLES),
    stage=st.sampled_from(Stage),
    registered=st.booleans(),
    busy=st.booleans(),
    cordoned=st.booleans(),
    due=st.booleans(),
    load=st.integers(0, 3),
    started=st.floats(0, 3),
)
pools = st.lists(replicas, max_size=10, unique_by=lambda replica: replica.name)


def places(found: list[Replica], role: str) -> int:
    return sum(each.role == role and each.stage not in (Stage.HELD, Stage.LEAVING) for each in found)


def held(found: list[Replica], role: str) -> int:
    return sum(each.role == role and each.stage is Stage.HELD for each in found)


def carried_out(found: list[Replica], changes: list[Change]) -> list[Replica]:
    """What a plan begins."""
    by_name = {each.name: each for each in found}
    for change in changes:
        if isinstance(change, Start):
            made = Replica(change.name, change.role, Stage.STARTING)
            by_name[change.name] = replace(made, due=True)
        elif isinstance(change, Drain):
            by_name[change.name] = replace(by_name[change.name], stage=Stage.LEAVING, busy=True)
        else:
            assert isinstance(change, End)
            del by_name[change.name]
    return list(by_name.values())


def time_passes(found: list[Replica], draw: random.Random) -> list[Replica]:
    """Whatever is on its way may arrive."""
    later = []
    for each in found:
        if each.stage is Stage.LEAVING and draw.random() < 0.5:
            continue
        if each.stage in (Stage.STARTING, Stage.PENDING, Stage.UNREADY) and draw.random() < 0.5:
            later.append(replace(each, stage=Stage.READY, registered=True, busy=False))
        elif each.stage is Stage.READY and draw.random() < 0.1:
            later.append(replace(each, stage=Stage.ABSENT, registered=False, due=False, busy=False))
        else:
            later.append(replace(each, due=True, busy=each.busy and draw.random() < 0.5))
    return later


@given(pools, counts)
def test_a_plan_changes_a_name_once_and_spares_what_is_busy(
    found: list[Replica], wanted: dict[str, int]
) -> None:
    changes = plan(POOL, wanted, found)
    names = [change.name for change in changes]
    assert len(set(names)) == len(names)
    known = {each.name: each for each in found}
    for change in changes:
        each = known.get(change.name)
        if each is not None:
            assert not each.busy
            assert each.stage not in (Stage.LEAVING, Stage.HELD)
            if isinstance(change, Start):
                assert each.stage is Stage.ABSENT
                assert each.due
        if isinstance(change, Drain):
            assert each is not None
            assert each.registered


@given(pools, counts)
def test_a_plan_never_goes_below_what_is_wanted_nor_beyond(
    found: list[Replica], wanted: dict[str, int]
) -> None:
    after = carried_out(found, plan(POOL, wanted, found))
    for role in ROLES:
        before, now = places(found, role), places(after, role)
        assert now >= min(before, wanted[role])
        assert now <= max(before, wanted[role])
        # What an operator has drained for good is not replaced.
        assert now <= max(before, wanted[role] - held(found, role))


@given(pools, counts)
def test_a_plan_that_was_begun_leaves_nothing_to_do(found: list[Replica], wanted: dict[str, int]) -> None:
    idle = [replace(each, busy=False) for each in found]
    after = carried_out(idle, plan(POOL, wanted, idle))
    assert [change for change in plan(POOL, wanted, after) if not isinstance(change, Start)] == []
    assert places(carried_out(after, plan(POOL, wanted, after)), "decode") == places(after, "decode")


@given(pools, counts, st.integers(0, 1 << 30))
def test_plans_lead_to_what_is_wanted(found: list[Replica], wanted: dict[str, int], seed: int) -> None:
    """Whatever there was, and however long things take; crashes included, once they end."""
    draw = random.Random(seed)
    now = found
    for _ in range(8):
        now = time_passes(carried_out(now, plan(POOL, wanted, now)), draw)
    for _ in range(40):
        now = carried_out(now, plan(POOL, wanted, now))
        now = [
            replace(each, stage=Stage.READY, registered=True, busy=False, due=True)
            if each.stage not in (Stage.LEAVING, Stage.HELD, Stage.ABSENT)
            else replace(each, due=True, busy=False)
            for each in now
            if each.stage is not Stage.LEAVING
        ]
    assert plan(POOL, wanted, now) == []
    for role in ROLES:
        # Workers that serve are never ended for a place that is held.
        serving = [each for each in now if each.role == role and each.stage is Stage.READY]
        assert wanted[role] - held(now, role) <= len(serving) <= wanted[role]


def test_who_serves_least_goes_first() -> None:
    ready = {"registered": True, "stage": Stage.READY, "role": "decode"}
    order = [
        Replica("p-decode-0", "decode", Stage.ABSENT),
        Replica("p-decode-1", "decode", Stage.PENDING),
        Replica("p-decode-2", "decode", Stage.STARTING),
        Replica("p-decode-3", "decode", Stage.UNREADY, registered=True),
        Replica("p-decode-4", cordoned=True, load=9, **ready),  # type: ignore[arg-type]
        Replica("p-decode-5", load=1, started=5.0, **ready),  # type: ignore[arg-type]
        Replica("p-decode-6", load=1, started=4.0, **ready),  # type: ignore[arg-type]
        Replica("p-decode-8", load=2, started=9.0, **ready),  # type: ignore[arg-type]
        Replica("p-decode-7", load=2, started=9.0, **ready),  # type: ignore[arg-type]
    ]
    for kept in range(len(order)):
        gone = [
            change.name
            for change in plan("p", {"prefill": 0, "decode": kept}, reversed(order))
            if not isinstance(change, Start)
        ]
        assert gone == [each.name for each in order[: len(order) - kept]]


def test_names_are_counted_by_role_and_given_by_the_lowest_number() -> None:
    """A worker that was started as one role may have another one now."""
    flipped = Replica("p-prefill-0", "decode", Stage.READY, registered=True)
    changes = plan("p", {"prefill": 2, "decode": 1}, [flipped])
    assert changes == [Start("p-prefill-1", "prefill"), Start("p-prefill-2", "prefill")]
    names = free_names("p", "decode", {"p-decode-0", "p-decode-2"})
    assert [next(names) for _ in range(3)] == ["p-decode-1", "p-decode-3", "p-decode-4"]


def test_a_name_tells_the_first_role_of_its_own_pool_alone() -> None:
    assert first_role("p", "p-prefill-0") == "prefill"
    assert first_role("p", "p-decode-12") == "decode"
    for name in (
        "p-decode-01",
        "p-decode-",
        "p-decode-x",
        "q-decode-0",
        "p-other-0",
        "p-decode-0-1",
        "decode-0",
    ):
        assert first_role("p", name) is None
    assert (number_of("p-decode-12"), number_of("p-decode-x"), number_of("w0")) == (12, 0, 0)
