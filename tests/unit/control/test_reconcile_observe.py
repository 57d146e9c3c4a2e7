# SPDX-License-Identifier: Apache-2.0
"""What a pool is taken to be while workers change their roles: as its record counts them, neither earlier nor later."""

import pytest

from twinpool.control.flip_counts import counted, scaled, taken_back
from twinpool.control.reconcile.crashes import CrashBook
from twinpool.control.reconcile.observe import ROLE_VALUES, Sight, replicas_of
from twinpool.control.reconcile.plan import plan
from twinpool.control.reconcile.spec import desired
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2

POOL = "default"
ROLES = {f"{POOL}-{role}-{number}": role for role in ("prefill", "decode") for number in range(2)}


class Actors:
    """All of them are run here."""

    names = sorted(ROLES)

    def role_of(self, name: str) -> str:
        return ROLES[name]


def flip() -> pb.Operation:
    return pb.Operation(
        id="f1",
        kind=pb.OPERATION_KIND_FLIP,
        state=pb.OPERATION_STATE_RUNNING,
        pool=POOL,
        worker=worker_pb2.WorkerId(name=f"{POOL}-decode-1", incarnation=1),
        role=worker_pb2.ROLE_DECODE,
        target_role=worker_pb2.ROLE_PREFILL,
    )


def changes(spec: pb.PoolSpec, running: list[pb.Operation], roles: dict[str, str]) -> list[object]:
    """What the reconciler would do."""
    records = {
        name: pb.WorkerRecord(
            worker=worker_pb2.WorkerId(name=name, incarnation=1),
            pool=POOL,
            role=ROLE_VALUES[role],
            state=pb.WORKER_STATE_READY,
        )
        for name, role in roles.items()
    }
    names = frozenset((*spec.counted, *spec.settled))
    sight = Sight(POOL, 0.0, records, running, frozenset(), {}, {}, set(records), names)
    return list(plan(POOL, desired(spec), replicas_of(sight, Actors(), CrashBook())))


@pytest.fixture
def spec() -> pb.PoolSpec:
    made = pb.PoolSpec(pool=POOL, generation=1)
    for part in (made.prefill, made.decode):
        part.desired, part.most = 2, 8
    return made


def test_nobody_is_started_or_drained_at_any_moment_of_a_flip(spec: pb.PoolSpec) -> None:
    operation, flipped = flip(), ROLES | {f"{POOL}-decode-1": "prefill"}
    # It is known before the record of the pool says anything.
    assert changes(spec, [operation], ROLES) == []
    during = counted(spec, operation, {operation.id})
    assert changes(during, [operation], ROLES) == []
    # Its worker has changed; then it has ended, and the record still names it.
    assert changes(during, [operation], flipped) == []
    assert changes(during, [], flipped) == []
    # Or it fails: it is under way until that is taken back.
    after = taken_back(during, operation, {operation.id})
    assert changes(after, [operation], ROLES) == changes(after, [], ROLES) == []
    assert (desired(after), list(after.counted)) == (desired(spec), [])


def test_a_scale_meanwhile_counts_it_as_done(spec: pb.PoolSpec) -> None:
    operation = flip()
    for record in (spec, counted(spec, operation, {operation.id})):
        later = scaled(record, 3, 1, [operation])
        assert changes(later, [operation], ROLES) == []
        # The record is as it was for a flip that would have been counted.
        assert counted(later, operation, {operation.id}) == later == taken_back(later, operation, set())
        assert scaled(later, 3, 1, [operation]) == later, "the same again is no change"
