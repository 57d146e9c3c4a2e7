# SPDX-License-Identifier: Apache-2.0
"""What a role works with: the pieces of a worker that the step thread owns."""

from collections.abc import Callable
from dataclasses import dataclass, field

from twinpool._core import BlockManager, StepScheduler
from twinpool.ids import WorkerKey
from twinpool.transfer.owner import OfferBook
from twinpool.transfer.reader import PullManager
from twinpool.worker.commands import Limits
from twinpool.worker.kept import KeptAnswers
from twinpool.worker.outbox import Outbox
from twinpool.worker.prefix_fetch import PrefixFetcher
from twinpool.worker.prefix_pins import PrefixPins
from twinpool.worker.totals import Totals


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """Given to a role's factory. All but ``worker`` and ``limits`` belong to the step thread.

    ``endpoints`` says where owners listen; the role enters an owner before it expects something from it. ``open_owners`` are those
    to whom a link is up. Links outlive a change of role, so this does, too.
    """

    worker: WorkerKey
    limits: Limits
    scheduler: StepScheduler
    blocks: BlockManager
    offers: OfferBook
    pulls: PullManager
    outbox: Outbox
    endpoints: dict[WorkerKey, str]
    open_owners: set[WorkerKey]
    fetcher: PrefixFetcher
    kept: KeptAnswers
    pins: PrefixPins
    clock: Callable[[], float]
    totals: Totals = field(default_factory=Totals)
