# SPDX-License-Identifier: Apache-2.0
"""The fence: what proves that pulled bytes belong to the prompt that they were asked for, and how a hand-off fails.

Everything here returns a failure or None; there is no third way, and a caller that gets a failure discards the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from twinpool.transfer.base import Fault, Generations
from twinpool.v1.worker_pb2 import FailureReason


class HandoffFault(StrEnum):
    """Why a hand-off failed. Every value has a row in ``_WIRE``."""

    STALE_GENERATION = "STALE_GENERATION"  # the owner gave a block to new content before it was read
    DIGEST_MISMATCH = "DIGEST_MISMATCH"  # generations agree, bytes do not
    LEASE_LOST = "LEASE_LOST"  # the owner holds the blocks no more
    OWNER_CHANGED = "OWNER_CHANGED"  # a ticket of another worker or incarnation
    BAD_TICKET = "BAD_TICKET"  # a ticket that contradicts itself, the pool or the prompt
    WRONG_TRANSFER = "WRONG_TRANSFER"  # a second transfer id for one attempt
    OUT_OF_ORDER = "OUT_OF_ORDER"  # a ticket repeats, overlaps or skips blocks
    SHORT = "SHORT"  # complete, but not all of the prompt was offered
    PEER_LOST = "PEER_LOST"  # the owner or the stream to it is gone
    DEADLINE = "DEADLINE"  # a read did not finish in time
    TRANSFER_FAILED = "TRANSFER_FAILED"  # the transport failed in another way
    OWNER_FAILED = "OWNER_FAILED"  # the owner says that the attempt failed there
    ABORTED = "ABORTED"  # this side gave up


_WIRE: dict[HandoffFault, FailureReason.ValueType] = {
    HandoffFault.STALE_GENERATION: FailureReason.FAILURE_REASON_FENCED,
    HandoffFault.DIGEST_MISMATCH: FailureReason.FAILURE_REASON_FENCED,
    HandoffFault.LEASE_LOST: FailureReason.FAILURE_REASON_FENCED,
    HandoffFault.OWNER_CHANGED: FailureReason.FAILURE_REASON_FENCED,
    HandoffFault.BAD_TICKET: FailureReason.FAILURE_REASON_FENCED,
    HandoffFault.WRONG_TRANSFER: FailureReason.FAILURE_REASON_FENCED,
    HandoffFault.OUT_OF_ORDER: FailureReason.FAILURE_REASON_FENCED,
    HandoffFault.SHORT: FailureReason.FAILURE_REASON_FENCED,
    HandoffFault.PEER_LOST: FailureReason.FAILURE_REASON_PEER_LOST,
    HandoffFault.DEADLINE: FailureReason.FAILURE_REASON_TRANSFER,
    HandoffFault.TRANSFER_FAILED: FailureReason.FAILURE_REASON_TRANSFER,
    HandoffFault.OWNER_FAILED: FailureReason.FAILURE_REASON_TRANSFER,
    HandoffFault.ABORTED: FailureReason.FAILURE_REASON_TRANSFER,
}

_OF_READ: dict[Fault, HandoffFault] = {
    Fault.PEER_LOST: HandoffFault.PEER_LOST,
    Fault.PEER_UNKNOWN: HandoffFault.PEER_LOST,
    Fault.DEADLINE: HandoffFault.DEADLINE,
    Fault.ABORTED: HandoffFault.ABORTED,
}


@dataclass(frozen=True, slots=True)
class HandoffFailure:
    """A hand-off that failed: ``fault`` for metrics, ``reason`` for the wire, ``detail`` for the log."""

    fault: HandoffFault
    detail: str
    reason: FailureReason.ValueType

    @classmethod
    def of(cls, fault: HandoffFault, detail: str) -> HandoffFailure:
        return cls(fault, detail, _WIRE[fault])

    @classmethod
    def of_read(cls, fault: Fault, detail: str) -> HandoffFailure:
        """A failed read; what has no row of its own is TRANSFER_FAILED."""
        return cls.of(_OF_READ.get(fault, HandoffFault.TRANSFER_FAILED), f"{fault}: {detail}")

    @classmethod
    def of_link(cls, reason: FailureReason.ValueType, detail: str) -> HandoffFailure:
        """The link to the owner ended or could not be made, for ``reason``."""
        return cls(HandoffFault.PEER_LOST, detail, reason)

    @classmethod
    def of_owner(cls, reason: FailureReason.ValueType, detail: str) -> HandoffFailure:
        """The owner's own failure; its reason goes on unchanged, so that the router sees the first cause."""
        known = reason in FailureReason.values() and reason != FailureReason.FAILURE_REASON_UNSPECIFIED
        return cls(
            HandoffFault.OWNER_FAILED, detail, reason if known else FailureReason.FAILURE_REASON_INTERNAL
        )

    @property
    def fenced(self) -> bool:
        """Whether a fence caught it, as opposed to a transfer that plainly failed."""
        return _WIRE[self.fault] == FailureReason.FAILURE_REASON_FENCED


def check_generations(expected: Sequence[int] | Generations, actual: Generations) -> HandoffFailure | None:
    """Compares the ticket's generations with the owner's table as read *after* the data.

    ``actual`` is ``uint64[n]``, or ``uint64[ranks, n]`` of an owner that is several ranks: each of their tables has to agree.
    """
    if actual.ndim == 2 and len(actual):
        failures = [check_generations(expected, rank) for rank in actual]
        return next((failure for failure in failures if failure is not None), None)
    wanted = np.asarray(expected, dtype=np.uint64)
    if wanted.shape == actual.shape and wanted.dtype == actual.dtype and wanted.tobytes() == actual.tobytes():
        return None  # equal byte for byte, the usual case
    if wanted.shape != actual.shape:
        detail = f"{actual.size} generations read for {wanted.size} blocks"
        return HandoffFailure.of(HandoffFault.STALE_GENERATION, detail)
    stale = np.flatnonzero(wanted != actual)
    if stale.size == 0:
        return None  # the same numbers in another type
    first = int(stale[0])
    detail = (
        f"{stale.size} of {wanted.size} blocks were reused by the owner; block {first} of the ticket has generation "
        f"{int(actual[first])}, the ticket says {int(wanted[first])}"
    )
    return HandoffFailure.of(HandoffFault.STALE_GENERATION, detail)


def check_digests(expected: Sequence[int], actual: Sequence[int]) -> HandoffFailure | None:
    """Compares the ticket's digests with those of the bytes that arrived."""
    if len(expected) != len(actual):
        detail = f"{len(actual)} digests for {len(expected)}"
        return HandoffFailure.of(HandoffFault.DIGEST_MISMATCH, detail)
    wrong = [index for index, (a, b) in enumerate(zip(expected, actual, strict=True)) if a != b]
    if not wrong:
        return None
    detail = f"{len(wrong)} of {len(expected)} blocks differ from their digest, first is block {wrong[0]} of the ticket"
    return HandoffFailure.of(HandoffFault.DIGEST_MISMATCH, detail)
