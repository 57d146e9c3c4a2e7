# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine: each a network namespace with a link of its own to this one, which forwards between them.

Links between two hosts can be cut (their packets are dropped silently, as by a dead switch) and delayed (their packets take the
way through a TUN device whose reader holds each of them back; the kernel needs no netem). A host can be cut off from everyone.
Needs root and a few features of the kernel; ``usable`` tells.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_PACKET_BYTES = 65536
_CUT_PREFERENCE, _DELAY_PREFERENCE = 100, 200
_BASES = range(64, 128)
_PREFIX = "twinpool"


def _do(*command: str) -> None:
    """Runs ``ip`` or ``tc``. Raises RuntimeError with what it says."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread, and the threads it starts meanwhile, are in the network of ``namespace``; "" changes nothing."""
    if not namespace:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open() as own, Path(f"/run/netns/{namespace}").open() as other:
        _enter(libc, other.fileno())
        try:
            yield
        finally:
            _enter(libc, own.fileno())


def _enter(libc: ctypes.CDLL, descriptor: int) -> None:
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")


class DelayLine:
    """A TUN device: what is routed into it comes out again ``seconds`` later, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds = 0.0
        self._file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        try:
            fcntl.ioctl(self._file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
            _do("ip", "link", "set", name, "up")
            _forward(name)
        except BaseException:
            os.close(self._file)
            raise
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._run, name="delay-line", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; the device goes with its file."""
        os.write(self._stopped, b"x")
        self._thread.join()
        for descriptor in (self._file, self._stop, self._stopped):
            os.close(descriptor)

    def _run(self) -> None:
        held: list[tuple[float, int, bytes]] = []
        numbers = itertools.count()
        while True:
            wait = max(0.0, held[0][0] - time.monotonic()) if held else None
            ready, _, _ = select.select([self._file, self._stop], [], [], wait)
            if self._stop in ready:
                return
            if self._file in ready:
                with contextlib.suppress(BlockingIOError):
                    packet = os.read(self._file, _PACKET_BYTES)
                    heapq.heappush(held, (time.monotonic() + self.seconds, next(numbers), packet))
            while held and held[0][0] <= time.monotonic():
                # A full queue drops a packet, as a network does.
                with contextlib.suppress(BlockingIOError):
                    os.write(self._file, heapq.heappop(held)[2])


class Network:
    """Hosts by name. Every change is idempotent, and ``heal`` undoes all of them."""

    def __init__(self, hosts: list[str]) -> None:
        """Raises RuntimeError or OSError where the machine does not let us; nothing is left then."""
        self._hosts = {name: number for number, name in enumerate(hosts, start=1)}
        self._base = 0
        self._delay: DelayLine | None = None
        self._rules: set[tuple[str, ...]] = set()
        self._mute: set[str] = set()
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    # --- names

    def namespace(self, host: str) -> str:
        return f"{_PREFIX}-{os.getpid()}-{self._base}-{host}"

    def address(self, host: str) -> str:
        return f"10.{self._base}.{self._hosts[host]}.2"

    @property
    def gateway(self) -> str:
        """An address of this machine that every host reaches."""
        return f"10.{self._base}.1.1"

    def _link(self, host: str) -> str:
        return f"tp{self._base}h{self._hosts[host]}"

    # --- faults

    def cut(self, one: str, other: str) -> None:
        """The two hear nothing of one another."""
        for source, target in ((one, other), (other, one)):
            self._add("from", self.address(source), "to", self.address(target), "blackhole")

    def delay(self, one: str, other: str, seconds: float) -> None:
        """Packets between the two take so long each way; all delayed links share the latest time."""
        assert self._delay is not None
        self._delay.seconds = seconds
        for source, target in ((one, other), (other, one)):
            self._add("iif", self._link(source), "to", self.address(target), "lookup", str(self._table))

    def mend(self, one: str, other: str) -> None:
        """Undoes ``cut`` and ``delay``."""
        ends = {self.address(one), self.address(other)}
        links = {self._link(one), self._link(other)}
        for rule in list(self._rules):
            if rule[3] in ends and (rule[1] in ends or rule[1] in links):
                self._remove(rule)

    def isolate(self, host: str) -> None:
        """The host hears nothing of anyone, this machine included."""
        self._mute.add(host)
        for prefix, device in self._ends(host):
            _do(*prefix, "tc", "qdisc", "replace", "dev", device, "root", "blackhole")

    def rejoin(self, host: str) -> None:
        """Undoes ``isolate``."""
        self._mute.discard(host)
        for prefix, device in self._ends(host):
            _do(*prefix, "tc", "qdisc", "replace", "dev", device, "root", "pfifo")

    def heal(self) -> None:
        """All links work."""
        for rule in list(self._rules):
            self._remove(rule)
        for host in list(self._mute):
            self.rejoin(host)

    def close(self) -> None:
        """Removes everything."""
        if not self._base:
            return
        with contextlib.suppress(RuntimeError):
            self.heal()
        for host in self._hosts:
            # A namespace lives as long as a socket in it; the link is to be gone at once.
            for command in (
                ("ip", "link", "del", self._link(host)),
                ("ip", "netns", "del", self.namespace(host)),
            ):
                with contextlib.suppress(RuntimeError):
                    _do(*command)
        if self._delay is not None:
            self._delay.close()
        with contextlib.suppress(RuntimeError):
            _do("ip", "route", "del", "blackhole", f"10.{self._base}.0.0/16")
        self._base = 0

    # --- inside

    @property
    def _table(self) -> int:
        return 10_000 + self._base

    def _ends(self, host: str) -> list[tuple[list[str], str]]:
        return [([], self._link(host)), (["ip", "netns", "exec", self.namespace(host)], "eth0")]

    def _add(self, *rule: str) -> None:
        if rule not in self._rules:
            _do("ip", "rule", "add", *rule, "pref", self._preference(rule))
            self._rules.add(rule)

    def _remove(self, rule: tuple[str, ...]) -> None:
        _do("ip", "rule", "del", *rule, "pref", self._preference(rule))
        self._rules.discard(rule)

    @staticmethod
    def _preference(rule: tuple[str, ...]) -> str:
        return str(_CUT_PREFERENCE if rule[-1] == "blackhole" else _DELAY_PREFERENCE)

    def _build(self) -> None:
        self._base = self._claim()
        for host in self._hosts:
            namespace, link = self.namespace(host), self._link(host)
            own = f"10.{self._base}.{self._hosts[host]}.1"
            _do("ip", "netns", "add", namespace)
            _do("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _do("ip", "addr", "add", f"{own}/24", "dev", link)
            _do("ip", "link", "set", link, "up")
            _do("ip", "-n", namespace, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _do("ip", "-n", namespace, "link", "set", "eth0", "up")
            _do("ip", "-n", namespace, "link", "set", "lo", "up")
            _do("ip", "-n", namespace, "route", "add", "default", "via", own)
            _forward(link)
        self._delay = DelayLine(f"tp{self._base}delay")
        _do("ip", "route", "add", "default", "dev", self._delay.name, "table", str(self._table))

    @staticmethod
    def _claim() -> int:
        """A second byte that nobody uses: the route that claims it can be made once."""
        _sweep()
        error: RuntimeError | None = None
        for base in _BASES:
            try:
                _do("ip", "route", "add", "blackhole", f"10.{base}.0.0/16")
            except RuntimeError as failed:
                error = failed
            else:
                return base
        assert error is not None
        raise error


def _sweep() -> None:
    """Removes what runs that were killed have left: their namespaces name processes that are gone."""
    for entry in Path("/run/netns").glob(f"{_PREFIX}-*-*-*"):
        _, process, base, _ = entry.name.split("-", 3)
        if Path(f"/proc/{process}").exists():
            continue
        # The veth goes with its other end, unless a process that is still in there keeps that alive.
        for command in (
            ("ip", "netns", "del", entry.name),
            ("ip", "route", "del", "blackhole", f"10.{base}.0.0/16"),
        ):
            with contextlib.suppress(RuntimeError):
                _do(*command)


def _forward(device: str) -> None:
    """Packets of this device may go on to others, whatever the way back is."""
    for name, value in (("forwarding", "1"), ("rp_filter", "0")):
        Path(f"/proc/sys/net/ipv4/conf/{device}/{name}").write_text(value)


def usable() -> str:
    """Why this machine cannot do it; "" if it can."""
    try:
        network = Network(["a", "b"])
        try:
            network.cut("a", "b")
            network.delay("a", "b", 0.01)
            network.isolate("a")
        finally:
            network.close()
    except (RuntimeError, OSError) as error:
        return str(error)
    return ""
