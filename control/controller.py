# SPDX-License-Identifier: Apache-2.0
"""The control process without its surroundings: whoever has a store runs one of these, ``twinpool up`` and ``twinpool serve
control`` alike.

It serves operators from the start, and acts once it leads: it reads what was recorded, joins Ray, goes on with operations and
reconciles. It ceases when it does not lead any more, and begins anew when it does.
"""

import asyncio
import contextlib
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, Final

from twinpool.config import TwinpoolConfig
from twinpool.control.applying import ConfigDesk
from twinpool.control.console.server import Console
from twinpool.control.cordons import Cordons
from twinpool.control.desk import PoolDesk
from twinpool.control.events import EventLog
from twinpool.control.flip_counts import FlipCounts
from twinpool.control.flips import ROLES
from twinpool.control.gauges import kind_of, show_leader, show_operation, show_running
from twinpool.control.leader import Leadership
from twinpool.control.operations import Operations
from twinpool.control.overview.collect import Collector
from twinpool.control.pool_set import MakePool, PoolSet
from twinpool.control.rebalance.desk import RebalanceDesk
from twinpool.control.rebalance.loop import RebalanceLoop
from twinpool.control.rebalance.mover import OperationMover
from twinpool.control.rebalance.source import OverviewSource
from twinpool.control.reconcile.loop import Reconciler
from twinpool.control.reconcile.spec import PoolSpecs, desired
from twinpool.control.scale import Scaling
from twinpool.control.service import ControlServer
from twinpool.control.view import ClusterView
from twinpool.errors import TwinpoolError
from twinpool.live_config import ConfigFollower, LiveConfig, set_log_level
from twinpool.logs import get_logger
from twinpool.rpc import channel
from twinpool.store import Keys, Store
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2

RETRY_SECONDS: Final = 1.0
"""Time between two tries to begin to lead while etcd is away."""

_REASONS: Final = {
    "begun": "OperationBegun",
    "resumed": "OperationResumed",
    "succeeded": "OperationSucceeded",
    "failed": "OperationFailed",
}

log = get_logger(__name__)


class Controller:
    """Start once, stop once; both on the same event loop."""

    def __init__(
        self, config: TwinpoolConfig, store: Store, log_dir: Path, pools: MakePool | None = None
    ) -> None:
        """``log_dir``: each worker writes ``<name>.log`` there. ``pools``: who runs the workers of a pool, if not Ray."""
        self._config = config
        self._store = store
        self._keys = Keys(config.cluster.name)
        self.view = ClusterView(store, config)
        self.pools = PoolSet(config, log_dir, pools)
        self.events = EventLog(store, config.cluster.name)
        self.live = LiveConfig(config)
        self.live.on_change(set_log_level)
        self._follower = ConfigFollower(self.live, store, config.cluster.name)
        self.applying = ConfigDesk(
            self._follower, store, config.cluster.name, self.view, self.events, config.worker.pool
        )
        connect = partial(channel, config=config.rpc, tls=config.tls, role="worker")
        self.operations = Operations(store, config, self.view, self.pools, connect)
        self.operations.listen(self._on_operation)
        self.specs = PoolSpecs(store, config)
        self.cordons = Cordons(store, config.cluster.name, self.events, connect)
        self.reconcilers = {
            pool: Reconciler(
                own,
                self.view,
                self.pools[pool],
                self.operations,
                self.specs,
                self.cordons,
                self.events,
                connect,
                lambda: self._leadership is not None and self._leadership.leads(),
            )
            for pool, own in self.pools.configs.items()
        }
        self.scaling = Scaling(config, self.operations, self.specs, self.reconcilers, self.events, self.pools)
        if self.pools.managed:
            FlipCounts(self.operations, self.specs, self.pools.managed)
        self.collector = Collector(config, self.view, self.operations.all, self._wanted_of)
        mover, drain_seconds = (
            OperationMover(self.operations, self.scaling),
            config.worker.drain_timeout_seconds,
        )
        source = OverviewSource(self.collector.overview)
        self.rebalance = RebalanceLoop(
            self.live.following.rebalance, self.specs, source, mover, self.events, drain_seconds
        )
        self.live.on_change(lambda _config: self.rebalance.wake)
        self._rebalances = RebalanceDesk(
            self.rebalance, self.specs, mover, self.view.workers, self.operations.submit, drain_seconds
        )
        self.operations.register(pb.OPERATION_KIND_REBALANCE, self._rebalances.steps)
        self._console: Console | None = None
        self._connect = connect
        self._leadership: Leadership | None = None
        self._server: ControlServer | None = None
        self._campaign: asyncio.Task[None] | None = None
        self._acting: list[asyncio.Task[None]] = []
        self._led = asyncio.Event()
        self.failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """Done with why this process cannot act, for instance since Ray cannot be joined."""

    @property
    def endpoint(self) -> str:
        """Where the ControlService listens: host:port."""
        return self._server.endpoint if self._server else ""

    @property
    def console_url(self) -> str:
        """Where the console page is; empty: nowhere."""
        return self._console.url if self._console else ""

    async def start(self) -> None:
        """Serves operators, and stands for the leadership. Raises PORT_UNAVAILABLE."""
        await self.view.start()
        await self.events.start()
        await self._follower.start(RETRY_SECONDS)
        desk = PoolDesk(
            self.check_leads,
            self.check_reads,
            self.view,
            self.pools,
            self.operations,
            self.specs,
            self.reconcilers,
            self.scaling,
            self.cordons,
            self.events,
            self._connect,
        )
        self._server = ControlServer(
            self._config, self.view, self.operations, desk, self._rebalances, self.collector, self.applying
        )
        await self._server.start()
        self.applying.endpoint = self._server.endpoint
        if self._config.control.http_port >= 0:
            self._console = Console(
                self._config, self.collector, self.operations.all, lambda: self.events.all()[::-1]
            )
            await self._console.start()
        ttl = self._config.cluster.lease_ttl_seconds
        self._leadership = Leadership(
            self._store, self._config.cluster.name, self._server.endpoint, ttl_seconds=ttl
        )
        self._leadership.start()
        self._campaign = asyncio.create_task(self._run(self._leadership), name="controller")

    async def wait_leading(self) -> None:
        """Returns once this process acts. Raises why it cannot."""
        led: asyncio.Future[Any] = asyncio.ensure_future(self._led.wait())
        try:
            await asyncio.wait([led, self.failed], return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():
                raise self.failed.result()
        finally:
            led.cancel()

    def check_start(self) -> None:
        """Raises why a worker that shall run could not start, without waiting whether another try does better."""
        for reconciler in self.reconcilers.values():
            for replica in reconciler.status().replicas:
                if replica.crashes and replica.phase != pb.REPLICA_PHASE_READY:
                    raise reconciler.failure(replica.worker)

    def _wanted_of(self, pool: str, role: "worker_pb2.Role.ValueType") -> int | None:
        with contextlib.suppress(TwinpoolError):
            return desired(self.specs.get(pool))[ROLES[role]]
        return None

    def wanted(self, pools: Collection[str] = ()) -> dict[str, int]:
        """Wanted workers a role, of all pools whose workers are run here, or of those among them that are given."""
        counts = dict.fromkeys(ROLES.values(), 0)
        for pool in self.pools.managed:
            if not pools or pool in pools:
                for role, count in desired(self.specs.get(pool)).items():
                    counts[role] += count
        return counts

    async def cease(self) -> None:
        """Serves nobody any more and begins nothing, but leaves what there is. Idempotent."""
        if self._console is not None:
            await self._console.stop()
        if self._server is not None:
            await self._server.stop()
        if self._campaign is not None:
            self._campaign.cancel()
            await asyncio.gather(self._campaign, return_exceptions=True)
        await self._cease()

    async def stop(self) -> None:
        """Ends all of it. Workers end with it, unless they are to stay or another process leads."""
        await self.cease()
        if self._leadership is not None and self._leadership.other():
            await self.pools.disown()
        await self.pools.stop()
        await self.collector.close()
        await self._follower.stop()
        await self.events.stop()
        if self._leadership is not None:
            # Last: whoever takes over is to find workers either as they were or gone.
            await self._leadership.stop()
        await self.view.stop()

    def check_leads(self) -> None:
        """Raises NOT_LEADER unless this process acts now."""
        if self._leadership is None:
            raise TwinpoolError("NOT_LEADER", "this control process starts")
        self._leadership.check()
        if not self._led.is_set():
            raise TwinpoolError("NOT_LEADER", "this control process has just begun to lead")

    def check_reads(self) -> None:
        """As ``check_leads``, but content with what was true when this process led last while nobody else is known to."""
        if self._leadership is not None and self._led_once and not self._leadership.other():
            return
        self.check_leads()

    _led_once = False

    async def _run(self, leadership: Leadership) -> None:
        while True:
            if not leadership.leads():
                await leadership.changed()
                continue
            try:
                await self._begin()
            except TwinpoolError as error:
                if error.reason != "STORE_UNAVAILABLE":
                    self._fail(error)
                    return
                log.warning("waiting_for_store", reason=error.reason)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            except Exception as error:
                self._fail(error)
                return
            while leadership.leads():
                await leadership.changed()
            await self._cease()

    def _fail(self, error: BaseException) -> None:
        log.error("control_failed", type=type(error).__name__, detail=str(error))
        if not self.failed.done():
            self.failed.set_result(error)

    async def _begin(self) -> None:
        """What is recorded is read first: without the operations, a worker that was drained for good would be started."""
        if not await self.view.wait_synced(RETRY_SECONDS):
            # To an operation, a worker that is not in the list has left.
            raise TwinpoolError("STORE_UNAVAILABLE", "the workers are not listed yet")
        await self.operations.load()
        changed = await self.specs.load()
        await self.cordons.load()
        await self.pools.start()
        await self.pools.adopt()
        await self._read_roles()
        self.events.record("ControllerLeads", f"{self.endpoint} acts now", pool=self._config.worker.pool)
        for pool in changed:
            wanted = desired(self.specs.get(pool))
            text = (
                f"the configuration wants {wanted['prefill']} prefill and {wanted['decode']} decode workers"
            )
            self.events.record("PoolConfigured", text, pool=pool)
        self.operations.resume()
        self._acting = [
            asyncio.create_task(reconciler.run(), name=f"reconciler {pool}")
            for pool, reconciler in self.reconcilers.items()
        ]
        self._acting.append(asyncio.create_task(self.applying.watch(), name="config"))
        self.rebalance.start()
        self._led_once = True
        self._led.set()
        show_leader(True)
        show_running(self.operations.running())
        log.info("control_leads", endpoint=self.endpoint)

    async def _read_roles(self) -> None:
        """A worker that has changed its role begins in that one, also where it is down just now."""
        for pool in self.pools:
            prefix = self._keys.roles(pool)
            snapshot = await asyncio.to_thread(self._store.list_prefix, prefix)
            for key, item in snapshot.items.items():
                with contextlib.suppress(Exception):
                    record = pb.RoleRecord.FromString(item.value)
                    self.pools.note_role(key.removeprefix(prefix), ROLES[record.role])

    async def _cease(self) -> None:
        self._led.clear()
        show_leader(False)
        for task in self._acting:
            task.cancel()
        await asyncio.gather(*self._acting, return_exceptions=True)
        self._acting = []
        await self.rebalance.stop()
        await self.operations.stop()

    def _on_operation(self, operation: pb.Operation, what: str) -> None:
        kind = kind_of(operation)
        if what in _REASONS:
            show_operation(operation, what, self.operations.running())
        about = operation.worker.name if operation.HasField("worker") else operation.pool
        text = f"{kind} of {about}"
        if operation.kind == pb.OPERATION_KIND_SCALE:
            text += f" to {operation.prefill} prefill and {operation.decode} decode workers"
        if operation.kind == pb.OPERATION_KIND_FLIP:
            text += f" to {ROLES.get(operation.target_role, '')}"
        if what == "failed":
            text += f": {operation.error}"
        with contextlib.suppress(KeyError):
            self.events.record(
                _REASONS[what],
                text,
                pool=operation.pool,
                subject=about,
                operation=operation.id,
                warning=what == "failed",
            )
