# SPDX-License-Identifier: Apache-2.0
"""Destination blocks of pulls that failed: nobody gets them before their reads are over."""

from twinpool._core import BlockManager
from twinpool.logs import get_logger
from twinpool.transfer.base import Blocks
from twinpool.transfer.session import PullSession

log = get_logger(__name__)


class PullQuarantine:
    """Owned by the step thread."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._held: dict[PullSession, Blocks] = {}

    def hold(self, pull: PullSession) -> Blocks:
        """Takes what a read of ``pull`` may still write to out of its holder's hands, and returns it; the holder gives
        back the rest alone. Call it before ``drained``."""
        writable = pull.writable_blocks
        if len(writable):
            self._blocks.quarantine(writable)
            self._held[pull] = writable
            log.info("blocks_quarantined", attempt=str(pull.attempt), blocks=len(writable))
        return writable

    def drained(self, pull: PullSession) -> None:
        """Nothing can be written any more."""
        blocks = self._held.pop(pull, None)
        if blocks is not None:
            self._blocks.unquarantine(blocks)
