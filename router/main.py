# SPDX-License-Identifier: Apache-2.0
"""The router's process: follows the workers in etcd, registers itself, serves until a signal."""

import asyncio
import contextlib
import os
import secrets
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from twinpool import logs, metrics, rpc, tracing
from twinpool.config import TwinpoolConfig, served_pools
from twinpool.errors import TwinpoolError
from twinpool.live_config import ConfigFollower, LiveConfig, set_log_level
from twinpool.logs import get_logger
from twinpool.membership import REGISTER_SECONDS, Registration, RouterWatch, WorkerWatch
from twinpool.router.app import Router
from twinpool.router.index import SegmentView
from twinpool.router.resume_token import cluster_key, key_of_file
from twinpool.rpc import join_address, stop_event
from twinpool.store import Store, connect_store
from twinpool.v1 import control_pb2

log = get_logger(__name__)

_SYNC_LOG_SECONDS: Final = 5.0

_KEY_RETRY_SECONDS: Final = 1.0
_KEY_CHECK_SECONDS: Final = 10.0

_CONFIG_SECONDS: Final = 3.0
# So long a router waits for what was applied of its configuration; after it, it begins as it was started.

_SEGMENTS_SECONDS: Final = 3.0
# So long the workers wait for what etcd knows of their caches; after it they are asked themselves.


def run(config: TwinpoolConfig) -> int:
    """Runs a router in the foreground until SIGINT or SIGTERM. Returns the exit status."""
    logs.setup(config.log.level, config.log.as_json)
    try:
        return rpc.run(_run(config))
    except TwinpoolError as error:
        log.error("router_failed", reason=error.reason, error=error.message)
        return 1


async def _run(config: TwinpoolConfig) -> int:
    stopping = stop_event()
    name = config.router.name or f"router-{secrets.token_hex(4)}"
    logs.bind_context(router=name)
    tracing.setup(config.tracing, "router", name)
    metrics_endpoint = ""
    if config.metrics.enabled:
        port = metrics.start_http(config.metrics.host, config.metrics.port)
        metrics_endpoint = join_address(config.metrics.host, port)
    store = await asyncio.to_thread(connect_store, config.cluster)
    router, follower = _router(config, name, store)
    watch = _worker_watch(config, store, router)
    segments = SegmentView(store, config.cluster.name, router.locality.segments_changed)
    routers = RouterWatch(store, config.cluster.name, on_event=router.others.on_member)
    registration: Registration | None = None
    sealing: asyncio.Task[None] | None = None
    try:
        if config.router.resume_key_file:
            router.seal.use(key_of_file(config.router.resume_key_file))
        else:
            known = asyncio.Event()
            sealing = asyncio.create_task(_use_cluster_key(router, store, known))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(known.wait(), _SEGMENTS_SECONDS)
        await follower.start(_CONFIG_SECONDS)
        router.locality.use_segments(segments)
        endpoint = await router.start()
        segments.start()
        await asyncio.to_thread(segments.wait_synced, _SEGMENTS_SECONDS)
        await watch.start()
        await routers.start()
        registration = Registration(
            store,
            config.cluster.name,
            _record(router, metrics_endpoint),
            ttl_seconds=config.cluster.lease_ttl_seconds,
        )
        follower.tell(registration.update_config)
        await registration.start()
        log.info(
            "router_serving", endpoint=endpoint, http=router.apis.http_endpoint, metrics=metrics_endpoint
        )
        ready = asyncio.create_task(_serve_when_synced(router, watch))
        await stopping.wait()
        ready.cancel()
        return 0
    finally:
        log.info("router_stopping", grace_seconds=config.router.drain_timeout_seconds)
        if registration is not None:
            # First, so that clients that look up routers find another one.
            await registration.stop()
        await router.stop(config.router.drain_timeout_seconds)
        if sealing is not None:
            sealing.cancel()
        await follower.stop()
        await watch.stop()
        await routers.stop()
        await asyncio.to_thread(segments.close)
        await asyncio.to_thread(tracing.shutdown)
        await asyncio.to_thread(store.close)
        log.info("router_stopped")


def _router(config: TwinpoolConfig, name: str, store: Store) -> tuple[Router, ConfigFollower]:
    """A router that runs what is applied of the configuration."""
    live = LiveConfig(config)
    router = Router(live.following, name)
    live.on_change(router.prepare)
    live.on_change(set_log_level)
    return router, ConfigFollower(live, store, config.cluster.name)


def _worker_watch(config: TwinpoolConfig, store: Store, router: Router) -> WorkerWatch:
    pools = served_pools(config)
    return WorkerWatch(
        store,
        config.cluster.name,
        pool=pools[0] if len(pools) == 1 else None,
        on_event=router.on_member,
        is_alive=router.fleet.reachable,
        grace_seconds=config.cluster.lease_ttl_seconds + REGISTER_SECONDS,
    )


async def _use_cluster_key(router: Router, store: Store, known: asyncio.Event) -> None:
    """Until etcd has answered, tokens can be used on this router alone. An etcd that has lost its data gets the key again."""
    cluster, seal = router.config.cluster.name, router.seal
    while True:
        wait = _KEY_CHECK_SECONDS
        try:
            seal.use(await asyncio.to_thread(cluster_key, store, cluster, seal.key))
            known.set()
        except Exception as error:
            log.warning("resume_key_not_read", type=type(error).__name__)
            wait = _KEY_RETRY_SECONDS
        await asyncio.sleep(wait)


async def _serve_when_synced(router: Router, watch: WorkerWatch) -> None:
    while not await watch.wait_synced(_SYNC_LOG_SECONDS):
        log.warning("waiting_for_store")
    await router.serve()


def _record(router: Router, metrics_endpoint: str) -> control_pb2.RouterRecord:
    started = Timestamp()
    started.GetCurrentTime()
    return control_pb2.RouterRecord(
        name=router.name,
        incarnation=router.incarnation,
        endpoint=router.endpoint,
        metrics_endpoint=metrics_endpoint,
        pid=os.getpid(),
        started_at=started,
        http_endpoint=router.apis.http_endpoint,
    )
