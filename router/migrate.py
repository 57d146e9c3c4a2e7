# SPDX-License-Identifier: Apache-2.0
"""Moves running answers off decode workers that are about to leave, where another one can take them.

The answer goes on at the next token (``resume``). Its KV is not lost: the worker that leaves keeps it as cached blocks and
serves them until it ends, so the next placement pulls it instead of computing it.
"""

import time
from collections.abc import Callable

from twinpool import metrics
from twinpool.config import RouterSection
from twinpool.logs import get_logger
from twinpool.router.admission import Admission
from twinpool.router.placement import Fleet

log = get_logger(__name__)


class Migration:
    """One a router. ``finish_seconds`` of its limits: how long answers may end by themselves first."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        limits: RouterSection,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._limits = limits
        self._clock = clock

    def watch(self) -> None:
        """Moves what is due. Called often; each call looks at the workers that leave alone."""
        for key, since in self._fleet.leaving():
            if self._clock() - since < self._limits.finish_seconds or not self._fleet.replaceable(key):
                continue
            moved = sum(owner.on_leaving(key) for owner in self._admission.owners_on(key))
            if moved:
                metrics.ROUTER_MIGRATIONS.inc(moved)
                log.info("answers_moved", worker=str(key), answers=moved)
