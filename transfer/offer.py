# SPDX-License-Identifier: Apache-2.0
"""One hand-off as its owner sees it: who is expected to read, what was announced, until when it is held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from twinpool.ids import WorkerKey
from twinpool.transfer.base import AttemptKey, Blocks
from twinpool.v1 import handoff_pb2


class PinKeeper(Protocol):
    """What offers need of :class:`twinpool._core.BlockManager`; see there."""

    @property
    def block_tokens(self) -> int: ...

    def acquire_prefix(self, hashes: NDArray[np.uint8]) -> Blocks: ...

    def release(self, blocks: Blocks) -> None: ...

    def pin(self, transfer_id: int, blocks: Blocks, readers: int, expires_at: float) -> None: ...

    def renew(self, transfer_id: int, expires_at: float) -> bool: ...

    def unpin(self, transfer_id: int, reader: int) -> bool: ...

    def expire(self, now: float) -> list[int]: ...


class OfferEnd(StrEnum):
    """How an offer ended."""

    RELEASED = "RELEASED"  # every reader has read and validated all of it
    ABANDONED = "ABANDONED"  # every reader is done with it, one of them without success
    EXPIRED = "EXPIRED"  # nobody renewed the lease
    FAILED = "FAILED"  # the owner itself gave up


@dataclass(slots=True, eq=False)
class Part:
    """One expected reader's share. ``index`` is its number in the block manager's books."""

    reader: WorkerKey
    index: int
    stream: int | None = None  # where its messages go, once it has said Expect
    sent: int = 0  # messages of the offer that it has got
    gone: bool = False  # released, died, or failed
    success: bool = False


@dataclass(slots=True, eq=False)
class Offer:
    """A hand-off, or with ``prefix`` the answer to a fetch. ``messages`` are kept until every reader has said Expect, so
    that a late one gets all of them."""

    attempt: AttemptKey
    transfer_id: int
    parts: tuple[Part, ...]
    messages: list[handoff_pb2.ExchangeResponse] = field(default_factory=list)
    expires_at: float | None = None  # None: nothing announced, nothing held
    pinned: bool = False
    complete: bool = False
    prefix: bool = False

    @classmethod
    def of(
        cls, attempt: AttemptKey, transfer_id: int, readers: Sequence[WorkerKey], *, prefix: bool
    ) -> Offer:
        """Raises ValueError unless there is a reader and each is named once."""
        if not readers or len(set(readers)) != len(readers):
            raise ValueError(
                f"attempt {attempt} names {len(readers)} readers, {len(set(readers))} of them distinct"
            )
        parts = tuple(Part(reader, index) for index, reader in enumerate(readers))
        return cls(attempt, transfer_id, parts, prefix=prefix)

    def part(self, reader: WorkerKey) -> Part | None:
        """The share of a reader; None if it is not expected."""
        return next((part for part in self.parts if part.reader == reader), None)

    @property
    def over(self) -> bool:
        """Whether no reader needs it any more."""
        return all(part.gone for part in self.parts)

    @property
    def end(self) -> OfferEnd:
        """How it ended, once it is over."""
        done = self.complete and all(part.success for part in self.parts)
        return OfferEnd.RELEASED if done else OfferEnd.ABANDONED

    def listening(self) -> list[Part]:
        """Readers that have said Expect and still need the offer."""
        return [part for part in self.parts if part.stream is not None and not part.gone]
