# SPDX-License-Identifier: Apache-2.0
"""Hosts of one machine: network namespaces on a bridge.

No namespace has a name or a file. Each lives in a process that dies with the test's own, however that ends, and links, addresses,
rules and mounts go with their namespaces. This machine's own namespace gets one end of one link, which goes with its other end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

_WAIT_SECONDS: Final = 30.0
_TOOLS: Final = ("ip", "nft", "nsenter", "unshare", "setpriv", "chroot")


class NoNamespacesError(Exception):
    """Why this machine can't have them."""


def check_machine() -> None:
    """Raises NoNamespacesError where hosts can't be made."""
    lacking = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if lacking:
        raise NoNamespacesError(f"no {', '.join(lacking)}: apt-get install nftables iproute2 util-linux")
    if os.geteuid():
        raise NoNamespacesError("namespaces of networks are root's to make")
    try:
        with Network() as network:
            network.host("probe").rules("table inet probe { }")
    except (subprocess.CalledProcessError, TimeoutError) as error:
        raise NoNamespacesError(
            f"no network namespace to be had: {getattr(error, 'stderr', error)}"
        ) from error


def bound(*command: str) -> list[str]:
    """A command that is killed when its parent ends. The thread that starts it has to be the main one: it counts as the parent."""
    return ["setpriv", "--pdeathsig", "KILL", *command]


def call(*command: str, given: str = "") -> str:
    """Runs a command to its end; what it prints. Raises CalledProcessError."""
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=_WAIT_SECONDS, check=False
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr + given)
    return done.stdout


class Holder:
    """Keeps a network namespace, and a name and shared memory of a host, while it lives."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            bound("unshare", "--net", "--uts", "--ipc", "sleep", "infinity"), stdin=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _WAIT_SECONDS
        ours = os.readlink("/proc/self/ns/ipc")
        # unshare has made all of them once it has become what it runs.
        while self._runs() != "sleep" or os.readlink(f"/proc/{self.pid}/ns/ipc") == ours:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise TimeoutError("unshare gives no namespaces")
            time.sleep(0.002)

    @property
    def pid(self) -> int:
        """Of the process that holds it."""
        return self._process.pid

    def _runs(self) -> str:
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/comm") as file:
            return file.read().strip()
        return ""

    def inside(self, *command: str) -> list[str]:
        """A command, run in it with this machine's files."""
        spaces = [f"--{kind}=/proc/{self.pid}/ns/{kind}" for kind in ("net", "uts", "ipc")]
        return ["nsenter", *spaces, *command]

    def close(self) -> None:
        """Ends it. What runs in it has to be ended before."""
        self._process.kill()
        self._process.wait()


class Host:
    """A host on a network: an address, and rules of its own."""

    def __init__(self, network: Network, name: str, ip: str) -> None:
        self.name = name
        self.ip = ip
        self.holder = Holder()
        try:
            network.plug(self)
            self.sh(
                f"hostname {name}; echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; ip link set lo up;"
                # Else of many refusals only some are told, and the rest looks like silence.
                "echo 0 > /proc/sys/net/ipv4/icmp_ratelimit;"
                f"ip addr add {ip}/24 dev eth0; ip link set eth0 up; ip route add {network.services}.0/24 dev eth0"
            )
        except BaseException:
            self.holder.close()
            raise

    def sh(self, script: str) -> str:
        """Runs a script of the shell there, as root; what it prints."""
        return call(*self.holder.inside("sh", "-euc", script))

    def rules(self, text: str) -> None:
        """Gives nftables of this host a text, all of it or nothing."""
        call(*self.holder.inside("nft", "-f", "-"), given=text)

    def close(self) -> None:
        """Ends it."""
        self.holder.close()


class Network:
    """A bridge, to which hosts are plugged, and this machine as the node that they run on. Use as a context manager."""

    def __init__(self) -> None:
        # A range that is set aside for tests of networks (RFC 2544): no host of the internet has it. Test processes that run side
        # by side have networks of their own.
        taken = call("ip", "-o", "addr")
        numbers = (number % 250 for number in range(os.getpid(), os.getpid() + 250))
        number = next(one for one in numbers if f"198.18.{one}." not in taken)
        self.prefix = f"198.18.{number}"
        self.services = f"198.19.{number}"
        self.node = f"{self.prefix}.1"
        self._last = 1
        self._link = f"tp{os.getpid()}"
        self._hosts: list[Host] = []
        self._switch: Holder | None = None

    def __enter__(self) -> Self:
        self._switch = Holder()
        try:
            inside = f"--net=/proc/{self._switch.pid}/ns/net"
            call("nsenter", inside, "sh", "-euc", "ip link add bridge type bridge; ip link set bridge up")
            call(
                "ip",
                "link",
                "add",
                self._link,
                "type",
                "veth",
                "peer",
                "node",
                "netns",
                str(self._switch.pid),
            )
            call("nsenter", inside, "ip", "link", "set", "node", "master", "bridge", "up")
            call("ip", "addr", "add", f"{self.node}/24", "dev", self._link)
            call("ip", "link", "set", self._link, "up")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for host in self._hosts:
            host.close()
        self._hosts.clear()
        # The kernel takes its time for what goes with a namespace.
        subprocess.run(["ip", "link", "del", self._link], capture_output=True, check=False)
        if self._switch is not None:
            self._switch.close()
            self._switch = None

    def host(self, name: str) -> Host:
        """A new host, with an address that no other one has had."""
        self._last += 1
        assert self._last < 255, "no address is left"
        made = Host(self, name, f"{self.prefix}.{self._last}")
        self._hosts.append(made)
        return made

    def remove(self, host: Host) -> None:
        """Takes a host away; nothing answers at its address any more."""
        self._hosts.remove(host)
        host.close()

    def plug(self, host: Host) -> None:
        """Gives a host its end of a cable."""
        assert self._switch is not None
        port = f"port{self._last}"
        ends: Sequence[str] = ("eth0", "netns", str(host.holder.pid))
        inside = ("nsenter", f"--net=/proc/{self._switch.pid}/ns/net", "ip", "link")
        call(*inside, "add", port, "type", "veth", "peer", *ends)
        call(*inside, "set", port, "master", "bridge", "up")
