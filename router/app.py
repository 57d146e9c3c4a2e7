# SPDX-License-Identifier: Apache-2.0
"""A router put together: the core, the hops around it, and the gRPC server."""

import asyncio
import socket
import time
from collections.abc import Callable
from functools import partial

from twinpool import metrics
from twinpool._core import CoreError, RouterCore
from twinpool.config import TwinpoolConfig
from twinpool.errors import ConfigError
from twinpool.ids import new_incarnation
from twinpool.logs import get_logger
from twinpool.membership import EventKind, MemberEvent
from twinpool.router.admission import Admission, core_config
from twinpool.router.answers import AnswerMaker
from twinpool.router.apis import SERVICES, ClientApis
from twinpool.router.background import Background
from twinpool.router.beginnings import Beginnings
from twinpool.router.choice import rules_of
from twinpool.router.hops import Hops
from twinpool.router.inspection import SERVICE as ROUTER_SERVICE
from twinpool.router.kept import KeptBook
from twinpool.router.locality import Locality
from twinpool.router.migrate import Migration
from twinpool.router.models import ModelTable
from twinpool.router.others import OtherRouters
from twinpool.router.peer import RouterPeer
from twinpool.router.placement import Fleet
from twinpool.router.prefix import PrefixSources
from twinpool.router.recent import Recent
from twinpool.router.resume_token import TokenSeal
from twinpool.router.retry import Retries
from twinpool.router.service import SERVICE, InferenceService, register
from twinpool.router.sessions import Sessions
from twinpool.router.streams import Streams
from twinpool.router.takeover import TakeOver
from twinpool.router.tenants import Tenants
from twinpool.router.tokenize import TokenizeHop
from twinpool.router.trace import TraceBook
from twinpool.router.usage import UsageBook
from twinpool.rpc import AuditLog, Server, channel, join_address, wants_native
from twinpool.v1 import control_pb2, router_pb2_grpc
from twinpool.v1 import worker_pb2 as pb

log = get_logger(__name__)

HOUSEKEEPING_SECONDS = 0.5
_ANY_ADDRESS = ("0.0.0.0", "::", "[::]")


class Router:
    """Start once, stop once, both on the same event loop. Workers come by ``on_member``.

    Keys of ``config`` that are reloadable are read at each use, see ``LiveConfig.following``; for those of the core see ``prepare``.
    """

    def __init__(self, config: TwinpoolConfig, name: str) -> None:
        self.config = config
        self.name = name
        self.incarnation = new_incarnation()
        self.endpoint = ""
        self._native = wants_native(config.rpc)
        self.core = RouterCore(core_config(config.router))
        if config.router.record_bytes:
            self.core.record(config.router.record_bytes)
        self.background = Background()
        self.traces = TraceBook(self.core, config.router.trace_requests)
        sessions = Sessions(config.sessions)
        self.beginnings = Beginnings(self.core)
        self.recent = Recent(config.metrics)
        self.admission = Admission(
            self.core, self.traces, sessions.prefer, self.beginnings.saw, self.recent.gave_way
        )
        self.tenants = Tenants(config.router.tenants_file)
        self.usage = UsageBook(config.router.usage_file, self.tenants.known, config.router.max_usage_tenants)
        self.tokenize = TokenizeHop(config.router, self.tenants.salt)
        self.models = ModelTable(self.tokenize, rules_of(config))
        self.locality = Locality(self.core, config.kv_events, self.traces)
        self.fleet = Fleet(
            config,
            self.admission,
            self.models,
            self.locality,
            self.background,
            partial(channel, config=config.rpc, tls=config.tls, role="worker", native=self._native),
            pb.Hello(router=name, incarnation=self.incarnation),
        )
        self.prefixes = PrefixSources(self.fleet, self.admission, config.router)
        hops = self._hops(sessions)
        self.migration = Migration(self.fleet, self.admission, config.router)
        answers = AnswerMaker(self.models, config.router)
        self.seal = TokenSeal()
        self.kept = KeptBook(hops, answers, self.seal, name, self.incarnation)
        self.others = self._others()
        takeover = TakeOver(self.kept, self.others, self.models)
        streams = Streams(self.kept, takeover, self.seal, config.router)
        self.service = InferenceService(
            config, hops, self.models, self.tokenize, answers, streams, self.tenants, self.usage
        )
        self._limit_tenants()
        self.apis = ClientApis(config, self.service, self.models)
        self.inspection = self._peer(takeover)
        self._server = Server(
            config.rpc,
            config.tls,
            max_message_bytes=config.router.max_message_bytes,
            reuse_port=config.router.reuse_port,
            audit=AuditLog(config.audit.file, name),
            native=self._native,
        )
        self._housekeeper: asyncio.Task[None] | None = None

    def _hops(self, sessions: Sessions) -> Hops:
        limits = self.config.router
        return Hops(
            limits,
            self.admission,
            self.fleet,
            self.locality,
            self.prefixes,
            self.background,
            Retries(limits, self.fleet.breakers),
            sessions,
            self.recent,
        )

    def _others(self) -> OtherRouters:
        config = self.config
        return OtherRouters(
            self.name,
            self.incarnation,
            partial(channel, config=config.rpc, tls=config.tls, role="router"),
            self.fleet.connect,
            self.fleet.decode_endpoints,
            config.router.takeover_timeout_seconds,
            self.seal,
        )

    def _peer(self, takeover: TakeOver) -> RouterPeer:
        return RouterPeer(
            self.kept,
            takeover.claimed,
            self.seal,
            self.admission,
            self.recent,
            self.beginnings,
            self.name,
            self.incarnation,
            self.fleet,
            self.locality,
            self.models,
            self.tokenize,
            self.traces,
            self.tenants,
            max_message_bytes=self.config.router.max_message_bytes,
        )

    def _limit_tenants(self) -> None:
        for tenant in self.tenants.all:
            self.core.set_tenant(
                time.monotonic(),
                tenant.name,
                weight=tenant.weight,
                max_requests=tenant.max_requests,
                tokens_per_second=tenant.tokens_per_second,
                burst_tokens=tenant.burst_tokens,
                max_priority=tenant.max_priority,
            )

    async def start(self) -> str:
        """Binds and serves; returns host:port. Raises PORT_UNAVAILABLE."""
        self._server.add(SERVICE, register, self.service)
        self.apis.add(self._server)
        self._server.add(ROUTER_SERVICE, router_pb2_grpc.add_RouterServiceServicer_to_server, self.inspection)
        port = self._server.bind(self.config.router.host, self.config.router.port)
        self._server.bind_loopback(self.config.router.host, port)
        self.locality.start()
        await self._server.start()
        host = self.config.router.host
        # What others dial: an address that stands for all of this host's own is none to dial.
        dialled = socket.gethostname() if host in _ANY_ADDRESS else host
        self.endpoint = join_address(dialled, port)
        await self.apis.start(host, dialled)
        self._housekeeper = asyncio.get_running_loop().create_task(self._keep_house())
        return self.endpoint

    async def serve(self) -> None:
        """The view of the workers is complete: health says so."""
        await self._server.set_serving(True, "")
        await self._show_health()

    async def stop(self, grace_seconds: float) -> None:
        """Refuses new requests, lets running ones end for ``grace_seconds``, then cancels them; closes all streams."""
        self.service.drain()
        self.apis.drain()
        if self.others.alive:
            # Their clients go on there at once, instead of being cut off at the end of the grace.
            self.kept.send_away()
        # Side by side: each waits for its own calls.
        await asyncio.gather(self._server.stop(grace_seconds), self.apis.stop())
        if self._housekeeper is not None:
            self._housekeeper.cancel()
        await self.kept.close()
        await self.background.drain(self.config.router.cancel_timeout_seconds)
        self.admission.close()
        await self.fleet.close()
        await asyncio.to_thread(self.locality.close)
        self.models.close()
        self.tokenize.close()
        self.usage.close()

    def prepare(self, config: TwinpoolConfig) -> Callable[[], None]:
        """Takes the core's limits of another configuration up; see ``live_config.Prepare``."""
        try:
            limits = core_config(config.router)
        except CoreError as error:
            raise ConfigError(f"router.{error}") from None
        return partial(self.admission.configure, limits)

    def on_member(self, event: MemberEvent[control_pb2.WorkerRecord]) -> None:
        """A worker came, changed or went."""
        if event.kind is EventKind.REMOVED:
            self.fleet.remove(event.record)
        else:
            self.fleet.upsert(event.record)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS)
            try:
                self.fleet.reap()
                self.fleet.breakers.watch()
                self.migration.watch()
                self.locality.watch()
                self.tokenize.show()
                self.kept.show()
                if self.tenants.refresh():
                    self._limit_tenants()
                self.apis.refresh()
                self._show_counts()
                self.recent.watch()
                await self._show_health()
            except Exception as error:
                # Whatever it was, health and gauges must not stay as they are for ever.
                log.exception("housekeeping_failed", type=type(error).__name__)

    def _show_counts(self) -> None:
        self.admission.loads.show()
        stats = self.core.stats()
        metrics.ROUTER_REQUESTS_WAITING.set(stats["queued"])
        metrics.ROUTER_QUEUE_TOKENS.set(stats["queued_tokens"])
        metrics.ROUTER_INDEX_BLOCKS.set(stats["index_blocks"])
        metrics.ROUTER_REQUESTS_RUNNING.set(self.admission.active - stats["queued"])

    async def _show_health(self) -> None:
        for service in (SERVICE, *SERVICES):
            await self._server.set_serving(self.models.servable, service)
        await self._server.set_serving(True, ROUTER_SERVICE)
