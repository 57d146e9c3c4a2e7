# SPDX-License-Identifier: Apache-2.0
"""What to change so that a pool becomes what it shall be: from what is wanted and what there is to a list of changes.

No clock, no I/O, no memory: the same view gives the same plan, and a plan that was carried out gives an empty one. A worker that
an operation is about is left alone, but counted by what it will be afterwards.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

ROLES: Final = ("prefill", "decode")


class Stage(Enum):
    """Where a replica stands, as far as a plan goes."""

    ABSENT = "absent"
    """It has ended by itself; its name and place are kept until it may be started again."""
    PENDING = "pending"
    """Ray has no place for it."""
    STARTING = "starting"
    """On its way."""
    UNREADY = "unready"
    """Registered, but not fit for work."""
    READY = "ready"
    """It takes work."""
    LEAVING = "leaving"
    """It leaves and is not replaced: its name is taken, its place is not."""
    HELD = "held"
    """An operator drained it for good: its place is not to be filled."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A worker that the control process runs, has run, or is to run again."""

    name: str
    role: str
    """What it is; while it changes, what it will be."""
    stage: Stage
    registered: bool = False
    """Whether its record is there, so that it can be drained."""
    busy: bool = False
    """Whether an operation is about it."""
    cordoned: bool = False
    due: bool = True
    """Of one that is absent: whether it may be started again now."""
    load: int = 0
    """Requests on it."""
    started: float = 0.0
    """When it started, in seconds since any moment."""


@dataclass(frozen=True, slots=True)
class Start:
    """Begin to run a worker."""

    name: str
    role: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Let a registered worker leave in order."""

    name: str
    role: str


@dataclass(frozen=True, slots=True)
class End:
    """End a worker that was never registered, or forget one that is absent."""

    name: str
    role: str


Change = Start | Drain | End

_WORTH: Final = {
    Stage.ABSENT: 0,
    Stage.PENDING: 1,
    Stage.STARTING: 2,
    Stage.UNREADY: 3,
    Stage.READY: 4,
}
"""Who goes first: what does not serve costs nobody anything."""


def plan(pool: str, desired: Mapping[str, int], replicas: Iterable[Replica]) -> list[Change]:
    """The changes that bring ``pool`` to ``desired`` workers a role. At most one for each name.

    Too many: those go that do not serve, then those that are cordoned, then the least loaded, of them the newest.
    Too few: new ones take the lowest free numbers of their role's names.
    """
    there = list(replicas)
    taken = {replica.name for replica in there}
    changes: list[Change] = []
    for role in ROLES:
        mine = [replica for replica in there if replica.role == role]
        held = sum(replica.stage is Stage.HELD for replica in mine)
        places = [replica for replica in mine if replica.stage not in (Stage.HELD, Stage.LEAVING)]
        missing = desired[role] - held - len(places)
        if missing < 0:
            # What is held leaves its place empty, but never makes a worker too many.
            surplus = min(-missing, max(0, len(places) - desired[role]))
            changes += _shrink(places, surplus)
        ended = {change.name for change in changes}
        changes += [
            Start(replica.name, role)
            for replica in places
            if replica.stage is Stage.ABSENT
            and replica.due
            and not replica.busy
            and replica.name not in ended
        ]
        names = free_names(pool, role, taken)
        for _ in range(missing):
            name = next(names)
            taken.add(name)
            changes.append(Start(name, role))
    return changes


def _shrink(places: Sequence[Replica], surplus: int) -> list[Change]:
    free = sorted((replica for replica in places if not replica.busy), key=_value)
    return [
        Drain(replica.name, replica.role) if replica.registered else End(replica.name, replica.role)
        for replica in free[:surplus]
    ]


def _value(replica: Replica) -> tuple[float, ...]:
    """The lower, the sooner it goes. Of equals the one with the highest number goes."""
    return (
        _WORTH[replica.stage],
        not replica.cordoned,
        replica.load,
        -replica.started,
        -number_of(replica.name),
    )


def free_names(pool: str, role: str, taken: Iterable[str]) -> Iterator[str]:
    """Names of a role that nobody has, the lowest numbers first, without an end."""
    used = set(taken)
    number = 0
    while True:
        name = f"{pool}-{role}-{number}"
        if name not in used:
            yield name
        number += 1


def first_role(pool: str, name: str) -> str | None:
    """The role that a worker of that name starts in; None: it is no name that a pool gives."""
    found = re.fullmatch(rf"{re.escape(pool)}-({'|'.join(ROLES)})-(0|[1-9][0-9]{{0,8}})", name)
    return found[1] if found else None


def number_of(name: str) -> int:
    """The number at a name's end; 0 without one."""
    tail = name.rpartition("-")[2]
    return int(tail) if tail.isascii() and tail.isdigit() and len(tail) < 10 else 0
