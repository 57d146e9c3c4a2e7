# SPDX-License-Identifier: Apache-2.0
"""Carries the rebalancer's decisions out: by the operations of a control process."""

from collections.abc import Sequence
from typing import Final

from twinpool.control.operations import Operations
from twinpool.control.rebalance.telemetry import Role
from twinpool.control.scale import Scaling
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2

_ROLES: Final[dict[Role, "worker_pb2.Role.ValueType"]] = {
    "prefill": worker_pb2.ROLE_PREFILL,
    "decode": worker_pb2.ROLE_DECODE,
}


class OperationMover:
    """Implements ``ports.Mover``."""

    def __init__(self, operations: Operations, scaling: Scaling) -> None:
        self._operations, self._scaling = operations, scaling

    async def flip(
        self, worker: str, role: Role, reason: str, *, parent: str = "", seconds: float | None = None
    ) -> str:
        """See ``ports.Mover``."""
        kind = pb.OPERATION_KIND_FLIP
        begun = await self._operations.begin(
            kind, worker, seconds, _ROLES[role], parent=parent, reason=reason
        )
        return begun.id

    async def scale(self, pool: str, prefill: int, decode: int, reason: str, *, parent: str = "") -> str:
        """See ``ports.Mover``."""
        return (await self._scaling.begin(pool, prefill, decode, reason=reason, parent=parent)).id

    def get(self, operation: str) -> pb.Operation:
        """See ``ports.Mover``."""
        return self._operations.get(operation)

    def all(self) -> Sequence[pb.Operation]:
        """See ``ports.Mover``."""
        return self._operations.all()
