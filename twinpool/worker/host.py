# SPDX-License-Identifier: Apache-2.0
"""A worker: one engine, one pool, one agent, one role at a time, behind one gRPC server.

Start: bind, ask etcd for the role that it had last, load the model (registered as *starting* meanwhile), register the pool with
the transfer layer, serve, become *ready*. Stop: become *draining*, refuse new work, wait for what runs, leave etcd, close
streams, threads and store.
"""

import asyncio
import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from google.protobuf.timestamp_pb2 import Timestamp

from twinpool import metrics, rpc, tracing
from twinpool.config import TwinpoolConfig
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.ids import WorkerKey, new_incarnation
from twinpool.live_config import ConfigFollower, LiveConfig, set_log_level
from twinpool.logs import get_logger
from twinpool.membership import Registration
from twinpool.store import Store, connect_store
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.control_pb2 import WorkerRecord, WorkerState
from twinpool.worker.commands import worker_id
from twinpool.worker.endings import logged, quietly
from twinpool.worker.flip import NAMES, RoleFlip
from twinpool.worker.health import Health
from twinpool.worker.kv_events import EventPublisher, SegmentWriter
from twinpool.worker.prefix_offer import PrefixOffer
from twinpool.worker.role_book import RoleBook
from twinpool.worker.serving import Serving
from twinpool.worker.stack import EngineStack, Facts, build_stack, describe, measured
from twinpool.worker.step_loop import LoopEndedError

ROLES: Final = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}

STREAM_GRACE_SECONDS: Final = 1.0
"""How long streams that are told to end may take to send what is queued."""

CONFIG_SECONDS: Final = 3.0
"""Longest wait for what was applied of the configuration."""

SEGMENT_STOP_SECONDS: Final = 5.0
"""Longest wait for a write to etcd that is under way when the worker stops."""

log = get_logger(__name__)


class Failure(NamedTuple):
    """Why a worker can't go on. ``superseded``: another incarnation has its name, so starting anew would only begin a
    fight over it."""

    detail: str
    superseded: bool = False


class WorkerHost:
    """Used on one event loop: ``start`` once, then ``stop`` once."""

    def __init__(
        self, config: TwinpoolConfig, role_name: str, end_process: Callable[[int], object] | None = None
    ) -> None:
        """``end_process``: see ``Health``. Raises ConfigError for an unknown role."""
        if role_name not in ROLES:
            raise ConfigError(f"unknown role {role_name!r}; known: {', '.join(ROLES)}")
        self._config = config
        self._role_name = role_name
        self._end_process = end_process
        name = config.worker.name or f"{role_name}-{secrets.token_hex(3)}"
        self.key = WorkerKey(name, new_incarnation())
        self.endpoint = ""
        self.metrics_endpoint = ""
        self._failed: asyncio.Future[Failure] | None = None
        self._server: rpc.Server | None = None
        self._serving: Serving | None = None
        self._health: Health | None = None
        self._store: Store | None = None
        self._registration: Registration | None = None
        self._record: WorkerRecord | None = None
        self._events: EventPublisher | None = None
        self._segments: SegmentWriter | None = None
        self._book: RoleBook | None = None
        self._live: ConfigFollower | None = None
        self._flip: RoleFlip | None = None
        self._following: asyncio.Task[None] | None = None
        self._recalled = True

    async def start(self) -> None:
        """Returns when the worker is ready. Raises TwinpoolError (CheckpointError, ConfigError ...) or TransferError, and
        then leaves no record, thread or port behind."""
        try:
            await self._start()
        except BaseException:
            await self._close()
            raise

    async def failure(self) -> Failure:
        """Waits until the worker can't go on by itself, and says why."""
        assert self._failed is not None, "the worker is not started"
        return await asyncio.shield(self._failed)

    async def stop(self, drain_seconds: float | None = None) -> None:
        """Drains for at most ``drain_seconds`` (None: as configured), then ends everything. Idempotent."""
        if self._health is not None and self._serving is not None and self._registration is not None:
            seconds = self._config.worker.drain_timeout_seconds if drain_seconds is None else drain_seconds
            log.info("worker_draining", worker=str(self.key), seconds=seconds)
            self._health.drain()
            await self._end_flip()
            # Routers stop placing here as soon as they see the record; what they still send is refused.
            self._registration.update_state(WorkerState.WORKER_STATE_DRAINING)
            if self._server is not None:
                await self._server.set_serving(False)
            if self._health.live:
                with logged("drain"):
                    await self._leave(self._serving, seconds)
        await self._close()
        log.info("worker_stopped", worker=str(self.key))

    async def asked_to_leave(self) -> float | None:
        """Waits until somebody asks the worker to leave (``WorkerService.Drain``); how long its requests may take, None: as
        configured."""
        assert self._serving is not None, "the worker is not started"
        return await asyncio.shield(self._serving.drain_asked)

    async def _leave(self, serving: Serving, seconds: float) -> None:
        """What is cached is offered to others while what runs ends."""
        worker = self._config.worker
        offering = asyncio.ensure_future(self._offer(serving))
        try:
            await serving.drain(seconds, worker.linger_seconds)
            await offering
        finally:
            offering.cancel()

    async def _offer(self, serving: Serving) -> None:
        config = self._config
        if not config.worker.offer_seconds or self._store is None or self._record is None:
            return
        connect = partial(rpc.channel, config=config.rpc, tls=config.tls, role="worker")
        offer = PrefixOffer(
            self._store, config.cluster.name, self._record, connect, config.worker.offer_seconds
        )
        with contextlib.suppress(LoopEndedError):
            await offer.make(await serving.hot_prefixes(config.worker.offer_bytes))

    @property
    def ready(self) -> bool:
        """See ``Health.ready``."""
        return self._health is not None and self._health.ready

    def health(self) -> dict[str, object]:
        """For whoever supervises the process: identity, whether it is live and ready and why not, and how long ago the step
        loop last turned."""
        health = self._health
        age = self._serving.seconds_since_turn if self._serving is not None else None
        return {
            "worker": self.key.name,
            "incarnation": self.key.incarnation,
            "endpoint": self.endpoint,
            "role": self._role_name,
            "pid": os.getpid(),
            "live": health is not None and health.live,
            "ready": self.ready,
            "causes": [] if health is None else list(health.causes),
            "seconds_since_turn": age,
        }

    # --- start

    async def _start(self) -> None:
        config, started = self._config, time.monotonic()
        self._failed = asyncio.get_running_loop().create_future()
        audit = rpc.AuditLog(config.audit.file, self.key.name)
        self._server = rpc.Server(config.rpc, config.tls, audit=audit)
        port = self._server.bind(config.worker.host, config.worker.port)
        self.endpoint = rpc.join_address(config.worker.host, port)
        if config.metrics.enabled:
            metrics_port = metrics.start_http(config.metrics.host, config.metrics.port)
            self.metrics_endpoint = rpc.join_address(config.metrics.host, metrics_port)
        log.info("worker_starting", worker=str(self.key), role=self._role_name, endpoint=self.endpoint)
        facts = await asyncio.to_thread(describe, config)
        self._events = EventPublisher(config.kv_events, self.key, facts.served_name, config.kv.block_tokens)
        self._events.open(config.worker.host)
        self._store = await asyncio.to_thread(connect_store, config.cluster)
        await self._recall_role(self._store)
        await self._follow_config(self._store)
        tracing.setup(config.tracing, self._role_name, self.key.name)
        stack = await self._load(facts, self._store)
        self._serving = Serving(config, self._role_name, self.key, stack, self._events.publish, self._cordon)
        self._serving.failed.add_done_callback(lambda failed: self._fail(Failure(failed.result())))
        await self._serving.start(self._server)
        await self._server.start()
        assert self._registration is not None
        self._start_events(self._events, self._store, self._registration)
        self._registration.complete(measured(stack.calibration))
        self._registration.update_state(WorkerState.WORKER_STATE_READY)
        self._health = Health(
            config.worker,
            self._server,
            self._serving,
            self._registration,
            lambda detail: self._fail(Failure(detail)),
            self._end_process,
        )
        self._start_flips(self._serving, self._registration, self._health)
        await self._health.start()
        seconds = round(time.monotonic() - started, 2)
        log.info("worker_ready", worker=str(self.key), endpoint=self.endpoint, seconds=seconds)

    async def _recall_role(self, store: Store) -> None:
        """The role that the worker had last is its role; the one that it was started with is for its first start."""
        config = self._config
        self._book = RoleBook(store, config.cluster.name, config.worker.pool, self.key)
        try:
            last = await self._book.last()
        except TwinpoolError as error:
            # It serves without etcd; once etcd can be read it changes to the role.
            self._recalled = False
            log.warning("role_not_read", reason=error.reason, detail=error.message)
            return
        if last is not None and ROLES[self._role_name] != last:
            log.info("role_recalled", worker=str(self.key), configured=self._role_name, role=NAMES[last])
            self._role_name = NAMES[last]

    async def _follow_config(self, store: Store) -> None:
        """A worker that starts later runs what was applied before; without etcd it begins as it was started."""
        live = LiveConfig(self._config)
        live.on_change(set_log_level)
        self._live = ConfigFollower(live, store, self._config.cluster.name)
        await self._live.start(CONFIG_SECONDS)

    def _start_flips(self, serving: Serving, registration: Registration, health: Health) -> None:
        assert self._book is not None
        self._flip = RoleFlip(
            self.key,
            ROLES[self._role_name],
            serving,
            registration,
            health,
            self._book,
            self._has_role,
            self._config.worker.drain_timeout_seconds,
        )
        serving.flip = self._flip.ask
        if not self._recalled:
            self._following = asyncio.create_task(self._flip.follow_last(), name="follow-role")

    def _has_role(self, role: pb.Role.ValueType) -> None:
        self._role_name = NAMES[role]
        if self._record is not None:
            self._record.role = role
        rename = partial(tracing.rename, self._config.tracing, self._role_name, self.key.name)
        asyncio.get_running_loop().run_in_executor(None, rename)

    async def _end_flip(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        if self._flip is not None:
            await self._flip.stop()

    def _start_events(self, events: EventPublisher, store: Store, registration: Registration) -> None:
        events.start()
        self._segments = SegmentWriter(
            store,
            self._config.cluster.name,
            self.key,
            events,
            lambda: registration.lease_id,
            self._config.kv_events.segment_interval_seconds,
        )
        self._segments.start()

    async def _load(self, facts: Facts, store: Store) -> EngineStack:
        """Loads in a thread. The record is made as soon as the checkpoint's headers are known to be good: a worker
        whose checkpoint cannot be used never registers."""
        loop, checked = asyncio.get_running_loop(), asyncio.Event()
        cancelled = threading.Event()

        def on_checked() -> None:
            loop.call_soon_threadsafe(checked.set)

        loading = asyncio.ensure_future(
            asyncio.to_thread(
                build_stack, self._config, facts, on_checked=on_checked, cancelled=cancelled.is_set
            )
        )
        waiting = asyncio.ensure_future(checked.wait())
        try:
            await asyncio.wait({loading, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if checked.is_set():
                self._registration = self._make_registration(facts, store)
                if self._live is not None:
                    self._live.tell(self._registration.update_config)
                await self._registration.start()
            return await asyncio.shield(loading)
        finally:
            waiting.cancel()
            if not loading.done():
                # The thread must not outlive this call with the model half loaded.
                cancelled.set()
                await asyncio.wait({loading})
                loading.exception()

    def _make_registration(self, facts: Facts, store: Store) -> Registration:
        config, loop = self._config, asyncio.get_running_loop()
        started_at = Timestamp()
        started_at.GetCurrentTime()
        record = WorkerRecord(
            worker=worker_id(self.key),
            pool=config.worker.pool,
            role=ROLES[self._role_name],
            state=WorkerState.WORKER_STATE_STARTING,
            endpoint=self.endpoint,
            metrics_endpoint=self.metrics_endpoint,
            fingerprint=facts.fingerprint,
            model=facts.served_name,
            family=facts.model.family,
            num_blocks=config.kv.num_blocks,
            block_tokens=config.kv.block_tokens,
            kv_bytes_per_token=facts.kv_bytes_per_token,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_context_tokens=facts.max_context_tokens,
            vocab_size=facts.model.vocab_size,
            eos_token_ids=facts.model.eos_token_ids,
            model_path=str(Path(config.model.path).resolve()),
            pid=os.getpid(),
            started_at=started_at,
            epoch=1,
            events_endpoint=self._events.events_endpoint if self._events is not None else "",
            replay_endpoint=self._events.replay_endpoint if self._events is not None else "",
        )

        self._record = record

        def on_superseded() -> None:
            detail = f"another incarnation has registered as {self.key.name}"
            loop.call_soon_threadsafe(self._fail, Failure(detail, superseded=True))

        return Registration(
            store,
            config.cluster.name,
            record,
            ttl_seconds=config.cluster.lease_ttl_seconds,
            on_superseded=on_superseded,
        )

    def _cordon(self, cordoned: bool) -> None:
        log.info("worker_cordoned", worker=str(self.key), cordoned=cordoned)
        if self._registration is not None:
            self._registration.update_cordoned(cordoned)

    def _fail(self, failure: Failure) -> None:
        log.error("worker_failed", worker=str(self.key), detail=failure.detail)
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(failure)

    # --- end

    async def _close(self) -> None:
        """Ends what there is, each part even if another one fails: first what others see, last what it stands on."""
        await quietly("flip", self._end_flip())
        if self._health is not None:
            await quietly("health", self._health.stop())
        if self._segments is not None:
            # Before the lease ends, so that no segment is left without one.
            await quietly("segments", asyncio.to_thread(self._segments.stop, SEGMENT_STOP_SECONDS))
        if self._registration is not None:
            await quietly("registration", self._registration.stop())
        if self._serving is not None:
            await quietly("streams", self._serving.close_streams())
        if self._server is not None:
            await quietly("server", self._server.stop(STREAM_GRACE_SECONDS))
        if self._serving is not None:
            await quietly("threads", self._serving.stop())
        if self._live is not None:
            await quietly("config", self._live.stop())
        await quietly("tracing", asyncio.to_thread(tracing.shutdown))
        if self._events is not None:
            await quietly("events", asyncio.to_thread(self._events.close))
        if self._store is not None:
            await quietly("store", asyncio.to_thread(self._store.close))
        self._registration = self._serving = self._server = self._store = None
        self._events = self._segments = self._health = self._live = None
