# SPDX-License-Identifier: Apache-2.0
"""A release from the image: every container's root is the image's own, read-only, and nothing of this machine is in it.

``scripts/try_image.sh TAG`` mounts an image and runs this.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.pods.controllers import Controllers
from tests.pods.pod import Pod
from tests.pods.release import Release
from tests.support.chart import ROOT, Helm
from tests.support.sandbox import IMAGE
from twinpool.client import Client, request

pytestmark = [
    pytest.mark.integration,
    pytest.mark.chart,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not IMAGE, reason="no TWINPOOL_IMAGE_ROOT: scripts/try_image.sh TAG"),
]

PARTS = ("router", "prefill", "decode", "control", "etcd")
VALUES = {
    # A hand-off, and nothing measured before.
    "config": {"router": {"local_prefill": False}, "worker": {"calibration_seconds": 0}},
    # All start at once on a machine that may have few cores.
    "prefill": {"startTimeoutSeconds": 900},
    "decode": {"startTimeoutSeconds": 900},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def release(helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Release]:
    docs = helm.docs(VALUES, "values-dev.yaml")
    async with Release(docs, tmp_path_factory.mktemp("release")) as made:
        await Controllers(made).install()
        yield made


async def said(pod: Pod, *command: str) -> tuple[int, str]:
    """What a command in a pod's first container ends with and prints."""
    return await pod.sandboxes[pod.spec["containers"][0]["name"]].execute(*command)


async def test_it_serves(release: Release) -> None:
    """`helm test`, and a request over both APIs, as clients of the routers' port."""
    await release.complete("rel-twinpool-test")
    (router,) = release.of("router")
    async with Client(f"{router.ip}:50051") as client:
        asked = request(
            prompt="a prompt that is long enough for blocks", model="tiny", max_tokens=4, ignore_eos=True
        )
        answer = await client.complete(asked)
        assert answer.finished.usage.completion_tokens == 4
    # As docs/operations.md has it, from a pod that has the commands.
    code, text = await said(router, "twinpool", "generate", "--endpoint", f"{router.ip}:50051", "Hello")
    assert code == 0, text
    assert re.search(r"\d+ generated", text), text
    (control,) = release.of("control")
    code, text = await said(control, "twinpool", "get", "workers", "-o", "name")
    assert code == 0, text
    assert set(text.split()) >= {"rel-twinpool-tiny-decode-0", "rel-twinpool-tiny-prefill-0"}
    release.check()


@pytest.mark.parametrize("part", PARTS)
async def test_every_part_runs_from_the_image(release: Release, part: str) -> None:
    (pod,) = release.of(part)
    assert await said(pod, "id", "-u") == (0, "10001\n")
    for path in ("/new", "/opt/twinpool/new", "/usr/bin/new"):
        code, text = await said(pod, "touch", path)
        assert code, f"{path}: {text}"
        assert "Read-only file system" in text or "Permission denied" in text
    code, text = await said(pod, "sh", "-c", ": > /opt/twinpool/installed.txt")
    assert code
    assert await said(pod, "test", "-e", str(ROOT / "pyproject.toml")) == (1, "")
    code, text = await said(pod, "sh", "-c", "command -v pip gcc cc")
    # What a base of an image brings is not the project's.
    assert "/opt/twinpool" not in text
    code, text = await said(pod, "twinpool", "version", "-o", "json")
    assert code == 0, text
    code, text = await said(pod, "cat", "/opt/twinpool/sbom.cdx.json")
    listed = {each["name"] for each in json.loads(text)["components"]}
    assert {"twinpool", "torch", "ray", "etcd-server", "etcd-client", "libc6"} <= listed
