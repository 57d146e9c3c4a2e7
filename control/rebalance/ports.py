# SPDX-License-Identifier: Apache-2.0
"""What the rebalancer needs of the control process around it."""

from collections.abc import Sequence
from typing import Protocol

from twinpool.control.rebalance.telemetry import Role
from twinpool.control.rebalance.window import Sample
from twinpool.v1 import control_pb2 as pb


class Source(Protocol):
    """Where load is read."""

    async def sample(self, pool: str, at: float) -> Sample | None:
        """The pool now; None if nobody answered."""
        ...


class Specs(Protocol):
    """What pools shall be."""

    def all(self) -> Sequence[pb.PoolSpec]:
        """Every pool's."""
        ...

    async def set_auto(self, pool: str, auto: bool) -> object:
        """Whether the control process rebalances the pool by itself. Raises STORE_UNAVAILABLE."""
        ...


class Mover(Protocol):
    """Who carries changes out. Each is an operation; asked again for the same while it runs, it is the same one."""

    async def flip(
        self, worker: str, role: Role, reason: str, *, parent: str = "", seconds: float | None = None
    ) -> str:
        """Begins to give a worker the other role, and lets the pool's record want the new split. ``seconds``: how long its requests
        may take. Returns the operation's id. Raises what refuses it."""
        ...

    async def scale(self, pool: str, prefill: int, decode: int, reason: str, *, parent: str = "") -> str:
        """Begins to give a pool other numbers of workers. Returns the operation's id. Raises what refuses it."""
        ...

    def get(self, operation: str) -> pb.Operation:
        """An operation. Raises OPERATION_NOT_FOUND."""
        ...

    def all(self) -> Sequence[pb.Operation]:
        """All that are known."""
        ...


class Recorder(Protocol):
    """Where events go."""

    def record(
        self,
        reason: str,
        message: str,
        *,
        pool: str,
        subject: str = "",
        operation: str = "",
        warning: bool = False,
    ) -> None:
        """Notes that something has happened. Never raises."""
