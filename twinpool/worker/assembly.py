# SPDX-License-Identifier: Apache-2.0
"""Puts the step thread's pieces together: role, offers, pulls, scheduler, loop."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from twinpool import launch
from twinpool.config import TransferConfig, TwinpoolConfig
from twinpool.engine.device import enter_device
from twinpool.ids import WorkerKey
from twinpool.transfer.base import AttemptKey, TransferObserver
from twinpool.transfer.digest import Digest, pool_digest
from twinpool.transfer.offer import OfferEnd
from twinpool.transfer.owner import OfferBook
from twinpool.transfer.reader import PullManager
from twinpool.transfer.session import ReadPort
from twinpool.v1 import handoff_pb2 as handoff
from twinpool.worker.kept import KeptAnswers
from twinpool.worker.kv_events.shadow import RawEvent
from twinpool.worker.kv_events.tap import CacheTap
from twinpool.worker.load import LoadReporter
from twinpool.worker.meters import Meters
from twinpool.worker.outbox import Outbox, Receiver
from twinpool.worker.parts import WorkerParts
from twinpool.worker.prefix_fetch import PrefixFetcher
from twinpool.worker.prefix_pins import PrefixPins
from twinpool.worker.stack import EngineStack
from twinpool.worker.step_ahead import AheadRunner
from twinpool.worker.step_loop import StepLoop


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the step thread's side of a worker stands among.

    ``port`` reads blocks; ``receiver`` takes messages on the asyncio thread, which runs what ``post`` is given;
    ``on_offers`` is told how many offers are open, ``on_fatal`` why the loop gave up, ``on_cache_events`` what
    the cache holds from now on and what not any more.
    """

    port: ReadPort
    receiver: Receiver
    post: Callable[[Callable[[], None]], object]
    observer: TransferObserver
    on_offers: Callable[[int], None]
    on_fatal: Callable[[str], None]
    on_cache_events: Callable[[list[RawEvent]], None] | None = None
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Assembly:
    """The step thread's side of a worker; ``loop`` is not started."""

    parts: WorkerParts
    loop: StepLoop


def assemble(
    config: TwinpoolConfig, role_name: str, worker: WorkerKey, stack: EngineStack, around: Surroundings
) -> Assembly:
    """Raises ConfigError for an unknown role."""

    def on_offer_ended(key: AttemptKey, end: OfferEnd) -> None:
        loop.role.on_offer_ended(key, end)

    kept = KeptAnswers(config.worker.max_kept_answers, config.worker.kept_bytes, worker.name, around.clock)
    pins = PrefixPins(
        stack.blocks, stack.pool.generations, stack.scheduler, stack.limits, config.sessions, around.clock
    )
    parts = _parts(config.transfer, worker, stack, around, on_offer_ended, kept, pins)
    interval = config.worker.report_interval_seconds
    loop = StepLoop(
        scheduler=stack.scheduler,
        blocks=stack.blocks,
        runner=stack.runner,
        pool=stack.pool,
        role=launch.role_factory(role_name)(parts),
        outbox=parts.outbox,
        load=LoadReporter(stack.scheduler, stack.blocks, parts.outbox.session, interval),
        meters=Meters(parts),
        poison_freed=config.kv.poison_freed,
        on_fatal=around.on_fatal,
        pins=pins,
        tap=CacheTap(stack.blocks, around.on_cache_events) if around.on_cache_events else None,
        ahead=_ahead(config, stack),
        enter=partial(enter_device, config.worker.device),
        clock=around.clock,
    )
    return Assembly(parts, loop)


def _ahead(config: TwinpoolConfig, stack: EngineStack) -> AheadRunner | None:
    wanted = config.scheduler.ahead
    if wanted == "off" or (wanted == "auto" and stack.pool.tensor.device.type == "cpu"):
        return None
    # What a test puts around the runner may run whole steps only.
    return stack.runner if isinstance(stack.runner, AheadRunner) else None


def _digest(stack: EngineStack) -> Digest:
    if stack.memory.region.memory_type == "DRAM":
        return pool_digest(stack.memory)
    # Triton belongs to CUDA's torch; a worker on a CPU may lack it.
    from twinpool.engine.kernels.triton_digest import device_digest

    return device_digest(stack.pool.tensor)


def _parts(
    transfer: TransferConfig,
    worker: WorkerKey,
    stack: EngineStack,
    around: Surroundings,
    on_offer_ended: Callable[[AttemptKey, OfferEnd], None],
    kept: KeptAnswers,
    pins: PrefixPins,
) -> WorkerParts:
    outbox = Outbox(around.receiver, around.post)
    digest = _digest(stack)
    endpoints: dict[WorkerKey, str] = {}

    def to_owner(owner: WorkerKey, message: handoff.ExchangeRequest) -> None:
        # Only what is expected anew is worth a new link.
        asks = message.WhichOneof("message") in ("expect", "fetch")
        endpoint = endpoints.get(owner, "") if asks else ""
        outbox.owner(owner, message, endpoint=endpoint)

    offers = OfferBook(
        worker,
        stack.blocks,
        stack.pool.generations,
        outbox.reader,
        lease_seconds=transfer.lease_seconds,
        digest=digest,
        digest_policy=transfer.digest,
        on_end=on_offer_ended,
        on_count=around.on_offers,
        observer=around.observer,
    )
    pulls = PullManager(
        around.port,
        to_owner,
        block_bytes=stack.pool.block_bytes,
        read_deadline_seconds=transfer.read_deadline_seconds,
        floor_bytes_per_second=transfer.floor_bytes_per_second,
        digest=digest,
        observer=around.observer,
    )
    fetcher = PrefixFetcher(
        worker,
        stack.scheduler,
        stack.blocks,
        pulls,
        endpoints,
        around.clock,
        deadline_seconds=transfer.fetch_deadline_seconds,
    )
    return WorkerParts(
        worker=worker,
        limits=stack.limits,
        scheduler=stack.scheduler,
        blocks=stack.blocks,
        offers=offers,
        pulls=pulls,
        outbox=outbox,
        endpoints=endpoints,
        open_owners=set(),
        fetcher=fetcher,
        kept=kept,
        pins=pins,
        clock=around.clock,
    )
