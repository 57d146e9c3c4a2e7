# SPDX-License-Identifier: Apache-2.0
"""Ports that the configuration names, or the caller: whether each can be bound, and who has it if not."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Iterator
from typing import Final

import psutil

from twinpool.config import TwinpoolConfig
from twinpool.control.doctor.finding import Finding, failed, ok

KEYS: Final = (
    ("router.port", "router", "host"),
    ("router.http_port", "router", "host"),
    ("worker.port", "worker", "host"),
    ("control.port", "control", "host"),
    ("control.http_port", "control", "host"),
    ("metrics.port", "metrics", "host"),
)
"""Keys of ports, and the section of the address that each is bound on."""

_COMMAND_CHARS: Final = 80


def named_ports(config: TwinpoolConfig, parts: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    """(key, host, port) of each port that is fixed, of the sections ``parts``."""
    wanted = set(parts)
    for key, section, name in KEYS:
        port = getattr(getattr(config, section), key.partition(".")[2])
        if section in wanted and port > 0:
            yield key, getattr(getattr(config, section), name), port
    if "worker" in wanted and (events := config.kv_events.port) > 0:
        yield "kv_events.port", config.worker.host, events
        yield "kv_events.port + 1", config.worker.host, events + 1


def check_port(key: str, host: str, port: int) -> Finding:
    """Binds it, as its process would."""
    name, matters = f"port {port}", "the process that is to listen there ends at its start"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), port))
            probe.listen(1)
    except socket.gaierror as error:
        remedy = f"set {key.partition('.')[0]}.host to an address of this machine"
        return failed(name, f"{key}: {host} is not known: {error.strerror}", matters, remedy)
    except OSError as error:
        return failed(name, f"{key}: {_why(error, host, port)}", matters, _remedy(error, key))
    return ok(name, f"{key}: free on {host}")


def _why(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{host}:{port} is taken by {owner(port)}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine"
    if error.errno == errno.EACCES:
        return f"this user may not listen on {port}"
    return error.strerror or str(error)


def _remedy(error: OSError, key: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"stop it, or set {key.partition(' ')[0]} to another port (0: a free one)"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"set {key.partition('.')[0]}.host to one that `ip address` shows"
    return "use a port from 1024 on"


def owner(port: int) -> str:
    """The process that listens on a port, as far as this user may see it."""
    try:
        found = [
            one.pid
            for one in psutil.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr[1] == port
        ]
    except psutil.AccessDenied:
        found = []
    pids = sorted({pid for pid in found if pid})
    if not pids:
        return "a process that this user may not see (`sudo ss -ltnp` shows it)"
    try:
        process = psutil.Process(pids[0])
        words = " ".join(process.cmdline()) or process.name()
        return f"process {process.pid} of {process.username()}: {words[:_COMMAND_CHARS]}"
    except psutil.Error:
        return f"process {pids[0]}"
