# SPDX-License-Identifier: Apache-2.0
"""A real local cluster for tests, started the way ``twinpool up`` starts it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

from tests.support.quiescence import QUIET_SECONDS, assert_quiescent
from twinpool.client import Client
from twinpool.config import RpcConfig, load_config, to_env
from twinpool.control.state import LocalState
from twinpool.rpc import channel
from twinpool.v1 import control_pb2, control_pb2_grpc

START_SECONDS = 120.0
STOP_SECONDS = 60.0


@dataclass
class Cluster:
    """A running cluster. ``home`` holds its logs."""

    home: Path
    state: LocalState
    model: Path
    process: subprocess.Popen[bytes]

    def client(self, router: int = 0) -> Client:
        """A client of one of its routers."""
        return Client(self.state.router_endpoints[router])

    async def workers(self) -> list[control_pb2.WorkerRecord]:
        """The registered workers, as operators see them."""
        async with channel(self.state.control_endpoint, RpcConfig()) as connection:
            stub = control_pb2_grpc.ControlServiceStub(connection)
            try:
                response = await stub.ListWorkers(control_pb2.ListWorkersRequest(), timeout=10)
            except grpc.RpcError as error:
                raise AssertionError(f"ListWorkers: {error}") from error
            return list(response.workers)

    async def assert_quiescent(self, within: float = QUIET_SECONDS) -> None:
        """Every registered worker is at rest and is a live process."""
        records = await self.workers()
        assert records, "no worker is registered"
        dead = [record.worker.name for record in records if not psutil.pid_exists(record.pid)]
        assert not dead, f"registered but dead: {dead}"
        await assert_quiescent([record.endpoint for record in records], within=within)


@contextmanager
def running_cluster(
    home: Path, model: Path, settings: Mapping[str, object] | None = None, *, embedded_store: bool = False
) -> Iterator[Cluster]:
    """Starts a cluster over ``model``; on exit stops it and asserts that no process is left."""
    name = "test"
    overrides: dict[str, object] = {
        "cluster.name": name,
        "model.path": str(model),
        "model.name": model.name,
        "kv.num_blocks": 64,
        "kv.block_tokens": 16,
        "kv.poison_freed": True,
        "transfer.digest": "always",
        "scheduler.max_chunk_tokens": 32,
        "scheduler.max_batched_tokens": 128,
        "scheduler.max_num_seqs": 32,
        # A hand-off each, unless a test is about the other way.
        "router.local_prefill": False,
        "log.format": "json",
    }
    config = load_config(None, overrides | dict(settings or {}), env={})
    env = {key: value for key, value in os.environ.items() if not key.startswith("TWINPOOL_")}
    env |= to_env(config) | {"TWINPOOL_HOME": str(home)}
    directory = home / name
    (directory / "logs").mkdir(parents=True)
    command = [sys.executable, "-m", "twinpool.control.supervisor", "--with-parent"]
    if embedded_store:
        command.append("--embedded-store")
    with (directory / "logs" / "supervisor.log").open("ab") as log_file:
        process = subprocess.Popen(
            command, env=env, stdout=log_file, stderr=subprocess.STDOUT, start_new_session=True
        )
    children: list[psutil.Process] = []
    try:
        yield Cluster(home, _wait_up(directory, process), model, process)
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.05)  # the dump is written by a signal handler, at once
            process.kill()
            raise AssertionError(
                f"the cluster did not stop in {STOP_SECONDS} s\n{_logs(directory)}"
            ) from None
    assert code == 0, f"the supervisor ended with {code}\n{_logs(directory)}"
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive, f"left behind: {[child.cmdline() for child in alive]}"


def _wait_up(directory: Path, process: subprocess.Popen[bytes]) -> LocalState:
    deadline = time.monotonic() + START_SECONDS
    path = directory / "state.json"
    while not path.exists():
        assert process.poll() is None, f"the cluster did not start\n{_logs(directory)}"
        assert time.monotonic() < deadline, f"not up after {START_SECONDS} s\n{_logs(directory)}"
        time.sleep(0.05)
    return LocalState(**json.loads(path.read_text()))


def _logs(directory: Path) -> str:
    parts = []
    for path in sorted((directory / "logs").glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-60:]
        parts.append(f"--- {path.name}\n" + "\n".join(lines))
    return "\n".join(parts)
