# SPDX-License-Identifier: Apache-2.0
"""The pods of the chart as processes: they start, are live and ready by their probes, answer, and end."""

import asyncio
import shutil
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.chart import Doc, Helm, merged
from tests.support.pods import ADDRESSES, NAMESPACE, Pod, World
from tests.support.policies import End, Policies
from tests.support.waiting import until_told
from twinpool.client import Client, request
from twinpool.config import TlsConfig, load_config
from twinpool.errors import TwinpoolError
from twinpool.store import connect_store

pytestmark = [pytest.mark.chart, pytest.mark.integration]

START_SECONDS = 120.0
PARTS = ("router", "prefill", "decode", "control")


def secrets_of(docs: list[Doc]) -> dict[str, dict[str, bytes]]:
    """What cert-manager makes of the certificates."""
    ca = trustme.CA()
    found = {}
    for doc in docs:
        if doc["kind"] != "Certificate" or doc["spec"].get("isCA"):
            continue
        spec = doc["spec"]
        # A pod's own 127.0.0.1, and here also what a service's name stands for.
        own = ADDRESSES if spec.get("ipAddresses") == ["127.0.0.1"] else ()
        leaf = ca.issue_cert(*spec["dnsNames"], *own, common_name=spec["commonName"])
        found[spec["secretName"]] = {
            "tls.crt": b"".join(pem.bytes() for pem in leaf.cert_chain_pems),
            "tls.key": leaf.private_key_pem.bytes(),
            "ca.crt": ca.cert_pem.bytes(),
        }
    return found


def page(url: str) -> bytes:
    """What HTTP answers. Raises OSError, also for a status of failure."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return bytes(answer.read())


async def ready(world: World, pod: Pod, kind: str = "readinessProbe") -> bool:
    """What the kubelet's probe of the pod's first container says."""
    probe = pod.container()[kind]
    if "exec" in probe:
        return world.probe(pod, probe["exec"]["command"])
    if "httpGet" in probe:
        ports = {port["name"]: port["containerPort"] for port in pod.container()["ports"]}
        url = f"http://{pod.ip}:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"
        try:
            return bool(page(url))
        except OSError:
            return False
    asked = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
    async with grpc.aio.insecure_channel(f"{pod.ip}:{probe['grpc']['port']}") as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=5)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def started(world: World, pod: Pod, container: str = "", kind: str = "readinessProbe") -> None:
    """Returns once the pod's probe is content."""
    process = pod.processes[pod.container(container)["name"]]

    async def content() -> bool:
        assert process.poll() is None, f"{pod.name} has ended\n{world.log(pod, container)}"
        return await ready(world, pod, kind)

    try:
        await until_told(content, START_SECONDS)
    except TimeoutError:
        raise AssertionError(f"{pod.name} is not ready\n{world.log(pod, container)}") from None


async def up(world: World) -> None:
    """Starts everything, as Kubernetes would: at once, but for the steps within a pod."""
    etcd = world.of("etcd")
    product = [pod for part in PARTS for pod in world.all_of(part)]
    inits = [(pod, init["name"]) for pod in product for init in pod.spec.get("initContainers", [])]
    for pod, name in inits:
        world.start(pod, name)
    for pod, name in inits:
        assert pod.processes.pop(name).wait(START_SECONDS) == 0, world.log(pod, name)
    # All at once: the product waits for etcd, and for its user there.
    for pod in product:
        world.start(pod)
    world.start(etcd, "etcd")
    world.start(etcd, "auth")
    await started(world, etcd, "etcd")
    done = etcd.container("auth")["readinessProbe"]["exec"]["command"]

    async def has_users() -> bool:
        return world.probe(etcd, done)

    await until_told(has_users, START_SECONDS)
    for pod in product:
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            await started(world, pod, kind=kind)


def unknown_connections(world: World) -> set[tuple[str, str, int]]:
    """Those that are open and that the policies do not allow; at least the design's own have to be open."""
    policies = Policies(world.docs)
    seen = [
        (End(source.name, NAMESPACE, source.labels), End(target.name, NAMESPACE, target.labels), port)
        for source, target, port in world.connections()
    ]
    kinds = {(component(source), component(target), port) for source, target, port in seen}
    pairs = {kind[:2] for kind in kinds}
    wanted = {("router", "prefill"), ("router", "decode"), ("decode", "prefill")}
    wanted |= {(part, "etcd") for part in PARTS}
    assert wanted <= pairs, pairs
    assert {("router", "decode", 50052), ("router", "decode", 5557)} <= kinds, kinds
    assert any(18500 <= port <= 18531 for _, _, port in kinds), kinds
    return {
        (source.name, target.name, port)
        for source, target, port in seen
        if not policies.allow(source, target, port)
    }


def component(end: End) -> str:
    return end.labels["app.kubernetes.io/component"]


async def answers(client: Client, model: str) -> None:
    """Asks for a few tokens of a model. A random one may well draw the end of an answer at first."""
    asked = request(
        prompt="a prompt that is long enough for blocks", model=model, max_tokens=4, ignore_eos=True
    )
    answer = await client.complete(asked)
    assert answer.finished.usage.completion_tokens == 4


async def check_operator(world: World) -> None:
    """Commands in the controller's pod, as `kubectl exec` runs them: lists, and a drain that ends a worker's process."""
    control = world.of("control")
    decode = world.of("decode")
    listed = await world.execute(control, "twinpool", "get", "workers", "-o", "name")
    assert listed.split() == [decode.name, world.of("prefill").name]
    process = decode.processes["decode"]
    await world.execute(control, "twinpool", "drain", decode.name, "--yes", "--wait")
    assert await asyncio.to_thread(process.wait, START_SECONDS) == 0, world.log(decode)


def check_store(world: World) -> None:
    """The product's user may touch the keys of its cluster, and nobody else any."""
    pod = world.of("router")
    config = pod.mounts["/etc/twinpool/config"] / "config.yaml"
    cluster = load_config(config, env={}).cluster
    store = connect_store(cluster)
    store.put(f"/twinpool/v1/{cluster.name}/test", b"1")
    with pytest.raises(TwinpoolError, match="permission denied"):
        store.put("/twinpool/v1/another/test", b"1")
    store.close()
    nobody = connect_store(cluster.model_copy(update={"etcd_user": "", "etcd_password_file": ""}))
    with pytest.raises(TwinpoolError):
        nobody.get(f"/twinpool/v1/{cluster.name}/test")
    nobody.close()


@pytest.fixture
def world(helm: Helm, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    for binary in ("etcd", "etcdctl"):
        if shutil.which(binary) is None:
            pytest.skip(f"no {binary}")
    # A hand-off each, and nothing measured before.
    config = {"router": {"local_prefill": False}, "worker": {"calibration_seconds": 0}}
    docs = helm.docs(merged({"config": config}, request.param), "values-dev.yaml")
    with World(docs, tmp_path, secrets_of(docs)) as running:
        yield running


@pytest.mark.parametrize("world", [{}], indirect=True)
async def test_a_release_answers_and_ends(world: World) -> None:
    await up(world)
    router = world.of("router")
    world.run(world.of("test"))
    async with Client(f"{router.ip}:50051") as client:
        await answers(client, "tiny")
    assert b'"tiny"' in page(f"http://{router.ip}:8000/v1/models")
    for part in ("router", "prefill", "decode"):
        assert b"twinpool_membership_registered 1.0" in page(f"http://{world.of(part).ip}:9090/metrics")
    assert b"twinpool_control_leader 1.0" in page(f"http://{world.of('control').ip}:9090/metrics")
    check_store(world)
    assert unknown_connections(world) == set()
    await check_operator(world)
    for part in ("router", "prefill", "control"):
        assert world.stop(world.of(part)) == 0, world.log(world.of(part))
    assert world.stop(world.of("etcd"), "auth") == 0


@pytest.mark.slow
@pytest.mark.parametrize("world", [{"tls": {"enabled": True}}], indirect=True)
async def test_a_release_with_mutual_tls_answers(world: World) -> None:
    await up(world)
    world.run(world.of("test"))
    router, operator = world.of("router"), world.of("test").mounts["/etc/twinpool/tls"]
    domain = router.mounts["/etc/twinpool/config"].joinpath("config.yaml").read_text()
    assert "role_domain: rel-twinpool.ns.twinpool" in domain
    tls = TlsConfig(
        cert_file=str(operator / "tls.crt"),
        key_file=str(operator / "tls.key"),
        ca_file=str(operator / "ca.crt"),
        server_name="rel-twinpool-router.ns.svc",
    )
    async with Client(f"{router.ip}:50051", tls=tls) as client:
        await answers(client, "tiny")
    command = (sys.executable, "-m", "twinpool.control.cli.main", "health", f"{router.ip}:50051")
    plain = await asyncio.create_subprocess_exec(*command)
    assert await plain.wait() == 3
    assert b"twinpool_control_leader 1.0" in page(f"http://{world.of('control').ip}:9090/metrics")
    check_store(world)
    assert unknown_connections(world) == set()
    await check_operator(world)


@pytest.mark.slow
@pytest.mark.parametrize(
    "world", [{"models": {"other": {"name": "other-name", "tiny": {"family": "llama"}}}}], indirect=True
)
async def test_two_models_are_served_by_the_same_routers(world: World) -> None:
    await up(world)
    async with Client(f"{world.of('router').ip}:50051") as client:
        for model in ("tiny", "other-name"):
            await answers(client, model)
    assert unknown_connections(world) == set()
