# SPDX-License-Identifier: Apache-2.0
"""The pods of a RayCluster in a release of this machine, as KubeRay makes them."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Final

from tests.pods.controllers import Controllers
from tests.pods.pod import Pod
from tests.pods.release import NAMESPACE, UP_SECONDS, Release
from tests.support import kuberay
from tests.support.manifests import Doc
from tests.support.waiting import until_told
from twinpool.client import Client, request

RESTARTS: Final = 3
"""Ray's nodes give up on a head that is slow to start; the kubelet starts them again."""


def with_head(docs: list[Doc]) -> list[Doc]:
    """The manifests, and what KubeRay adds to them beside pods."""
    (cluster,) = (doc for doc in docs if doc["kind"] == "RayCluster")
    return [*docs, kuberay.service(cluster)]


async def install(release: Release) -> None:
    """Starts the pods of the RayCluster and all others, and waits until they are ready."""
    (cluster,) = (doc for doc in release.manifests.docs if doc["kind"] == "RayCluster")
    for doc in kuberay.pods(cluster, NAMESPACE):
        await add(release, doc)
    await Controllers(release, restarts=RESTARTS).install()


async def add(release: Release, doc: Doc) -> Pod:
    """Starts a pod that KubeRay has made."""
    return await release.add(doc["metadata"]["name"], doc, {"spec": {}}, restarts=RESTARTS)


async def workers(release: Release) -> dict[str, dict[str, Any]]:
    """What `twinpool get workers` in the controller's pod lists, by name."""
    (control,) = release.of("control")
    text = await control.execute("twinpool", "get", "workers", "-o", "json")
    return {each["name"]: each for each in json.loads(text[text.index("[") :])}


def where(release: Release, worker: dict[str, Any]) -> Pod:
    """The pod in which a worker runs."""
    (pod,) = (pod for pod in release.pods.values() if pod.ip == worker["endpoint"].rpartition(":")[0])
    return pod


async def listed(release: Release, *names: str) -> dict[str, dict[str, Any]]:
    """The workers, once they are these and all are ready."""
    found: dict[str, dict[str, Any]] = {}

    async def are() -> bool:
        found.clear()
        # A controller that starts again answers later.
        with contextlib.suppress(AssertionError):
            found.update(await workers(release))
        return found.keys() == set(names) and all(each["state"] == "ready" for each in found.values())

    try:
        await until_told(are, UP_SECONDS)
    except TimeoutError:
        (control,) = release.of("control")
        raise AssertionError(f"{found}\n{control.log()}") from None
    return found


async def answers(release: Release, name: str = "tiny") -> None:
    """Asks a router for a few tokens of a model, once it can be asked."""
    async with Client(f"{release.of('router')[0].ip}:50051") as client:

        async def serves() -> bool:
            return any(model.ready and model.name == name for model in await client.models())

        await until_told(serves, UP_SECONDS)
        asked = request(
            prompt="a prompt that is long enough for blocks", model=name, max_tokens=4, ignore_eos=True
        )
        answer = await client.complete(asked)
        assert answer.finished.usage.completion_tokens == 4
