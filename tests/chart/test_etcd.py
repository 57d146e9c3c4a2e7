# SPDX-License-Identifier: Apache-2.0
"""The bundled etcd: its users, a password that changes, a backup and its restore, as docs/operations.md has them."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.support.chart import Doc, Helm
from tests.support.pods import ADDRESSES, Pod, World
from tests.support.waiting import until, until_told
from twinpool.config import ClusterConfig, load_config
from twinpool.errors import TwinpoolError
from twinpool.store import PrefixWatch, connect_store

pytestmark = [pytest.mark.chart, pytest.mark.integration]

SECRET = "rel-twinpool-etcd-auth"


def secured(docs: list[Doc]) -> dict[str, dict[str, bytes]]:
    """A certificate of etcd's members, with the addresses that their names stand for here."""
    ca = trustme.CA()
    (spec,) = (
        doc["spec"]
        for doc in docs
        if doc["kind"] == "Certificate" and doc["metadata"]["name"].endswith("-etcd")
    )
    leaf = ca.issue_cert(*spec["dnsNames"], *ADDRESSES, common_name=spec["commonName"])
    files = {"tls.crt": b"".join(pem.bytes() for pem in leaf.cert_chain_pems)}
    files |= {"tls.key": leaf.private_key_pem.bytes(), "ca.crt": ca.cert_pem.bytes()}
    return {spec["secretName"]: files, "rel-twinpool-router-tls": files}


@pytest.fixture
def world(helm: Helm, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    for binary in ("etcd", "etcdctl"):
        if shutil.which(binary) is None:
            pytest.skip(f"no {binary}")
    values: dict[str, Any] = getattr(request, "param", {})
    docs = helm.docs(values, "values-dev.yaml")
    secrets = {SECRET: {"root-password": b"of-root", "password": b"of-the-product"}}
    # Of the other roles nothing is started.
    others = {f"rel-twinpool-{role}-tls": {"tls.crt": b""} for role in ("worker", "control", "operator")}
    secrets |= {**others, **secured(docs)} if values else {}
    with World(docs, tmp_path, secrets) as running:
        yield running


def cluster_of(world: World, password: str) -> ClusterConfig:
    router = world.of("router")
    file = world.directory / f"password-{len(password)}"
    file.write_text(password)
    told = load_config(router.mounts["/etc/twinpool/config"] / "config.yaml", env={}).cluster
    return told.model_copy(update={"etcd_password_file": str(file), "etcd_timeout_seconds": 5.0})


async def users_made(world: World, etcd: Pod) -> None:
    process = world.start(etcd, "auth")
    done = etcd.container("auth")["readinessProbe"]["exec"]["command"]

    async def is_done() -> bool:
        assert process.poll() is None, world.log(etcd, "auth")
        return world.probe(etcd, done)

    await until_told(is_done)


def etcdctl(world: World, etcd: Pod, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """As ``kubectl exec ... -c auth -- sh -c`` would run it."""
    own = world.environment(etcd, etcd.container("auth"))
    own |= {"ETCDCTL_API": "3", "ETCDCTL_USER": f"root:{own['ROOT_PASSWORD']}"} | env
    return subprocess.run(
        ["etcdctl", *arguments], env=own, capture_output=True, text=True, timeout=60, check=False
    )


async def test_users_passwords_and_a_backup(world: World) -> None:
    etcd = world.of("etcd")
    world.start(etcd, "etcd")
    await users_made(world, etcd)
    cluster = cluster_of(world, "of-the-product")
    store = connect_store(cluster)
    key = f"/twinpool/v1/{cluster.name}/kept"
    store.put(key, b"1")
    # Nobody else's keys, nor anybody without a password.
    with pytest.raises(TwinpoolError, match="permission denied"):
        store.put("/twinpool/v1/another/kept", b"1")
    assert etcdctl(world, etcd, "get", key, ETCDCTL_USER="").returncode != 0

    # Another password in the Secret, and the pod again.
    assert world.stop(etcd, "auth") == 0
    world.set_secret(SECRET, {"root-password": b"of-root", "password": b"another"})
    await users_made(world, etcd)
    changed = connect_store(cluster_of(world, "another"))
    assert changed.get(key) is not None
    refused = connect_store(cluster)
    with pytest.raises(TwinpoolError, match="refused user"):
        refused.get(key)

    # A backup holds what there was then, users included.
    backup, restored = world.directory / "backup.db", world.directory / "restored"
    saved = etcdctl(world, etcd, "snapshot", "save", str(backup))
    assert saved.returncode == 0, saved.stderr
    changed.put(key, b"2")
    prefix = f"/twinpool/v1/{cluster.name}/"
    watch = PrefixWatch(changed, prefix, lambda batch: None, name="test")
    watch.start()
    await until(lambda: watch.connected)
    command = world.command(etcd, etcd.container("etcd"))
    given = [word for word in command if word.startswith(("--name", "--initial-"))]
    result = etcdctl(world, etcd, "snapshot", "restore", str(backup), "--data-dir", str(restored), *given)
    assert result.returncode == 0, result.stderr
    assert world.stop(etcd, "etcd") in (0, -15)
    data = etcd.mounts["/var/lib/etcd"] / "data"
    os.replace(data, data.with_name("before"))
    os.replace(restored, data)
    world.start(etcd, "etcd")

    # Who was there before comes back by itself, though etcd lets wait whoever shows a token of a revision that is gone.
    def restored_value() -> bytes | None:
        try:
            item = changed.get(key)
        except TwinpoolError:
            return None
        return item.value if item is not None else None

    async def is_back() -> bool:
        return await asyncio.to_thread(restored_value) == b"1" and watch.connected

    await until_told(is_back)
    watch.close()
    assert etcdctl(world, etcd, "get", key, ETCDCTL_USER="").returncode != 0
    for one in (store, changed, refused):
        one.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "world", [{"etcd": {"replicas": 3}, "tls": {"enabled": True}}], indirect=True, ids=["three with TLS"]
)
async def test_members_find_one_another_and_agree_on_users(world: World) -> None:
    members = world.all_of("etcd")
    assert len(members) == 3
    for member in members:
        world.start(member, "etcd")
    # Side by side, as the pods do it: what one has made the others find made.
    await asyncio.gather(*(users_made(world, member) for member in members))
    store = connect_store(cluster_of(world, "of-the-product"))
    key = f"/twinpool/v1/{cluster_of(world, 'of-the-product').name}/kept"
    store.put(key, b"1")
    for member in members:
        seen = etcdctl(world, member, "get", "--print-value-only", key)
        assert seen.stdout.strip() == "1", seen.stderr
        assert etcdctl(world, member, "get", key, ETCDCTL_USER="").returncode != 0
    # Two are a majority: the third one may be away.
    away = world.pods["rel-twinpool-etcd-0"]
    world.stop(away, "auth")
    world.stop(away, "etcd")
    again = etcdctl(world, members[1], "put", key, "2")
    assert again.returncode == 0, again.stderr
    store.close()
