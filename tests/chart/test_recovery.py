# SPDX-License-Identifier: Apache-2.0
"""Backup and restore of etcd under a release that runs, with the commands of docs/operations.md, and the loss of all it held."""

import asyncio
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chart.test_ray_processes import VALUES, answers
from tests.support import netns_pods
from tests.support.chart import ROOT, Helm
from tests.support.netns_kubelet import START_SECONDS, begin, ready
from tests.support.netns_pods import NetPod, NetWorld
from tests.support.waiting import until_told

pytestmark = [pytest.mark.chart, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

CORDONED = "rel-twinpool-tiny-decode-0"


def documented(beginning: str) -> str:
    """The script after ``beginning`` in docs/operations.md, for this release."""
    text = (ROOT / "docs" / "operations.md").read_text()
    found = re.search(rf"{re.escape(beginning)}[^']*'([^']+)'", text)
    assert found is not None, beginning
    # Names of the page's release and namespace.
    script = found[1].replace(
        "--initial-cluster-token llm-", f"--initial-cluster-token {netns_pods.NAMESPACE}-rel-"
    )
    return script.replace(".llm.svc", f".{netns_pods.NAMESPACE}.svc").replace(
        "twinpool-etcd", "rel-twinpool-etcd"
    )


@pytest.fixture
def world(helm: Helm, tmp_path: Path) -> Iterator[NetWorld]:
    for binary in ("etcd", "etcdctl"):
        if shutil.which(binary) is None:
            pytest.skip(f"no {binary}")
    if why := netns_pods.usable():
        pytest.skip(why)
    docs = helm.docs({"config": VALUES["config"]}, "values-dev.yaml")
    with NetWorld(docs, tmp_path) as running:
        yield running


async def up(world: NetWorld) -> None:
    await begin(world, world.of("etcd"))
    await ready(world, world.of("etcd"), "auth")
    parts = [world.of(part) for part in ("prefill", "decode", "control", "router")]
    await asyncio.gather(*(begin(world, pod) for pod in parts))
    for pod in parts:
        await ready(world, pod)


async def etcd_again(world: NetWorld) -> None:
    etcd = world.of("etcd")
    await begin(world, etcd)
    await ready(world, etcd, "auth")


def told(world: NetWorld, *words: str) -> str:
    return world.execute(world.of("control"), "twinpool", *words)


async def shows(world: NetWorld, wanted: str, *words: str) -> None:
    """Returns once a command prints something."""

    async def does() -> bool:
        try:
            return wanted in await asyncio.to_thread(told, world, *words)
        except AssertionError:
            return False

    await until_told(does, START_SECONDS)


def data_of(etcd: NetPod) -> Path:
    return etcd.volumes["data"] / "data"


async def test_a_backup_is_restored_under_a_release_that_runs(world: NetWorld) -> None:
    await up(world)
    etcd, endpoint = world.of("etcd"), f"{world.of('router').ip}:50051"
    await answers(endpoint)
    told(world, "cordon", CORDONED)
    saved = documented("-c auth -- sh -c")
    await asyncio.to_thread(world.execute, etcd, "sh", "-c", saved, container="auth")
    told(world, "uncordon", CORDONED)
    # As `kubectl cp` does.
    backup = etcd.volumes["tmp"] / "backup.db"
    shutil.copy(backup, etcd.volumes["data"])
    # As `kubectl cp` does.
    shutil.copy(etcd.volumes["tmp"] / "backup.db", etcd.volumes["data"])
    # All it held is lost.
    world.kill(etcd)
    for path in data_of(etcd).iterdir():
        shutil.rmtree(path)
    await answers(endpoint)
    restore = documented("etcd-restore -- sh -c").replace("/tmp/backup.db", "/var/lib/etcd/backup.db")
    await asyncio.to_thread(world.execute, etcd, "sh", "-c", restore, container="etcd")
    await etcd_again(world)
    # A controller that has been there puts what it knows; the next one reads what is recorded.
    control = world.of("control")
    await asyncio.to_thread(world.stop, control)
    await begin(world, control)
    await ready(world, control)
    # What was recorded at the time of the backup is so again; who serves now is found again.
    await shows(world, '"cordoned": "yes"', "get", "workers", "-o", "json")
    told(world, "uncordon", CORDONED)
    await shows(world, CORDONED, "get", "workers", "-o", "name")
    await answers(endpoint)
    world.start(world.of("test"))
    assert await asyncio.to_thread(world.of("test").processes["test"].wait, START_SECONDS) == 0


async def test_without_a_backup_a_release_that_runs_registers_anew(world: NetWorld) -> None:
    await up(world)
    etcd, endpoint = world.of("etcd"), f"{world.of('router').ip}:50051"
    await answers(endpoint)
    world.kill(etcd)
    shutil.rmtree(data_of(etcd))
    await etcd_again(world)
    for name in (CORDONED, "rel-twinpool-tiny-prefill-0"):
        await shows(world, name, "get", "workers", "-o", "name")
    await answers(endpoint)
