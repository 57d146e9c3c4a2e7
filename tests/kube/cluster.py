# SPDX-License-Identifier: Apache-2.0
"""A cluster of Kubernetes with two nodes in namespaces of its own: ``python -m tests.kube.cluster BINARIES IMAGE.tar...`` keeps one.

BINARIES is a directory with kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kube-proxy, containerd, its shim, ctr and
etcd. An image is an archive as ``docker save`` and ``buildah push docker-archive:`` write it; one called localhost/pause:0 has to be
among them.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from tests.kube.node import START_SECONDS, remove_cgroups
from tests.support.netns import Host, Network, bound
from tests.support.waiting import until_sync

ROOT: Final = Path(__file__).parents[2]
NODES: Final = 2


class Cluster:
    """Starts the nodes' processes and ends them. All of it ends with this process, too."""

    def __init__(self, binaries: Path, images: list[Path], work: Path) -> None:
        self.binaries, self.work = binaries, work
        (work / "images").mkdir(parents=True)
        for image in images:
            (work / "images" / image.name).symlink_to(image.resolve())
        self.network = Network()
        self.hosts: list[Host] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def kubeconfig(self) -> Path:
        """For kubectl and helm."""
        return self.place(0) / "kubeconfig"

    def place(self, number: int) -> Path:
        """The files of a node."""
        return self.work / f"node-{number}"

    def inside(self, *command: str) -> list[str]:
        """A command on the first node's network, from where Services and pods are reached."""
        return self.hosts[0].holder.inside(*command)

    def __enter__(self) -> Self:
        # Of tests that were killed; those of a node that runs stay.
        remove_cgroups()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.network)
            stack.callback(self._end)
            self.hosts = [self.network.host(f"node-{number}") for number in range(NODES)]
            for number in range(NODES):
                self._start(number)
            self._wait()
            self._stack = stack.pop_all()
        return self

    def _start(self, number: int) -> None:
        self.place(number).mkdir()
        python = [
            sys.executable,
            "-m",
            "tests.kube.node",
            str(self.place(number)),
            str(self.binaries),
            str(number),
        ]
        spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = bound(
            *self.hosts[number].holder.inside(*spaces, *python, *(host.ip for host in self.hosts))
        )
        with (self.place(number) / "node.log").open("wb") as log:
            self.processes.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))

    def _wait(self) -> None:
        for number, process in enumerate(self.processes):
            ready, ended = self.place(number) / "ready", process.poll

            def told(ready: Path = ready, ended: Callable[[], int | None] = ended) -> bool:
                return ready.exists() or ended() is not None

            with contextlib.suppress(TimeoutError):
                until_sync(told, 3 * START_SECONDS)
            if not ready.exists():
                log = (self.place(number) / "node.log").read_text()[-2000:]
                raise RuntimeError(f"node {number} did not start: {log}")

    def _end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        remove_cgroups()
        for number in range(NODES):
            # The logs stay.
            for name in ("containerd", "kubelet"):
                shutil.rmtree(self.place(number) / name, ignore_errors=True)

    def __exit__(self, *_: object) -> None:
        self._stack.close()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    directory = Path(tempfile.mkdtemp(prefix="kube-"))
    with Cluster(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]], directory) as cluster:
        print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
        # Either ends it in order.
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
