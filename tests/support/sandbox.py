# SPDX-License-Identifier: Apache-2.0
"""Containers without a container engine: a process with a root file system, mounts and process ids of its own, on a host of netns.py.

Its root lies over this machine's own (and over ``TWINPOOL_ROOTFS``, if deploy/docker/rootfs.sh has made one), and is read-only. With
``TWINPOOL_IMAGE_ROOT`` it lies over that directory alone: the root file system of an image. Mounts are seen by it alone, and end with it.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.support.chart import ROOT
from tests.support.netns import Host, bound
from tests.support.pods import BINARIES

_ROOTFS: Final = os.environ.get("TWINPOOL_ROOTFS", "")
IMAGE: Final = os.environ.get("TWINPOOL_IMAGE_ROOT", "")
"""The root file system of an image that containers have; empty: they have this machine's."""
_SYSTEM_PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_START_SECONDS: Final = 30.0


def image_environment() -> dict[str, str]:
    """What the Dockerfile sets, with the PATH of the installation that is used here."""
    text = (ROOT / "deploy" / "docker" / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    lines = re.findall(r"^ENV (.+)$", text, re.MULTILINE)
    given = dict(word.split("=", 1) for line in lines for word in str(line).split())
    own = given["PATH"].removesuffix(":$PATH") if IMAGE else BINARIES
    return given | {"PATH": f"{own}:{_SYSTEM_PATH}"}


@dataclass(frozen=True)
class Mount:
    """A directory of this machine at a path of the container."""

    source: Path
    path: str
    read_only: bool = False


class Processes:
    """A namespace of process ids for several containers of a pod, with a process that keeps it."""

    def __init__(self, host: Host) -> None:
        spaces = ("--pid", "--fork", "--kill-child=KILL")
        inside = host.holder.inside("unshare", *spaces, "sleep", "infinity")
        self._process = subprocess.Popen(bound(*inside), stdin=subprocess.DEVNULL)
        self._pid = 0

    @property
    def pid(self) -> int:
        """Of its first process."""
        self._pid = self._pid or _first_child(self._process, "sleep infinity")
        return self._pid

    def close(self) -> None:
        """Ends all that runs in it."""
        self._process.kill()
        self._process.wait()


def _first_child(process: subprocess.Popen[bytes], what: str) -> int:
    """Of a process that makes one, its id. Raises TimeoutError if it does not come."""
    deadline = time.monotonic() + _START_SECONDS
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while True:
        found = children.read_text().split() if children.exists() else []
        if found:
            return int(found[0])
        if process.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError(f"{what} has not come up")
        time.sleep(0.002)


@dataclass
class Sandbox:
    """A container. ``directory``: empty, for what it needs here; ``user``: its user and group."""

    host: Host
    directory: Path
    command: Sequence[str]
    env: Mapping[str, str]
    mounts: Sequence[Mount] = ()
    user: int = 10001
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts at paths that the root has: /etc/hosts and the like."""
    shared_memory: str = "64m"
    processes: Processes | None = None
    """Those that it sees, where they are not its own alone."""

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0

    @property
    def log(self) -> Path:
        """What it has written."""
        return self.directory / "log"

    def tail(self) -> str:
        """The end of that."""
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def start(self) -> None:
        """Starts it. To be called on the main thread, see ``bound``."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._pid = 0
        script = self.directory / "start.sh"
        script.write_text(self._script())
        start = ("sh", "-eu", str(script), *self.command)
        if self.processes is None:
            spaces = ("--mount", "--pid", "--fork", "--kill-child=KILL")
            inside = self.host.holder.inside("unshare", *spaces, *start)
        else:
            shared = f"--pid=/proc/{self.processes.pid}/ns/pid"
            inside = self.host.holder.inside("nsenter", shared, "unshare", "--mount", *start)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                bound(*inside),
                env=dict(self.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
            )

    def _script(self) -> str:
        """Makes its root, then becomes its command."""
        base = self.directory / "base"
        base.mkdir(exist_ok=True)
        root = f"{base}/root"
        lower = IMAGE or ":".join(filter(None, (_ROOTFS, "/")))
        lines = [
            "umask 022",
            "mount --make-rprivate /",
            f"mount -t tmpfs -o mode=755 tmpfs {base}",
            f"mkdir {base}/upper {base}/work {root}",
            f"mount -t overlay -o lowerdir={lower},upperdir={base}/upper,workdir={base}/work overlay {root}",
            f"mount -t proc proc {root}/proc",
            f"mount -t sysfs -o ro sysfs {root}/sys",
            f"mount -t tmpfs -o mode=755 tmpfs {root}/dev",
            f"mount -t tmpfs -o mode=755 tmpfs {root}/tmp",
            f"for one in null zero full random urandom; do : > {root}/dev/$one; mount --bind /dev/$one {root}/dev/$one; done",
            f"mkdir -m 1777 {root}/dev/shm",
            f"mount -t tmpfs -o size={self.shared_memory},mode=1777 tmpfs {root}/dev/shm",
            f"ln -s /proc/self/fd {root}/dev/fd; ln -s fd/1 {root}/dev/stdout; ln -s fd/2 {root}/dev/stderr",
        ]
        for number, (path, text) in enumerate(self.files.items()):
            file = self.directory / f"file-{number}"
            file.write_text(text)
            lines += [f": >> {root}{path}; mount --bind {file} {root}{path}"]
        lines += [self._bind(root, mount) for mount in sorted(self.mounts, key=lambda one: len(one.path))]
        lines += [] if IMAGE else self._ours(root)
        lines += [f"mount -o remount,ro {root}"]
        drop = "--no-new-privs --bounding-set=-all --inh-caps=-all" if self.user else ""
        identity = f"--reuid {self.user} --regid {self.user} --clear-groups {drop}"
        become = 'cd /tmp; exec "$@"'
        lines += [f"exec chroot {root} setpriv {identity} --pdeathsig KILL sh -c '{become}' sh \"$@\""]
        return "\n".join(lines) + "\n"

    def _ours(self, root: str) -> list[str]:
        """What runs without an image: the sources and the installation that runs the tests, where volumes hide them."""
        kept = dict.fromkeys((str(ROOT), str(Path(sys.prefix))))
        lines = [self._bind(root, Mount(Path(each), each, read_only=True)) for each in kept]
        # Where the interpreter lies in the home of whoever runs the tests.
        places = [str(place) for place in Path(sys.executable).resolve().parents if str(place) != "/"]
        return [*lines, f"chmod o+x {' '.join(f'{root}{place}' for place in places)}"]

    @staticmethod
    def _bind(root: str, mount: Mount) -> str:
        target = f"{root}{mount.path}"
        text = f"mkdir -p {target}; mount --bind {shlex.quote(str(mount.source))} {target}"
        return text + (f"; mount -o remount,bind,ro {target}" if mount.read_only else "")

    # --- its life

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def code(self) -> int | None:
        """How it ended; negative: by a signal."""
        return self._process.poll() if self._process is not None else None

    @property
    def pid(self) -> int:
        """Of its first process. Raises TimeoutError if it does not come."""
        if not self._pid:
            assert self._process is not None
            self._pid = _first_child(self._process, f"{self.command}: {self.tail()}")
        return self._pid

    async def ended(self) -> int:
        """Waits for its end; how it ended."""
        while self.running:  # noqa: ASYNC110 - a child that is waited for by nobody else
            await asyncio.sleep(0.02)
        assert self.code is not None
        return self.code

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to its first process."""
        if self.running:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it and all that runs in it, at once."""
        if self._process is not None:
            # Its first process dies with the one that waits for it, and all others with that.
            self._process.kill()
            self._process.wait()

    def into(self, *command: str) -> list[str]:
        """A command that runs in it, as its user."""
        identity = ["--reuid", str(self.user), "--regid", str(self.user), "--clear-groups"]
        spaces = ("--mount", "--pid", "--net", "--uts", "--ipc", "--root", "--wdns=/")
        here = ("sh", "-c", 'cd /tmp; exec "$@"', "sh")
        return ["nsenter", f"--target={self.pid}", *spaces, "setpriv", *identity, *here, *command]

    async def execute(self, *command: str, seconds: float = 120.0) -> tuple[int, str]:
        """Runs a command in it; its exit status and what it wrote. 124: it took longer."""
        process = await asyncio.create_subprocess_exec(
            *self.into(*command),
            env=dict(self.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), seconds)
        except TimeoutError:
            process.kill()
            await process.wait()
            return 124, ""
        return process.returncode or 0, said.decode(errors="replace")
