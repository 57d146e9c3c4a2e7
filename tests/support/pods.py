# SPDX-License-Identifier: Apache-2.0
"""Runs the pods of rendered manifests as processes of this machine.

A pod gets a loopback address of its own, so that the fixed ports of the chart are free; volumes become directories. What a
process is told keeps its form: only paths of mounts, the names of services and a pod's own 0.0.0.0 and 127.0.0.1 are replaced.
"""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from tests.support.chart import workloads
from tests.support.manifests import Doc, Files, Manifests

NAMESPACE: Final = "ns"
STOP_SECONDS: Final = 60.0
_ROOT: Final = os.environ.get("TWINPOOL_ROOTFS", "")
BINARIES: Final = f"{_ROOT}/opt/twinpool/bin:{_ROOT}/usr/bin" if _ROOT else str(Path(sys.executable).parent)
"""Of the installation that runs the tests, or of one that deploy/docker/rootfs.sh has built."""
_NUMBER: Final = os.getpid()
ADDRESSES: Final = tuple(f"127.{1 + (_NUMBER >> 8) % 254}.{_NUMBER % 256}.{last}" for last in range(1, 33))
"""Those of the pods; test processes that run side by side have others."""


@dataclass
class Pod:
    """A pod on a loopback address, and the processes of its containers by name. ``doc``: its workload; ``mounts``: directories by the
    paths in its containers."""

    name: str
    ip: str
    labels: Mapping[str, str]
    spec: Doc
    doc: Doc
    mounts: dict[str, Path]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict, init=False)

    @property
    def component(self) -> str:
        """The part that it plays."""
        return self.labels["app.kubernetes.io/component"]

    def container(self, name: str = "") -> Doc:
        """A container; the first one if it is not named."""
        found: list[Doc] = [*self.spec.get("initContainers", []), *self.spec["containers"]]
        return next(one for one in found if one["name"] == name) if name else self.spec["containers"][0]


class World:
    """The pods of a release: all of a StatefulSet, one of a Deployment. Use as a context manager: at its end nothing is left."""

    def __init__(self, docs: list[Doc], directory: Path, secrets: Mapping[str, Files]) -> None:
        """``secrets``: those that somebody else makes."""
        self.docs = docs
        self.directory = directory
        self._manifests = Manifests(docs, secrets)
        self.pods: dict[str, Pod] = {}
        for doc, template in workloads(docs):
            members = doc["spec"].get("replicas", 1) if doc["kind"] == "StatefulSet" else 1
            for number in range(members):
                self._add(doc, template, f"-{number}" if doc["kind"] == "StatefulSet" else "")
        self._hosts = self._names()
        for pod in self.pods.values():
            config = pod.mounts.get("/etc/twinpool/config", directory) / "config.yaml"
            if config.is_file():
                config.write_text(self.translate(pod, config.read_text()))

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods.values():
            for process in pod.processes.values():
                for child in (
                    psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
                ):
                    child.kill()
                process.kill()
                process.wait()

    def of(self, component: str) -> Pod:
        """The pod that plays a part."""
        (found,) = self.all_of(component)
        return found

    def all_of(self, component: str) -> list[Pod]:
        """The pods that play a part."""
        return [pod for pod in self.pods.values() if pod.component == component]

    def _add(self, doc: Doc, template: Doc, ending: str) -> None:
        name = doc["metadata"]["name"] + ending
        spec = template["spec"]
        home = self.directory / name
        sources = {volume["name"]: volume for volume in spec["volumes"]}
        mounts: dict[str, Path] = {}
        claims = [claim["metadata"]["name"] for claim in doc["spec"].get("volumeClaimTemplates", [])]
        for volume in (*sources, *claims):
            place = home / volume
            place.mkdir(parents=True)
            for file, content in self._manifests.content(sources.get(volume, {})).items():
                (place / file).write_bytes(content)
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            for mount in container.get("volumeMounts", []):
                mounts[mount["mountPath"]] = home / mount["name"]
        ip = ADDRESSES[len(self.pods)]
        self.pods[name] = Pod(name, ip, template["metadata"]["labels"], spec, doc, mounts)

    def set_secret(self, name: str, content: Files) -> None:
        """What processes that start from now on get of a Secret in their environment."""
        self._manifests.set_secret(name, content)

    def _names(self) -> dict[str, str]:
        """Names in DNS to addresses: of services, and of pods below them."""
        hosts = {}
        for doc in self.docs:
            if doc["kind"] != "Service":
                continue
            service = f"{doc['metadata']['name']}.{NAMESPACE}.svc"
            for pod in self.pods.values():
                if doc["spec"]["selector"].items() <= pod.labels.items():
                    hosts[f"{pod.name}.{service}"] = pod.ip
                    hosts[service] = pod.ip
        return hosts

    # --- what a process is told

    def translate(self, pod: Pod, text: str) -> str:
        """Paths and names as they are here."""
        for name in sorted(self._hosts, key=len, reverse=True):
            text = text.replace(name, self._hosts[name])
        text = re.sub(r"\b(0\.0\.0\.0|127\.0\.0\.1)\b", pod.ip, text)
        paths = "|".join(re.escape(path) for path in sorted(pod.mounts, key=len, reverse=True))
        return re.sub(rf"(?<![\w/.-])({paths})(?![\w.-])", lambda found: str(pod.mounts[found[1]]), text)

    def environment(self, pod: Pod, container: Doc) -> dict[str, str]:
        """The variables of a container, as Kubernetes makes them."""
        fields = {"metadata.name": pod.name, "status.podIP": pod.ip}
        base = {"PATH": f"{BINARIES}:{os.environ['PATH']}"}
        return self._manifests.environment(container, base, fields, lambda text: self.translate(pod, text))

    def command(self, pod: Pod, container: Doc) -> list[str]:
        """What a container runs; the image's own command is `twinpool`."""
        words = Manifests.command(container, self.environment(pod, container))
        return [self.translate(pod, word) for word in words]

    # --- life

    def start(self, pod: Pod, container: str = "") -> subprocess.Popen[bytes]:
        """Starts a container's process."""
        doc = pod.container(container)
        log = (self.directory / f"{pod.name}-{doc['name']}.log").open("ab")
        with log:
            process = subprocess.Popen(
                self.command(pod, doc),
                env=self.environment(pod, doc),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
            )
        pod.processes[doc["name"]] = process
        return process

    def run(self, pod: Pod, container: str = "", seconds: float = 120) -> None:
        """Runs a container to its end, which has to be a good one."""
        process = self.start(pod, container)
        code = process.wait(seconds)
        name = pod.container(container)["name"]
        assert code == 0, f"{pod.name} {name} ended with {code}\n{self.log(pod, name)}"

    def probe(self, pod: Pod, command: list[str]) -> bool:
        """A probe by command."""
        container = pod.container()
        words = [self.translate(pod, word) for word in command]
        env = self.environment(pod, container)
        return subprocess.run(words, env=env, capture_output=True, timeout=60, check=False).returncode == 0

    async def execute(self, pod: Pod, *command: str) -> str:
        """Runs a command in a pod's first container; what it prints."""
        env = self.environment(pod, pod.container())
        found = shutil.which(command[0], path=env["PATH"])
        assert found is not None
        process = await asyncio.create_subprocess_exec(
            found, *command[1:], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        said, complained = await process.communicate()
        assert process.returncode == 0, f"{command}: {process.returncode}\n{complained.decode()}"
        return said.decode()

    def stop(self, pod: Pod, container: str = "") -> int:
        """SIGTERM, as the kubelet sends it; the exit status."""
        process = pod.processes[pod.container(container)["name"]]
        process.send_signal(signal.SIGTERM)
        return process.wait(STOP_SECONDS)

    def log(self, pod: Pod, container: str = "") -> str:
        """The end of what a container has written."""
        path = self.directory / f"{pod.name}-{pod.container(container)['name']}.log"
        return path.read_text(errors="replace")[-3000:]

    # --- who talks to whom

    def connections(self) -> Iterator[tuple[Pod, Pod, int]]:
        """(source, target, port) of every connection between different pods that is open now."""
        listening: dict[tuple[str, int], Pod] = {}
        open_: list[tuple[Pod, tuple[str, int]]] = []
        for pod in self.pods.values():
            for process in _family(pod):
                for found in process.net_connections("tcp"):
                    if found.status == psutil.CONN_LISTEN:
                        listening[_address(found.laddr)] = pod
                    elif found.raddr:
                        open_.append((pod, _address(found.raddr)))
        for source, address in open_:
            target = listening.get(address)
            if target is not None and target is not source:
                yield source, target, address[1]


def _address(found: Any) -> tuple[str, int]:
    """Sockets of both families of addresses show IPv4 ones in a form of their own."""
    return found.ip.removeprefix("::ffff:"), found.port


def _family(pod: Pod) -> Iterator[psutil.Process]:
    for process in pod.processes.values():
        if process.poll() is None:
            root = psutil.Process(process.pid)
            yield from [root, *root.children(recursive=True)]
