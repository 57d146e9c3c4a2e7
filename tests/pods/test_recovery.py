# SPDX-License-Identifier: Apache-2.0
"""Backup and restore of etcd under a release that runs, with the commands of docs/operations.md, and the loss of all it held."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from tests.pods.controllers import Controllers
from tests.pods.pod import Pod
from tests.pods.ray_pods import answers
from tests.pods.release import NAMESPACE, UP_SECONDS, Release
from tests.support.chart import ROOT, Helm
from tests.support.waiting import until_told

pytestmark = [
    pytest.mark.chart,
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.asyncio(loop_scope="module"),
]

ETCD = "rel-twinpool-etcd"
CORDONED = "rel-twinpool-tiny-decode-0"


def documented(beginning: str) -> str:
    """The script after ``beginning`` in docs/operations.md, for this release."""
    text = (ROOT / "docs" / "operations.md").read_text()
    found = re.search(rf"{re.escape(beginning)}[^']*'([^']+)'", text)
    assert found is not None, beginning
    # Names of the page's release and namespace.
    script = found[1].replace("--initial-cluster-token llm-", f"--initial-cluster-token {NAMESPACE}-rel-")
    return script.replace(".llm.svc", f".{NAMESPACE}.svc").replace("twinpool-etcd", "rel-twinpool-etcd")


@pytest_asyncio.fixture(loop_scope="module")
async def release(helm: Helm, tmp_path: Path) -> AsyncIterator[Release]:
    values = {
        "config": {"router": {"local_prefill": False}, "worker": {"calibration_seconds": 0}},
        "prefill": {"startTimeoutSeconds": 600},
        "decode": {"startTimeoutSeconds": 600},
        "etcd": {"persistence": {"enabled": True}},
    }
    async with Release(helm.docs(values, "values-dev.yaml"), tmp_path) as made:
        await Controllers(made).install()
        yield made


def only(release: Release, component: str) -> Pod:
    (found,) = release.of(component)
    return found


async def etcd_again(release: Release) -> None:
    """Its StatefulSet scaled up from nothing; its volume is the one that it had."""
    controllers = Controllers(release)
    (workload,) = (doc for doc in controllers.workloads() if doc["metadata"]["name"] == ETCD)
    await release.ready([await release.add(f"{ETCD}-0", workload["spec"]["template"], workload)])


async def restore_pod(release: Release) -> Pod:
    """The pod that the page has operators make, on the volume of etcd's member."""
    text = (ROOT / "docs" / "operations.md").read_text().partition("kubectl apply -n llm -f - <<END\n")[2]
    doc = yaml.safe_load(text.partition("\nEND\n")[0])
    ((claim,), mounts) = doc["spec"]["volumes"], doc["spec"]["containers"][0]["volumeMounts"]
    assert claim["persistentVolumeClaim"]["claimName"] == "data-twinpool-etcd-0"
    assert [mount["name"] for mount in mounts] == [claim["name"]]
    template = {
        "metadata": {"labels": {"app.kubernetes.io/component": "restore"}},
        "spec": doc["spec"] | {"volumes": []},
    }
    # Volumes that are claimed go by the pod's name.
    workload = {"spec": {"volumeClaimTemplates": [{"metadata": {"name": claim["name"]}}]}}
    pod = await release.add(f"{ETCD}-0", template, workload)
    await release.ready([pod])
    return pod


async def told(release: Release, *words: str) -> str:
    return await only(release, "control").execute("twinpool", *words)


async def shows(release: Release, wanted: str, *words: str) -> None:
    """Returns once a command prints something."""

    async def does() -> bool:
        try:
            return wanted in await told(release, *words)
        except AssertionError:
            return False

    await until_told(does, UP_SECONDS)


async def test_a_backup_is_restored_under_a_release_that_runs(release: Release) -> None:
    await answers(release)
    await told(release, "cordon", CORDONED)
    etcd = only(release, "etcd")
    await etcd.execute("sh", "-c", documented("-c auth -- sh -c"), container="auth")
    await told(release, "uncordon", CORDONED)
    # As `kubectl cp` does.
    backup = release.directory / "backup.db"
    shutil.copy(etcd.volume("tmp") / "backup.db", backup)
    # All it held is lost.
    await release.remove(etcd)
    for path in (etcd.volume("data") / "data").iterdir():
        shutil.rmtree(path)
    await answers(release)
    restore = await restore_pod(release)
    shutil.copy(backup, restore.volume("data"))
    (restore.volume("data") / "backup.db").chmod(0o644)
    script = documented("etcd-restore -- sh -c").replace("/tmp/backup.db", "/var/lib/etcd/backup.db")
    await restore.execute("sh", "-c", script)
    await release.remove(restore, at_once=True)
    await etcd_again(release)
    # A controller that has been there puts what it knows; the next one reads what is recorded.
    control = only(release, "control")
    await release.remove(control)
    await release.ready([await release.add(f"{control.name}-2", control.template, {"spec": {}})])
    # What was recorded at the time of the backup is so again; who serves now is found again.
    await shows(release, '"cordoned": "yes"', "get", "workers", "-o", "json")
    await told(release, "uncordon", CORDONED)
    await shows(release, CORDONED, "get", "workers", "-o", "name")
    await answers(release)
    await release.complete("rel-twinpool-test")


async def test_without_a_backup_a_release_that_runs_registers_anew(release: Release) -> None:
    await answers(release)
    etcd = only(release, "etcd")
    await release.remove(etcd, at_once=True)
    shutil.rmtree(etcd.volume("data") / "data")
    await etcd_again(release)
    for name in (CORDONED, "rel-twinpool-tiny-prefill-0"):
        await shows(release, name, "get", "workers", "-o", "name")
    await answers(release)
