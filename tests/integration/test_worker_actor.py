# SPDX-License-Identifier: Apache-2.0
"""A worker in a Ray actor: it starts with the actor, comes back under a new incarnation, and stops for good."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from twinpool.config import ClusterConfig, load_config, to_yaml
from twinpool.errors import CheckpointError
from twinpool.store import Keys, Store, StoreServer, connect_store, start_store
from twinpool.v1 import worker_pb2, worker_pb2_grpc
from twinpool.v1.control_pb2 import WORKER_STATE_READY, WorkerRecord
from twinpool.worker.actor import WorkerActor

pytestmark = pytest.mark.integration

NAME = "actor-0"
OBJECT_STORE_BYTES = 80 << 20


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A local Ray of its own."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    module = pytest.importorskip("ray")
    module.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        configure_logging=False,
    )
    yield module
    module.shutdown()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StoreServer, Store]]:
    server = start_store(tmp_path_factory.mktemp("actor-store"), prefer_embedded=True)
    client = connect_store(ClusterConfig(etcd_endpoints=(server.endpoint,)))
    yield server, client
    client.close()
    server.stop()


def _config(model: Path, endpoint: str) -> str:
    settings = {
        "cluster.name": "actors",
        "cluster.etcd_endpoints": endpoint,
        "model.path": str(model),
        "kv.num_blocks": 40,
        "kv.block_tokens": 16,
        "worker.name": NAME,
    }
    return to_yaml(load_config(None, settings, env={}))


def _wait_record(client: Store, unlike: int) -> WorkerRecord:
    """The READY record of an incarnation other than ``unlike``."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        item = client.get(Keys("actors").worker("default", NAME))
        if item is not None:
            record = WorkerRecord.FromString(item.value)
            if record.state == WORKER_STATE_READY and record.worker.incarnation != unlike:
                return record
        time.sleep(0.05)
    raise AssertionError("no such worker has registered")


def _flip(client: Store, record: WorkerRecord) -> WorkerRecord:
    """It becomes a decode worker; its record then."""
    request = worker_pb2.ChangeRoleRequest(
        worker=record.worker, role=worker_pb2.ROLE_DECODE, epoch=record.epoch
    )
    with grpc.insecure_channel(record.endpoint) as channel:
        worker_pb2_grpc.WorkerServiceStub(channel).ChangeRole(request, timeout=60)
    deadline = time.monotonic() + 60
    while (found := _wait_record(client, unlike=0)).role != worker_pb2.ROLE_DECODE:
        assert time.monotonic() < deadline, "it does not change its role"
        time.sleep(0.05)
    return found


def test_an_actor_s_life(
    ray: Any, store: tuple[StoreServer, Store], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    server, client = store
    log = tmp_path / "actor.log"
    options = {"num_cpus": 1, "max_restarts": 1, "max_concurrency": 8}
    text = _config(checkpoints["llama"], server.endpoint)
    actor = ray.remote(WorkerActor).options(**options).remote(text, "prefill", str(log))
    started = ray.get(actor.start.remote(), timeout=60)
    assert started["live"] is True
    record = _wait_record(client, unlike=0)
    assert (record.worker.incarnation, record.pid) == (started["incarnation"], started["pid"])
    assert record.endpoint == started["endpoint"]
    flipped = _flip(client, record)
    assert (flipped.worker, flipped.pid) == (record.worker, record.pid)

    os.kill(started["pid"], signal.SIGKILL)
    # Nobody calls the actor that Ray makes anew; it serves all the same.
    again = _wait_record(client, unlike=started["incarnation"])
    assert again.pid != started["pid"]
    # Ray knows the role that it was made with; the worker knows better.
    assert (again.role, again.epoch) == (worker_pb2.ROLE_DECODE, 1)
    assert ray.get(actor.health.remote(), timeout=60)["incarnation"] == again.worker.incarnation

    assert ray.get(actor.stop.remote(), timeout=60) is True
    assert client.get(Keys("actors").worker("default", NAME)) is None
    assert "worker_stopped" in log.read_text()
    ray.kill(actor)


def test_a_start_that_fails_reaches_the_caller_as_it_is(
    ray: Any, store: tuple[StoreServer, Store], tmp_path: Path
) -> None:
    text = _config(tmp_path / "nothing", store[0].endpoint)
    actor = ray.remote(WorkerActor).options(num_cpus=1).remote(text, "decode")
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        ray.get(actor.start.remote(), timeout=60)
    ray.kill(actor)
