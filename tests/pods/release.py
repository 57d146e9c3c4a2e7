# SPDX-License-Identifier: Apache-2.0
"""A release in a cluster of one machine: pods on hosts of netns.py, Services, NetworkPolicies and DNS between them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.pods.pod import Place, Pod
from tests.pods.rules import Address, denied, pod_rules
from tests.support.chart import ROOT
from tests.support.manifests import Doc, Manifests
from tests.support.netns import Host, Network, bound
from tests.support.policies import End
from tests.support.waiting import until

NAMESPACE: Final = "ns"
DOMAIN: Final = "cluster.local"
LATE_SECONDS: Final = 1.5
"""After which kube-proxy and DNS hear of a change: less than a router's preStop gives them."""
READY_SECONDS: Final = 600.0
UP_SECONDS: Final = 400.0
"""For what a release comes to once its pods are ready."""


class Release:
    """Use as an asynchronous context manager: at its end nothing is left. ``pods``: by name; ``gone``: those that were ended."""

    def __init__(self, docs: list[Doc], directory: Path) -> None:
        self.network = Network()
        self.directory = directory
        self.manifests = Manifests(docs, {})
        self.pods: dict[str, Pod] = {}
        self.gone: list[Pod] = []
        self.refused: set[tuple[str, str, str, int]] = set()
        self._number = 0
        self._ips: dict[str, str] = {}
        self._said: dict[str, str] = {}
        self._ends: dict[str, tuple[str, ...]] = {}
        self._hearing: set[asyncio.Task[None]] = set()
        self._syncing = asyncio.Lock()
        self._dns: subprocess.Popen[bytes] | None = None
        self._clients: dict[str, tuple[Host, End]] = {}

    async def __aenter__(self) -> Self:
        self.network.__enter__()
        try:
            self._start_dns()
        except BaseException:
            self.network.__exit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._hearing:
            task.cancel()
        for pod in self.pods.values():
            pod.close()
        if self._dns is not None:
            self._dns.kill()
            self._dns.wait()
        self.network.__exit__(kind, error, trace)

    def _start_dns(self) -> None:
        zone = self.directory / "zone.json"
        zone.write_text("{}")
        host = self._other("kube-dns", {"k8s-app": "kube-dns"}, "kube-system")
        self._ips["kube-dns"] = f"{self.network.services}.1"
        self._ends["kube-dns"] = (host.ip,)
        command = [sys.executable, "-m", "tests.pods.dns", host.ip, str(zone)]
        self._dns = subprocess.Popen(
            bound(*host.holder.inside(*command)), cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )

    # --- pods

    @property
    def resolver(self) -> str:
        """The resolv.conf of pods."""
        search = f"{NAMESPACE}.svc.{DOMAIN} svc.{DOMAIN} {DOMAIN}"
        return f"nameserver {self._ips['kube-dns']}\nsearch {search}\noptions ndots:5\n"

    async def client(self, name: str, labels: dict[str, str], namespace: str = "apps") -> Host:
        """A host of somebody else in the cluster."""
        host = self._other(name, labels, namespace)
        await self.sync()
        return host

    def _other(self, name: str, labels: dict[str, str], namespace: str) -> Host:
        host = self.network.host(name)
        self._clients[host.ip] = (host, End(name, namespace, labels))
        return host

    async def add(
        self, name: str, template: Doc, workload: Doc, *, begin: bool = True, restarts: int = 0
    ) -> Pod:
        """Makes a pod and lets it start, unless somebody else begins that. ``restarts``: see ``Pod``."""
        self._number += 1
        subdomain = workload["spec"].get("serviceName", "")
        claims = {
            claim["metadata"]["name"]: self.directory / "claims" / f"{claim['metadata']['name']}-{name}"
            for claim in workload["spec"].get("volumeClaimTemplates", [])
        }
        full = f"{subdomain}.{NAMESPACE}.svc.{DOMAIN}" if subdomain else ""
        place = Place(
            self.network.host(name),
            self.directory / f"{self._number:02}-{name}",
            NAMESPACE,
            self.resolver,
            claims,
            full,
        )
        pod = self.pods[name] = Pod(name, template, place, self.manifests, self.changed, restarts)
        # The network is there before a container is; who resolves names hears of it later.
        await self.sync()
        self.changed()
        if begin:
            pod.start()
        return pod

    async def complete(self, name: str) -> None:
        """Runs a pod that ends by itself, such as that of `helm test`; it has to end well."""
        doc = self.manifests.find("Pod", name)
        pod = await self.add(name, doc, doc, begin=False)
        try:
            for container in pod.spec["containers"]:
                await pod.run_once(container)
        finally:
            await self.remove(pod)

    async def remove(self, pod: Pod, *, at_once: bool = False) -> None:
        """Ends a pod, in order or at once."""
        if at_once:
            pod.terminating = True
            pod.close()
        else:
            await pod.terminate()
        # Not while somebody gives its host rules.
        async with self._syncing:
            for each in self.pods.values():
                self._note(each)
            del self.pods[pod.name]
            self.gone.append(pod)
            self.network.remove(pod.place.host)
            self._said.pop(pod.ip, None)
        self.changed()

    def of(self, component: str) -> list[Pod]:
        """The pods that play a part and are not about to end."""
        return [pod for pod in self.pods.values() if pod.component == component and not pod.terminating]

    async def ready(self, pods: Iterable[Pod], seconds: float = READY_SECONDS) -> None:
        """Waits until pods are ready."""
        wanted = list(pods)
        try:
            await until(
                lambda: all(pod.ready for pod in wanted) or any(pod.faults for pod in wanted), seconds
            )
        except TimeoutError:
            logs = "\n".join(pod.log() for pod in wanted if not pod.ready)
            raise AssertionError(f"not ready after {seconds} s\n{logs}") from None
        self.check()

    def check(self) -> None:
        """Fails if a pod did what the kubelet would have to mend, or was in the way of a policy."""
        pods = [*self.pods.values(), *self.gone]
        faults = [fault for pod in pods for fault in pod.faults]
        assert not faults, "\n".join(faults)
        for pod in self.pods.values():
            self._note(pod)
        assert not self.refused, f"policies are in the way of {sorted(self.refused)}"

    def _note(self, pod: Pod) -> None:
        """Writes down what policies have refused a pod. Who still dials a pod that is gone is refused rightly."""
        if pod.ip not in self._said:
            return
        there = {each.ip: each.name for each in self.pods.values()}
        there |= {ip: end.name for ip, (_, end) in self._clients.items()}
        found = denied(pod.place.host)
        self.refused |= {(pod.name, side, there[ip], port) for side, ip, port in found if ip in there}

    def connections(self) -> set[tuple[str, str, int]]:
        """(component, component, port) of every connection between pods that is open now; who listens comes second."""
        address = {pod.ip: pod for pod in self.pods.values()}
        listening: set[tuple[str, int]] = set()
        found: list[tuple[Pod, str, int]] = []
        for pod in self.pods.values():
            for line in pod.place.host.sh("ss -Htna").splitlines():
                state, _, _, own, peer = line.split()[:5]
                if state == "LISTEN":
                    listening.add((pod.ip, int(own.rpartition(":")[2])))
                elif state == "ESTAB":
                    host, _, port = peer.rpartition(":")
                    found.append((pod, host.strip("[]").removeprefix("::ffff:"), int(port)))
        return {
            (pod.component, address[host].component, port)
            for pod, host, port in found
            if (host, port) in listening and host != pod.ip
        }

    # --- Services and policies

    def changed(self) -> None:
        """Pods came, went or became ready: who forwards to them hears of it a little later."""
        task = asyncio.ensure_future(self._hear())
        self._hearing.add(task)
        task.add_done_callback(self._hearing.discard)

    async def _hear(self) -> None:
        await asyncio.sleep(LATE_SECONDS)
        zone: dict[str, list[str]] = {}
        for doc in self._services():
            name = doc["metadata"]["name"]
            found = self._endpoints(doc)
            full = f"{name}.{NAMESPACE}.svc.{DOMAIN}"
            if doc["spec"].get("clusterIP") == "None":
                zone[full] = [pod.ip for pod in found]
                zone |= {f"{pod.name}.{full}": [pod.ip] for pod in found if pod.place.subdomain == full}
            else:
                zone[full] = [self.address(name)]
                self._ends[name] = tuple(pod.ip for pod in found)
        new = self.directory / "zone.new"
        new.write_text(json.dumps(zone))
        new.replace(self.directory / "zone.json")
        await self.sync()

    def _services(self) -> list[Doc]:
        return [doc for doc in self.manifests.docs if doc["kind"] == "Service"]

    def _endpoints(self, service: Doc) -> list[Pod]:
        """Who answers for a Service."""
        early = bool(service["spec"].get("publishNotReadyAddresses"))
        wanted = service["spec"]["selector"].items()
        pods = [pod for pod in self.pods.values() if wanted <= pod.labels.items()]
        return [pod for pod in pods if early or (pod.ready and not pod.terminating)]

    def address(self, service: str) -> str:
        """A Service's own address."""
        if service not in self._ips:
            self._ips[service] = f"{self.network.services}.{len(self._ips) + 1}"
        return self._ips[service]

    def _addresses(self) -> list[Address]:
        found = [Address(self._ips["kube-dns"], "UDP", 53, self._ends["kube-dns"])]
        for doc in self._services():
            name = doc["metadata"]["name"]
            if doc["spec"].get("clusterIP") == "None":
                continue
            for port in doc["spec"]["ports"]:
                found += [Address(self.address(name), "TCP", port["port"], self._ends.get(name, ()))]
        return found

    async def sync(self) -> None:
        """Gives each pod the rules that it is to have now."""
        async with self._syncing:
            policies = [doc for doc in self.manifests.docs if doc["kind"] == "NetworkPolicy"]
            hosts = {pod.ip: (pod.place.host, pod.end) for pod in self.pods.values()} | self._clients
            ends = {ip: end for ip, (_, end) in hosts.items()}
            addresses = self._addresses()
            for ip, (host, end) in hosts.items():
                text = pod_rules(policies, end, ends, addresses, self.network.node, self.network.services)
                if self._said.get(ip) != text:
                    self._said[ip] = text
                    await asyncio.to_thread(host.rules, text)
