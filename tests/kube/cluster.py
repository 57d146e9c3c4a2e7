# SPDX-License-Identifier: Apache-2.0
"""A cluster of Kubernetes with two nodes in namespaces of its own: ``python -m tests.kube.cluster BINARIES IMAGE.tar...`` keeps one.

BINARIES is a directory with kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kube-proxy, containerd, its shim, ctr and
etcd. An image is an archive as ``docker save`` and ``buildah push docker-archive:`` write it; one called localhost/pause:0 has to be
among them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, Self

from tests.kube.node import START_SECONDS, cgroup, hierarchies

ROOT: Final = Path(__file__).parents[2]


class Cluster:
    """Starts the nodes' processes and ends them. They share a network of their own, which this machine reaches by one link."""

    def __init__(self, binaries: Path, images: list[Path], work: Path, nodes: int = 2) -> None:
        self.binaries, self.work = binaries, work
        self.name = f"tpk{secrets.token_hex(4)}"
        net = f"10.98.{secrets.randbelow(250)}"
        self.outside, self.addresses = f"{net}.1", [f"{net}.{2 + number}" for number in range(nodes)]
        (work / "images").mkdir(parents=True)
        for image in images:
            (work / "images" / image.name).symlink_to(image.resolve())
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def kubeconfig(self) -> Path:
        """For kubectl and helm."""
        return self.work / "node-0" / "kubeconfig"

    def space(self, number: int) -> str:
        """The network namespace of a node."""
        return f"{self.name}-{number}"

    def __enter__(self) -> Self:
        try:
            self._wire()
            for number in range(len(self.addresses)):
                self._start(number)
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wire(self) -> None:
        """A bridge in a namespace of its own, with the nodes and this machine on it."""
        commands = [
            f"netns add {self.name}",
            f"-n {self.name} link add switch type bridge",
            f"-n {self.name} link set switch up",
            f"link add {self.name} type veth peer name uplink netns {self.name}",
            f"-n {self.name} link set uplink master switch up",
            f"address add {self.outside}/24 dev {self.name}",
            f"link set {self.name} up",
        ]
        for number, address in enumerate(self.addresses):
            space = self.space(number)
            commands += [
                f"netns add {space}",
                f"-n {space} link add eth0 type veth peer name node{number} netns {self.name}",
                f"-n {self.name} link set node{number} master switch up",
                f"-n {space} address add {address}/24 dev eth0",
                f"-n {space} link set lo up",
                f"-n {space} link set eth0 up",
                f"-n {space} route add default via {self.outside}",
            ]
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)

    def _start(self, number: int) -> None:
        work = self.work / f"node-{number}"
        work.mkdir()
        python = [
            sys.executable,
            "-m",
            "tests.kube.node",
            str(work),
            str(self.binaries),
            str(number),
            *self.addresses,
        ]
        # Not by `ip netns exec`, which hides the control groups.
        spaces = [
            f"--net=/run/netns/{self.space(number)}",
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        with (work / "node.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    ["nsenter", *spaces, *python], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
                )
            )

    def _wait(self) -> None:
        end = time.monotonic() + 3 * START_SECONDS
        for number, process in enumerate(self.processes):
            work = self.work / f"node-{number}"
            while not (work / "ready").exists():
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the node did not start: {(work / 'node.log').read_text()[-2000:]}")
                time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
        for number in range(len(self.addresses)):
            subprocess.run(["ip", "netns", "delete", self.space(number)], check=False)
            work = self.work / f"node-{number}"
            for hierarchy in hierarchies():
                for path, _directories, _files in os.walk(hierarchy / cgroup(work), topdown=False):
                    with contextlib.suppress(OSError):
                        Path(path).rmdir()
            # The logs stay.
            shutil.rmtree(work / "containerd", ignore_errors=True)
            shutil.rmtree(work / "kubelet", ignore_errors=True)
        subprocess.run(["ip", "netns", "delete", self.name], check=False)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    directory = Path(tempfile.mkdtemp(prefix="kube-"))
    with Cluster(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]], directory) as cluster:
        print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
        # Either ends it in order.
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
