# SPDX-License-Identifier: Apache-2.0
"""How far this machine's clock is from others': measured over a round trip, with the bound of the measurement.

etcd's HTTP side says the time in whole seconds. So it is asked again and again until the second changes: then its clock was
at the full second between the two requests, which bounds the difference to the time between them, some milliseconds. The
control process says its time in full, once a call.
"""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final

from twinpool.config import ClusterConfig
from twinpool.control.doctor.finding import Finding, failed, ok, warning

SKEW_SECONDS_MAX: Final = 1.0
"""A larger difference puts events and spans of different machines into the wrong order."""

ANSWER_SECONDS: Final = 3.0
"""Longest wait for an answer."""

EDGE_SECONDS: Final = 1.5
"""A second that has not changed for so long was not measured."""

PAUSE_SECONDS: Final = 0.01
CALLS: Final = 3
"""Looks at a clock that says its time in full; the one with the shortest round trip counts."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Offset:
    """The other clock minus ours, in seconds; the truth lies within ``bound`` of it."""

    seconds: float
    bound: float

    @property
    def least(self) -> float:
        """The smallest amount that fits the measurement."""
        return max(0.0, abs(self.seconds) - self.bound)


def judge(name: str, other: str, found: Offset) -> Finding:
    """The finding of a measurement."""
    way = "ahead of" if found.seconds > 0 else "behind"
    detail = (
        f"the clock of {other} is {abs(found.seconds):.3f} s {way} this machine's (to {found.bound:.3f} s)"
    )
    if found.least <= SKEW_SECONDS_MAX:
        return ok(name, detail)
    matters = (
        "events, spans and logs of the two are in the wrong order; beyond minutes certificates are refused"
    )
    return failed(name, detail, matters, "run an NTP client on both (chrony; `timedatectl set-ntp true`)")


def check_etcd_clock(config: ClusterConfig, endpoint: str, clock: Clock = time.time) -> Finding:
    """Against one member of etcd."""
    name = f"clock etcd {endpoint}"
    try:
        found = etcd_offset(config, endpoint, clock)
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        remedy = "look whether etcd runs there, and whether the files cluster.etcd_* are its own"
        return warning(name, f"not measured: {why}", "the skew is not known", remedy)
    return judge(name, f"etcd {endpoint}", found)


def etcd_offset(config: ClusterConfig, endpoint: str, clock: Clock = time.time) -> Offset:
    """Raises OSError, HTTPException or ValueError where it cannot be measured. Takes a second at most, and a round trip."""
    connection = _connection(config, endpoint)
    try:
        before, first, _ = _date(connection, clock)
        end = time.monotonic() + EDGE_SECONDS
        while time.monotonic() < end:
            time.sleep(PAUSE_SECONDS)
            sent, second, received = _date(connection, clock)
            if second > first:
                # Between the last request that saw the old second and the answer with the new one.
                earliest, latest = second - received, second - before
                return Offset((earliest + latest) / 2, (latest - earliest) / 2)
            before = sent
        raise ValueError(f"its time stood still for {EDGE_SECONDS:g} s")
    finally:
        connection.close()


def told_offset(ask: Callable[[], float], clock: Clock = time.time, stale: float = 0.0) -> Offset:
    """Of a clock that ``ask`` reads, in seconds since the epoch, at some moment of the call or at most ``stale`` seconds before."""
    best: Offset | None = None
    for _ in range(CALLS):
        sent = clock()
        at = ask()
        received = clock()
        earliest, latest = at - received, at - sent + stale
        found = Offset((earliest + latest) / 2, (latest - earliest) / 2)
        best = found if best is None or found.bound < best.bound else best
    assert best is not None
    return best


def _connection(config: ClusterConfig, endpoint: str) -> http.client.HTTPConnection:
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    if not config.etcd_ca_file:
        return http.client.HTTPConnection(host, int(port), timeout=ANSWER_SECONDS)
    context = ssl.create_default_context(cafile=config.etcd_ca_file)
    if config.etcd_cert_file:
        context.load_cert_chain(Path(config.etcd_cert_file), Path(config.etcd_key_file))
    return http.client.HTTPSConnection(host, int(port), timeout=ANSWER_SECONDS, context=context)


def _date(connection: http.client.HTTPConnection, clock: Clock) -> tuple[float, float, float]:
    """When it was asked, the second that it said, and when the answer was there."""
    sent = clock()
    connection.request("GET", "/version")
    answer = connection.getresponse()
    answer.read()
    received = clock()
    date = answer.getheader("Date")
    if date is None:
        raise ValueError("it does not say its time")
    return sent, parsedate_to_datetime(date).timestamp(), received
