# SPDX-License-Identifier: Apache-2.0
"""Where a test puts faults between a worker process and its peers.

``TWINPOOL_TEST_SEAM`` names a factory ("package.module:attribute") that takes the worker's key and returns a Seam: it wraps
the agent that moves bytes, the receiver that sends messages and the runner of the steps. It is a variable and no
configuration key, so that no file, flag or chart can set it. Unset, as everywhere but in tests, nothing is imported and
nothing is wrapped.
"""

import os
from typing import Final, Protocol

from twinpool import launch
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.transfer.base import TransferAgent
from twinpool.worker.outbox import Receiver
from twinpool.worker.step_loop import Runner

SEAM_VARIABLE: Final = "TWINPOOL_TEST_SEAM"

log = get_logger(__name__)


class Seam(Protocol):
    """What stands between a worker and its peers."""

    def agent(self, real: TransferAgent) -> TransferAgent:
        """What the transfer thread drives instead of ``real``. Called on that thread."""
        ...

    def receiver(self, real: Receiver) -> Receiver:
        """What takes the step thread's messages instead of ``real``. It is called on the asyncio thread."""
        ...

    def runner(self, real: Runner) -> Runner:
        """What runs the steps instead of ``real``. It is called on the step thread."""
        ...


class Bare:
    """The seam of production: nothing."""

    def agent(self, real: TransferAgent) -> TransferAgent:
        """``real`` itself."""
        return real

    def receiver(self, real: Receiver) -> Receiver:
        """``real`` itself."""
        return real

    def runner(self, real: Runner) -> Runner:
        """``real`` itself."""
        return real


def seam_of(worker: WorkerKey) -> Seam:
    """The seam that the environment names. Raises ImportError or AttributeError if it is not there."""
    entry = os.environ.get(SEAM_VARIABLE)
    if not entry:
        return Bare()
    log.warning("test_seam_in_use", entry=entry)
    seam: Seam = launch.resolve(entry)(worker)
    return seam
