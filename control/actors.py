# SPDX-License-Identifier: Apache-2.0
"""What Ray says of the actors of workers: whether they have a place, how often they were started anew, why they ended.

Of Ray's own tables, since its public calls for them need its dashboard.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from twinpool.logs import get_logger

T = TypeVar("T")

LOOK_SECONDS: Final = 5.0
"""Longest wait for Ray's tables: without its head there is no answer."""

LOG_LINES: Final = 5
"""Last lines of a worker's log that are shown."""

LOG_LINE_CHARS: Final = 240
"""So much of each is."""

LOG_TAIL_BYTES: Final = 16 << 10
"""So much of the log's end is read for them."""


log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Look:
    """An actor in Ray's table."""

    state: str
    """DEPENDENCIES_UNREADY, PENDING_CREATION, ALIVE, RESTARTING or DEAD."""
    restarts: int
    """How often Ray has started it anew."""
    cause: str
    """What it died of, in Ray's words; empty: it lives, or Ray does not say."""
    process: bool = True
    """Whether it has a process. One that has none may wait for a place, or for the start of that process."""

    @property
    def placed(self) -> bool:
        """Whether Ray surely has, or had, a place for it."""
        return self.process or self.state in ("ALIVE", "DEAD")


@dataclass(frozen=True, slots=True)
class Node:
    """What a node of Ray has, and what of it is free, by resource."""

    total: Mapping[str, float]
    free: Mapping[str, float]


def look_at(actor_id: str) -> Look | None:
    """The row of an actor, by its hexadecimal id; None: Ray does not know it. Blocks while Ray's head is away."""
    from ray._private import state

    row: Any = state.actors(actor_id)
    if not row or "State" not in row:
        return None
    process = bool(row.get("Address", {}).get("IPAddress"))
    return Look(str(row["State"]), int(row["NumRestarts"]), _death(row.get("DeathCause")), process)


def waiting(needs: Mapping[str, float]) -> int:
    """How many actors or placement groups that need so much wait for a place. Blocks while Ray's head is away."""
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status

    demands = get_cluster_status(ray.get_runtime_context().gcs_address).resource_demands
    wanted = {name: amount for name, amount in needs.items() if amount}
    return sum(
        request.count
        for demand in (*demands.ray_task_actor_demand, *demands.placement_group_demand)
        for request in demand.bundles_by_count
        if dict(request.bundle) == wanted
    )


def nodes() -> list[Node]:
    """The nodes that live. Blocks while Ray's head is away."""
    import ray
    from ray._private import state

    free: Any = state.available_resources_per_node()
    return [
        Node(node["Resources"], free.get(node["NodeID"], {})) for node in ray.nodes() if node.get("Alive")
    ]


def missing(asked: Mapping[str, float], there: Sequence[Node]) -> str:
    """Why no node can take a worker that needs ``asked``, for people; "": one can."""
    if any(_fits(asked, node.free) for node in there):
        return ""
    if not there:
        return "Ray has no node"
    wanted = ", ".join(f"{name} {_number(amount)}" for name, amount in sorted(asked.items()))
    lacking = []
    for name, amount in sorted(asked.items()):
        free = max(node.free.get(name, 0.0) for node in there)
        total = sum(node.total.get(name, 0.0) for node in there)
        if amount > free:
            lacking.append(
                f"{name}: {_number(amount)} asked, {_number(free)} free on a node, {_number(total)} in all"
            )
    if lacking:
        return f"it needs {wanted}; missing {'; '.join(lacking)}"
    return f"it needs {wanted}; no one node has all of it free"


def _fits(asked: Mapping[str, float], free: Mapping[str, float]) -> bool:
    # Ray counts in ten-thousandths.
    return all(free.get(name, 0.0) + 1e-4 > amount for name, amount in asked.items() if amount)


def _number(value: float) -> str:
    return f"{value:.10g}"


def _death(cause: Any) -> str:
    """The first sentences of what Ray says: the rest is advice."""
    if not cause:
        return ""
    for field in ("actor_died_error_context", "creation_task_failure_context", "actor_unschedulable_context"):
        try:
            if cause.HasField(field):
                text = str(getattr(getattr(cause, field), "error_message", "")) or field
                return text.partition(" Some common causes")[0][:LOG_LINE_CHARS]
        except (AttributeError, ValueError):
            continue
    return str(cause)[:LOG_LINE_CHARS]


def log_tail(path: Path, lines: int = LOG_LINES) -> list[str]:
    """The last lines of a log; none if it cannot be read here."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line[:LOG_LINE_CHARS] for line in text.strip().splitlines()[-lines:]]


class Looker:
    """Asks Ray without ever being held up by it: a call that does not come back is given up, and none is made until it does."""

    def __init__(self) -> None:
        self._busy = False
        self._troubles: dict[str, str] = {}

    @property
    def trouble(self) -> str:
        """What cannot be read now and why, for people; empty: all of it could, when it was asked for last."""
        return "; ".join(f"{what}: {why}" for what, why in sorted(self._troubles.items()))

    async def ask(self, what: str, call: Callable[[], T]) -> T | None:
        """What ``call`` returns; None: Ray does not answer now, or ``call`` raised. ``trouble`` then says why, and so does the log.
        ``what``: its name there."""
        if self._busy:
            return None
        self._busy = True
        result: Future[T] = Future()
        # It cannot be cancelled any more: who waits may give up, and the call still has an end.
        result.set_running_or_notify_cancel()

        def work() -> None:
            try:
                result.set_result(call())
            except BaseException as error:
                result.set_exception(error)
            finally:
                self._busy = False

        # No pool: its threads are waited for at the end of the process, and this one may never return.
        threading.Thread(target=work, name="ray-look", daemon=True).start()
        try:
            found = await asyncio.wait_for(asyncio.wrap_future(result), LOOK_SECONDS)
        except TimeoutError:
            self._note(what, f"no answer in {LOOK_SECONDS:g} s")
            return None
        except Exception as error:
            # Of any kind: these tables are Ray's own matter, and may be others in its next version.
            self._note(what, f"{type(error).__name__}: {str(error)[:LOG_LINE_CHARS]}")
            return None
        self._note(what, "")
        return found

    def _note(self, what: str, why: str) -> None:
        before = self._troubles.pop(what, "")
        if why:
            self._troubles[what] = why
        if why and why != before:
            log.warning("ray_not_read", what=what, detail=why)
        elif before and not why:
            log.info("ray_read_again", what=what)
