# SPDX-License-Identifier: Apache-2.0
"""What a control process shows Prometheus."""

from collections.abc import AsyncIterator, Iterator

import pytest
from prometheus_client import REGISTRY

from tests.support.controls import Control
from tests.support.thread_pools import Site
from tests.support.waiting import until
from tests.unit.control.rebalancing_pool import Pool, loop_of
from twinpool.config import TwinpoolConfig
from twinpool.control.gauges import show_leader, show_operation, show_pool, show_running
from twinpool.store import StoreServer, connect_store
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"twinpool_control_{name}", labels)


def counted(name: str, **labels: str) -> float:
    return value(name, **labels) or 0.0


def status(pool: str, prefill: int, decode: int, *phases: "pb.ReplicaPhase.ValueType") -> pb.PoolStatus:
    """Decode workers in these phases."""
    spec = pb.PoolSpec(pool=pool, prefill=pb.RoleSpec(desired=prefill), decode=pb.RoleSpec(desired=decode))
    replicas = [
        pb.Replica(worker=f"d{at}", role=worker_pb2.ROLE_DECODE, phase=phase)
        for at, phase in enumerate(phases)
    ]
    return pb.PoolStatus(spec=spec, replicas=replicas)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    show_leader(False)


def test_pools_are_shown_by_role_while_the_process_leads() -> None:
    ready, pending = pb.REPLICA_PHASE_READY, pb.REPLICA_PHASE_PENDING
    show_pool(status("a", 1, 3, ready, ready, pending))
    show_pool(status("b", 0, 0))
    assert value("desired_workers", pool="a", role="decode") == 3
    assert value("ready_workers", pool="a", role="decode") == 2
    assert value("ready_workers", pool="a", role="prefill") == 0
    assert value("replicas", pool="a", role="decode", state="pending") == 1
    assert value("desired_workers", pool="b", role="decode") == 0
    show_pool(status("a", 1, 3, ready, ready, ready))
    assert value("replicas", pool="a", role="decode", state="pending") == 0
    assert value("ready_workers", pool="a", role="decode") == 3
    assert value("desired_workers", pool="b", role="decode") == 0
    show_leader(False)
    assert value("ready_workers", pool="a", role="decode") is None
    assert value("leader") == 0


def test_operations_are_counted_by_kind_and_end() -> None:
    flip = pb.Operation(kind=pb.OPERATION_KIND_FLIP)
    flip.created_at.GetCurrentTime()
    before = counted("operations_total", kind="flip", outcome="failed")
    took = counted("operation_time_seconds_count", kind="flip")
    show_operation(flip, "begun", [flip])
    assert value("operations_running", kind="flip") == 1
    assert counted("operation_time_seconds_count", kind="flip") == took
    show_operation(flip, "failed", [])
    assert value("operations_running", kind="flip") == 0
    assert counted("operations_total", kind="flip", outcome="failed") == before + 1
    assert counted("operation_time_seconds_count", kind="flip") == took + 1
    show_running([pb.Operation(kind=pb.OPERATION_KIND_SCALE)] * 2)
    assert value("operations_running", kind="scale") == 2


async def test_decisions_of_the_rebalancer_are_counted() -> None:
    def decisions(kind: str) -> float:
        return sum(
            sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name == "twinpool_control_rebalance_decisions_total" and sample.labels["kind"] == kind
        )

    around, before = Pool(), (decisions("flip"), decisions("nothing"))
    loop = loop_of(around)
    for _ in range(12):
        around.now += 5.0
        await loop.tick(around.spec)
    assert decisions("flip") == before[0] + 1
    assert decisions("nothing") == before[1] + 11


@pytest.fixture
async def control(server: StoreServer) -> AsyncIterator[Control]:
    config = TwinpoolConfig.model_validate({"cluster": {"etcd_endpoints": [server.endpoint]}})
    store = connect_store(config.cluster)
    site = Site(store, "gauges", 2)
    made = await Control(server, site, prefill_workers=1, decode_workers=1).start()
    yield made
    await made.stop()
    await site.close()
    store.close()


async def test_a_control_process_that_leads_shows_its_pool_and_what_it_does(control: Control) -> None:
    looks = counted("reconcile_time_seconds_count", outcome="done")
    scaled = counted("operations_total", kind="scale", outcome="succeeded")
    told = counted("events_total", reason="PoolScaled")
    await control.settled()
    assert value("leader") == 1
    await control.scale(1, 2)
    assert value("desired_workers", pool="default", role="decode") in (1, 2)
    await until(lambda: value("ready_workers", pool="default", role="decode") == 2)
    await until(lambda: value("desired_workers", pool="default", role="decode") == 2)
    await until(lambda: counted("operations_total", kind="scale", outcome="succeeded") == scaled + 1)
    assert counted("events_total", reason="PoolScaled") == told + 1
    assert counted("reconcile_time_seconds_count", outcome="done") > looks
    waited = counted("reconcile_time_seconds_count", outcome="waited")
    control.proxy.cut()
    await until(
        lambda: counted("reconcile_time_seconds_count", outcome="waited") > waited or value("leader") == 0
    )
    control.proxy.heal()
