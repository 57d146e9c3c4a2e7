# SPDX-License-Identifier: Apache-2.0
"""Deployments and StatefulSets: which pods there are to be, and in which order they come and go when their template changes."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Final

from tests.pods.pod import Pod
from tests.pods.release import Release
from tests.support.manifests import Doc

KINDS: Final = ("Deployment", "StatefulSet")


def digest(template: Doc) -> str:
    """Of what a pod is made from; another one is another pod."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


class Controllers:
    """Of the workloads of a release. ``fewest``: how many pods of each were there at the worst moment of the last change: of a
    Deployment those that were ready, of a StatefulSet those that had become ready and were not told to end."""

    def __init__(self, release: Release, restarts: int = 0) -> None:
        """``restarts``: how often containers of a pod may end by themselves."""
        self.release = release
        self._restarts = restarts
        self._number = 0
        self.fewest: dict[str, int] = {}

    def workloads(self) -> list[Doc]:
        """Those of the manifests."""
        return [doc for doc in self.release.manifests.docs if doc["kind"] in KINDS]

    def pods(self, workload: Doc, *, ended: bool = False) -> list[Pod]:
        """The pods of a workload; ``ended``: also those that are about to end."""
        wanted = workload["spec"]["selector"]["matchLabels"].items()
        found = [pod for pod in self.release.pods.values() if wanted <= pod.labels.items()]
        return [pod for pod in found if ended or not pod.terminating]

    async def install(self) -> None:
        """Starts everything at once, and waits until it is ready."""
        for workload in self.workloads():
            for number in range(workload["spec"]["replicas"]):
                await self._add(workload, number)
        await self.release.ready(self.release.pods.values())

    async def apply(self, docs: list[Doc]) -> None:
        """What `helm upgrade` and `helm rollback` bring about, all workloads at once; returns at its end."""
        self.release.manifests.docs = docs
        for pod in self.release.pods.values():
            pod.fill()
        await self.release.sync()
        self.fewest = {}
        watch = asyncio.ensure_future(self._count())
        try:
            await asyncio.gather(*(self._roll(workload) for workload in self.workloads()))
        finally:
            watch.cancel()
        self.release.check()

    async def _count(self) -> None:
        while True:
            for workload in self.workloads():
                name = workload["metadata"]["name"]
                # Workers say that they are not ready while their lease is gone, which an etcd of one member that is replaced may
                # bring about; they serve on. Of them counts who has been ready and is not taken away.
                asked = workload["kind"] == "Deployment"
                ready = sum(pod.ready if asked else pod.was_ready for pod in self.pods(workload))
                self.fewest[name] = min(self.fewest.get(name, ready), ready)
            await asyncio.sleep(0.05)

    async def _roll(self, workload: Doc) -> None:
        old = [
            pod for pod in self.pods(workload) if digest(pod.template) != digest(workload["spec"]["template"])
        ]
        if workload["kind"] == "StatefulSet":
            await self._in_order(workload, old)
        elif workload["spec"].get("strategy", {}).get("type") == "Recreate":
            await asyncio.gather(*map(self.release.remove, old))
            await self.release.ready([await self._add(workload, number) for number, _ in enumerate(old)])
        else:
            await self._surge(workload, old)

    async def _in_order(self, workload: Doc, old: list[Pod]) -> None:
        """From the last to the first; the next one ends when this one's successor is ready."""
        numbers = {int(pod.name.rpartition("-")[2]): pod for pod in old}
        for number in sorted(numbers, reverse=True):
            await self.release.remove(numbers[number])
            await self.release.ready([await self._add(workload, number)])

    async def _surge(self, workload: Doc, old: list[Pod]) -> None:
        """One more than there are to be, and never fewer that are ready. Those that end are not waited for."""
        assert workload["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        leaving = []
        for number, pod in enumerate(old):
            await self.release.ready([await self._add(workload, number)])
            leaving += [asyncio.ensure_future(self.release.remove(pod))]
        await asyncio.gather(*leaving)

    async def _add(self, workload: Doc, number: int) -> Pod:
        name, template = workload["metadata"]["name"], workload["spec"]["template"]
        self._number += 1
        ending = number if workload["kind"] == "StatefulSet" else f"{digest(template)}-{self._number:03}"
        return await self.release.add(f"{name}-{ending}", template, workload, restarts=self._restarts)

    # --- evictions

    def may_leave(self, pod: Pod) -> bool:
        """Whether a PodDisruptionBudget lets a pod be evicted now."""
        for doc in self.release.manifests.docs:
            wanted = doc["spec"]["selector"]["matchLabels"] if doc["kind"] == "PodDisruptionBudget" else None
            if wanted is None or not wanted.items() <= pod.labels.items():
                continue
            (workload,) = (each for each in self.workloads() if pod in self.pods(each, ended=True))
            healthy = sum(each.ready for each in self.pods(workload))
            least = workload["spec"]["replicas"] - doc["spec"]["maxUnavailable"]
            if healthy - pod.ready < least:
                return False
        return True

    async def evict(self, pod: Pod) -> bool:
        """What `kubectl drain` does to a pod: it ends, and another one takes its place. False: its budget does not allow it."""
        if not self.may_leave(pod):
            return False
        (workload,) = (each for each in self.workloads() if pod in self.pods(each))
        if workload["kind"] == "StatefulSet":
            await self.release.remove(pod)
            await self._add(workload, int(pod.name.rpartition("-")[2]))
        else:
            leaving = asyncio.ensure_future(self.release.remove(pod))
            await self._add(workload, 0)
            await leaving
        return True
