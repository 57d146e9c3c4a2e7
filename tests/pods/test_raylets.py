# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of several machines: a head without workers and two nodes with hardware for them, each a host of its own.

Nothing is shared between the hosts but the network: process ids, shared memory and files are each one's own, so KV can only cross
by UCX's TCP.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.asking import ask
from tests.support.chart import ROOT
from tests.support.netns import Host, Network
from tests.support.oracle import oracle
from tests.support.quiescence import assert_quiescent
from tests.support.sandbox import Mount, Sandbox, image_environment
from tests.support.steps import prompt
from tests.support.waiting import until, until_told
from twinpool.client import Client
from twinpool.errors import TwinpoolError

pytestmark = [
    pytest.mark.integration,
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.asyncio(loop_scope="module"),
]

UP_SECONDS = 400.0
TOKENS = 40
RACKS = ("rack-a-1", "rack-a-2")
TRUE_FAILURES = {
    "WORKER_LOST",
    "TRANSFER_FAILED",
    "ATTEMPTS_EXHAUSTED",
    "RETRY_BUDGET_EXHAUSTED",
    "NO_WORKERS",
}
OPTIONS = {
    "CLUSTER__NAME": "racks",
    "MODEL__PATH": "/models/tiny",
    "MODEL__NAME": "tiny",
    "KV__NUM_BLOCKS": "64",
    "KV__BLOCK_TOKENS": "16",
    "KV__POISON_FREED": "true",
    "TRANSFER__UCX_TLS": "tcp,self",
    "TRANSFER__DIGEST": "always",
    "WORKER__CALIBRATION_SECONDS": "0",
    "ROUTER__LOCAL_PREFILL": "false",
    "ROUTER__QUEUE_TTL_SECONDS": "600",
    "POOLS__PREFILL_WORKERS": "2",
    "POOLS__DECODE_WORKERS": "2",
    "POOLS__PREFILL_RESOURCES": "CPU=1,rack-a=1",
    "POOLS__DECODE_RESOURCES": "CPU=1,rack-a=1",
    "POOLS__PREFILL_PLACEMENT": "spread",
    "POOLS__DECODE_PLACEMENT": "spread",
    "POOLS__WORKER_OPTIONS": "node",
    "LOG__FORMAT": "json",
}
RAY = "ray start --disable-usage-stats --node-ip-address={ip} --object-store-memory=80000000"


@dataclass
class Racks:
    """The hosts and what runs on them, by name."""

    network: Network
    directory: Path
    model: Path
    hosts: dict[str, Host] = field(default_factory=dict)
    running: dict[str, Sandbox] = field(default_factory=dict)

    def begin(self, name: str, place: str, script: str) -> Sandbox:
        """Runs a script on a host."""
        host = self.hosts[place]
        head = self.hosts["head"].ip
        env = image_environment() | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
        env |= {f"TWINPOOL_{key}": value for key, value in OPTIONS.items()}
        env |= {
            "TWINPOOL_CLUSTER__ETCD_ENDPOINTS": f"{head}:2379",
            "TWINPOOL_POOLS__RAY_ADDRESS": f"{head}:6379",
        }
        env |= {f"TWINPOOL_{part}__HOST": host.ip for part in ("WORKER", "ROUTER", "CONTROL", "METRICS")}
        temporary = self.directory / f"{name}-tmp"
        temporary.mkdir()
        temporary.chmod(0o1777)
        mounts = [Mount(temporary, "/tmp"), Mount(self.model, "/models/tiny", read_only=True)]
        files = {"/etc/hosts": f"127.0.0.1 localhost\n{host.ip} {place}\n"}
        made = Sandbox(
            host, self.directory / name, ("sh", "-c", script), env, mounts, files=files, shared_memory="256m"
        )
        self.running[name] = made
        made.start()
        return made

    def start(self) -> None:
        """Starts etcd, Ray, the control process beside Ray's head, and a router elsewhere."""
        head = self.hosts["head"] = self.network.host("head")
        url = f"--listen-client-urls=http://{head.ip}:2379 --advertise-client-urls=http://{head.ip}:2379"
        self.begin("etcd", "head", f"exec etcd --data-dir=/tmp/etcd {url}")
        ray = RAY.format(ip=head.ip)
        serve = "exec twinpool serve control --port 50053"
        self.begin(
            "head", "head", f"{ray} --head --port=6379 --num-cpus=4 --include-dashboard=false && {serve}"
        )
        for name in RACKS:
            self.hosts[name] = self.network.host(name)
            self.begin(name, name, self.node(name))
        self.hosts["edge"] = self.network.host("edge")
        self.begin("router", "edge", "exec twinpool serve router --port 50051")

    def node(self, name: str) -> str:
        """What a node of Ray runs: it waits for its head."""
        ray = RAY.format(ip=self.hosts[name].ip)
        join = f"{ray} --address={self.hosts['head'].ip}:6379 --num-cpus=8 --resources='{{\"rack-a\": 4}}' --block"
        return f"until {join}; do sleep 1; done"

    async def workers(self) -> dict[str, dict[str, str]]:
        """What the control process lists of those that are ready, with their ``place``, by name."""
        control = f"{self.hosts['head'].ip}:50053"
        command = ("twinpool", "get", "workers", "-o", "json", "--control", control)
        code, said = await self.running["head"].execute(*command)
        if code:
            return {}
        places = {host.ip: name for name, host in self.hosts.items()}
        found: dict[str, dict[str, str]] = {}
        for each in json.loads(said[said.index("[") :]):
            if each["state"] == "ready":
                place = places.get(each["endpoint"].rpartition(":")[0], each["endpoint"])
                found[each["name"]] = each | {"place": place}
        return found

    async def listed(self, *places: str) -> dict[str, dict[str, str]]:
        """The workers, once there are two of each role, and they are at these places and nowhere else."""
        seen: dict[str, dict[str, str]] = {}

        async def there() -> bool:
            assert self.running["head"].running, self.running["head"].tail()
            seen.clear()
            seen.update(await self.workers())
            roles = sorted(each["role"] for each in seen.values())
            return roles == ["decode", "decode", "prefill", "prefill"] and {
                each["place"] for each in seen.values()
            } == set(places)

        try:
            await until_told(there, UP_SECONDS)
        except TimeoutError:
            raise AssertionError(f"{seen}\n{self.running['head'].tail()}") from None
        return seen

    def client(self) -> Client:
        """A client of the router, on this machine."""
        return Client(f"{self.hosts['edge'].ip}:50051")

    async def sees(self, prefill: int, decode: int) -> None:
        """Waits until the router can use so many workers."""
        async with self.client() as client:

            async def usable() -> bool:
                try:
                    models = await client.models()
                except TwinpoolError:
                    return False
                return [(one.prefill_workers, one.decode_workers) for one in models] == [(prefill, decode)]

            await until_told(usable, UP_SECONDS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def racks(
    hosts: None, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Racks]:
    with Network() as network:
        made = Racks(network, tmp_path_factory.mktemp("racks"), checkpoint)
        try:
            made.start()
            yield made
        finally:
            for sandbox in made.running.values():
                sandbox.kill()


async def test_workers_are_spread_over_the_hardware_that_they_need(racks: Racks, checkpoint: Path) -> None:
    """One of each role on each node, none on the head, which has no rack-a; tokens are the oracle's, KV crosses between nodes."""
    workers = await racks.listed(*RACKS)
    assert sorted((each["place"], each["role"]) for each in workers.values()) == [
        (place, role) for place in RACKS for role in ("decode", "prefill")
    ]
    await racks.sees(2, 2)
    between = set()
    async with racks.client() as client:
        for turn in range(10):
            # Side by side, so that no pair of workers takes all of them.
            prompts = [prompt(20 + 3 * number, 800 + turn) for number in range(8)]
            for outcome in await asyncio.gather(
                *(ask(client, oracle(checkpoint), each, TOKENS) for each in prompts)
            ):
                done = outcome.done
                assert done.handoff.bytes > 0
                names = (done.prefill_worker, done.decode_worker)
                places = tuple(workers[name.partition("@")[0]]["place"] for name in names)
                if places[0] != places[1]:
                    between.add(places)
            if len(between) == 2:
                break
    assert len(between) == 2, "KV has crossed in both directions"
    await assert_quiescent([each["endpoint"] for each in workers.values()], within=60)


async def test_a_node_that_is_lost_under_load(racks: Racks, checkpoint: Path) -> None:
    """All of a node ends at once: the pool heals on the other one, and requests end right or say truly why not."""
    workers = await racks.listed(*RACKS)
    await racks.sees(2, 2)
    known, outcomes, stopping = oracle(checkpoint), [], asyncio.Event()

    async def stream(number: int) -> None:
        async with racks.client() as client:
            turn = 0
            while not stopping.is_set():
                turn += 1
                tokens = prompt(1 + (37 * turn + 61 * number) % 100, 900 + number)
                # What came is a prefix of the oracle's answer however it ends: ask fails otherwise.
                outcomes.append(await ask(client, known, tokens, TOKENS))

    clients = [asyncio.ensure_future(stream(number)) for number in range(3)]
    await until(lambda: len(outcomes) >= 4 or any(one.done() for one in clients), 240)
    racks.running[RACKS[1]].kill()
    healed = await racks.listed(RACKS[0])
    await racks.sees(2, 2)
    after = len(outcomes)
    await until(lambda: len(outcomes) >= after + 6 or any(one.done() for one in clients), 240)
    stopping.set()
    await asyncio.gather(*clients)
    reasons = [outcome.reason for outcome in outcomes if outcome.error is not None]
    assert set(reasons) <= TRUE_FAILURES, reasons
    # After the pool has healed nothing fails.
    assert all(outcome.error is None for outcome in outcomes[after + 3 :])
    stayed = [name for name, each in workers.items() if each["place"] == RACKS[0]]
    assert all(healed[name]["incarnation"] == workers[name]["incarnation"] for name in stayed)
    print(f"{len(outcomes)} requests, failed: {reasons}")
    await assert_quiescent([each["endpoint"] for each in healed.values()], within=60)
