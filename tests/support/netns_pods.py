# SPDX-License-Identifier: Apache-2.0
"""Runs pods in network and mount namespaces of this machine: each has an address, a file system and a /dev/shm of its own.

Nothing of what a process is told is replaced: mounts lie where the manifest says, services have their names, ports are the chart's.
For root, on Linux. A pod's root file system is this machine's, or with TWINPOOL_IMAGE_ROOT=DIRECTORY that of an image, which is
read-only then, and its user is the pod's.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from tests.support.chart import ROOT, workloads
from tests.support.kuberay import head_service
from tests.support.manifests import Manifests
from tests.support.pods import STOP_SECONDS, PodBase

Doc = dict[str, Any]
NAMESPACE: Final = "ns"
_IMAGE: Final = os.environ.get("TWINPOOL_IMAGE_ROOT", "")
_BINARIES: Final = "/opt/twinpool/bin" if _IMAGE else str(Path(sys.executable).parent)
# Of this process, so that tests that run side by side meet neither by name nor by address.
_MARK: Final = f"{os.getpid() % 0xFFFF:x}"
_NET: Final = f"10.{128 + (os.getpid() >> 8) % 127}.{os.getpid() % 256}"
_ROOT_SCRIPT: Final = """
set -e
root=$1
mount -t tmpfs tmpfs "$root"
for each in /*; do
  case $each in /tmp|/etc|/dev) continue;; esac
  if [ -L "$each" ]; then cp -P "$each" "$root$each"; elif [ -d "$each" ]; then mkdir "$root$each"; mount --rbind "$each" "$root$each"; fi
done
mkdir "$root/etc" "$root/tmp" "$root/dev"
cp -a /etc/. "$root/etc/"
mount --rbind /dev "$root/dev"
"""
_IMAGE_SCRIPT: Final = """
set -e
root=$1
mount -t tmpfs tmpfs "$root"
mkdir "$root/upper" "$root/work" "$root/merged"
mount -t overlay overlay -o "lowerdir=$TWINPOOL_IMAGE_ROOT,upperdir=$root/upper,workdir=$root/work" "$root/merged"
root=$root/merged
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
"""


def usable() -> str:
    """Why there can be no namespaces here; empty: there can."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in ("ip", "mount", "chroot"):
        if shutil.which(tool) is None:
            return f"no {tool}"
    name = f"tp{_MARK}x"
    found = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if found.returncode:
        return f"no network namespaces: {found.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return ""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@dataclass
class NetPod(PodBase):
    """One with a network namespace, ``net``. ``volumes``: directories by the names of volumes."""

    net: str
    volumes: dict[str, Path]


class NetWorld:
    """The pods of a release. Use as a context manager: at its end neither process nor namespace is left."""

    def __init__(self, docs: list[Doc], directory: Path) -> None:
        """``docs``: workloads of Kubernetes; those of operators as pods already."""
        self.docs = docs
        self._manifests = Manifests(docs, {})
        self.directory = directory
        self.pods: dict[str, NetPod] = {}
        self._bridge = f"tp{_MARK}b"

    def __enter__(self) -> "NetWorld":
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{_NET}.1/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        for doc, template in workloads(self.docs):
            if doc["kind"] == "RayGroup":
                continue
            self._add(doc["metadata"]["name"] + ("-0" if doc["kind"] == "StatefulSet" else ""), template)
        (self.directory / "hosts").write_text(self._hosts())

    def __exit__(self, *_: object) -> None:
        for pod in self.pods.values():
            self.kill(pod)
            # The kernel takes away a namespace, and what is in it, when it likes.
            _run("ip", "link", "del", f"{pod.net}h")
            _run("ip", "netns", "del", pod.net)
            for path in pod.volumes.values():
                if path.is_relative_to("/dev/shm"):
                    shutil.rmtree(path, ignore_errors=True)
        _run("ip", "link", "del", self._bridge)

    def of(self, component: str) -> NetPod:
        """The pod that plays a part."""
        (found,) = self.all_of(component)
        return found

    def all_of(self, component: str) -> list[NetPod]:
        """The pods that play a part."""
        return [pod for pod in self.pods.values() if pod.component == component]

    def _add(self, name: str, template: Doc) -> None:
        number = len(self.pods) + 2
        net = f"tp{_MARK}n{number}"
        _run("ip", "netns", "add", net)
        _run("ip", "link", "add", f"{net}h", "type", "veth", "peer", "name", "e0", "netns", net)
        _run("ip", "link", "set", f"{net}h", "master", self._bridge, "up")
        _run("ip", "-n", net, "addr", "add", f"{_NET}.{number}/24", "dev", "e0")
        for link in ("e0", "lo"):
            _run("ip", "-n", net, "link", "set", link, "up")
        volumes = {}
        for volume in template["spec"]["volumes"]:
            in_memory = volume.get("emptyDir", {}).get("medium") == "Memory"
            place = Path("/dev/shm") / f"{net}-{volume['name']}" if in_memory else self.directory / name / volume["name"]  # fmt: skip
            place.mkdir(parents=True)
            for file, content in self._manifests.content(volume).items():
                (place / file).write_bytes(content)
            if _IMAGE:
                group = template["spec"]["securityContext"]["fsGroup"]
                for path in (place, *place.iterdir()):
                    os.chown(path, group, group)
            volumes[volume["name"]] = place
        labels = template["metadata"]["labels"]
        self.pods[name] = NetPod(name, f"{_NET}.{number}", labels, template["spec"], net, volumes)

    def _hosts(self) -> str:
        lines = ["127.0.0.1 localhost"]
        for doc in self.docs:
            if doc["kind"] == "RayCluster":
                (head,) = self.all_of("ray")
                lines.append(f"{head.ip} {head_service(doc)}.{NAMESPACE}.svc.cluster.local")
            if doc["kind"] != "Service":
                continue
            service = f"{doc['metadata']['name']}.{NAMESPACE}.svc"
            for pod in self.pods.values():
                if doc["spec"]["selector"].items() <= pod.labels.items():
                    lines.append(f"{pod.ip} {service} {pod.name}.{service}")
        return "\n".join(lines) + "\n"

    # --- what a process is told

    def environment(self, pod: NetPod, container: Doc) -> dict[str, str]:
        """The variables of a container, as Kubernetes makes them."""
        fields = {"metadata.name": pod.name, "status.podIP": pod.ip}
        base = {"PATH": f"{_BINARIES}:{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
        return self._manifests.environment(container, base, fields)

    def _inside(self, pod: NetPod, container: Doc, words: list[str]) -> list[str]:
        """The command that runs ``words`` in the namespaces and the file system of a container."""
        script = [_IMAGE_SCRIPT if _IMAGE else _ROOT_SCRIPT, f'cp {self.directory}/hosts "$root/etc/hosts"']
        mounts = sorted(container.get("volumeMounts", []), key=lambda mount: mount["mountPath"])
        for mount in mounts:
            target = f'"$root{mount["mountPath"]}"'
            script.append(f"mkdir -p {target}; mount --bind {pod.volumes[mount['name']]} {target}")
            if mount.get("readOnly"):
                script.append(f"mount -o remount,bind,ro {target}")
        if not _IMAGE and ROOT.is_relative_to("/tmp"):
            # A working tree below a directory that pods have of their own.
            script.append(f'mkdir -p "$root{ROOT}"; mount --rbind {ROOT} "$root{ROOT}"')
        user = ""
        if _IMAGE:
            script.append('mount -o remount,ro "$root"')
            security = pod.spec["securityContext"]
            user = (
                f"--userspec={security['runAsUser']}:{security['runAsGroup']} --groups={security['fsGroup']}"
            )
        script.append(f'shift; cd "$root"; exec env -u TWINPOOL_IMAGE_ROOT chroot {user} "$root" "$@"')
        root = self.directory / "roots" / f"{pod.name}-{container['name']}"
        root.mkdir(parents=True, exist_ok=True)
        shell = ["/bin/sh", "-c", "\n".join(script), "sh", str(root)]
        return ["ip", "netns", "exec", pod.net, *shell, *words]

    def command(self, pod: NetPod, container: Doc) -> list[str]:
        """What a container runs; the image's own command is `twinpool`."""
        env = self.environment(pod, container)
        words = [*container.get("command", ["twinpool"]), *container.get("args", [])]
        return [re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), word) for word in words]

    # --- life

    def start(self, pod: NetPod, container: str = "") -> subprocess.Popen[bytes]:
        """Starts a container's process."""
        doc = pod.container(container)
        with (self.directory / f"{pod.name}-{doc['name']}.log").open("ab") as log:
            process = subprocess.Popen(
                self._inside(pod, doc, self.command(pod, doc)),
                env=self.environment(pod, doc) | ({"TWINPOOL_IMAGE_ROOT": _IMAGE} if _IMAGE else {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        pod.processes[doc["name"]] = process
        return process

    def execute(self, pod: NetPod, *command: str, container: str = "", seconds: float = 240) -> str:
        """Runs a command in a container, as `kubectl exec` and hooks do; what it prints."""
        doc = pod.container(container)
        done = subprocess.run(
            self._inside(pod, doc, list(command)),
            env=self.environment(pod, doc) | ({"TWINPOOL_IMAGE_ROOT": _IMAGE} if _IMAGE else {}),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"  # fmt: skip
        return done.stdout

    def stop(self, pod: NetPod, container: str = "") -> int:
        """SIGTERM, as the kubelet sends it; the exit status."""
        process = pod.processes[pod.container(container)["name"]]
        process.send_signal(signal.SIGTERM)
        return process.wait(STOP_SECONDS)

    def kill(self, pod: NetPod) -> None:
        """Ends all that is left in a pod."""
        for number in _run("ip", "netns", "pids", pod.net).split():
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(int(number)).kill()
        for process in pod.processes.values():
            process.wait()
        pod.processes.clear()

    def log(self, pod: NetPod, container: str = "") -> str:
        """What a container has written."""
        path = self.directory / f"{pod.name}-{pod.container(container)['name']}.log"
        return path.read_text(errors="replace")

    # --- who talks to whom

    def connections(self) -> Iterator[tuple[NetPod, NetPod, int]]:
        """(source, target, port) of every connection between different pods that is open now; who listens is its target."""
        address = {pod.ip: pod for pod in self.pods.values()}
        listening: set[tuple[str, int]] = set()
        open_: list[tuple[NetPod, str, int]] = []
        for pod in self.pods.values():
            for line in _run("ip", "netns", "exec", pod.net, "ss", "-Htna").splitlines():
                state, _, _, own, peer = line.split()[:5]
                host, _, port = own.rpartition(":")
                if state == "LISTEN":
                    listening.add((pod.ip, int(port)))
                elif state == "ESTAB":
                    host, _, port = peer.rpartition(":")
                    host = host.strip("[]").removeprefix("::ffff:")
                    if host in address and host != pod.ip:
                        open_.append((pod, host, int(port)))
        for pod, host, number in open_:
            if (host, number) in listening:
                yield pod, address[host], number
