# SPDX-License-Identifier: Apache-2.0
"""Identities: workers with their incarnation, requests, transfers.

Random numbers come from the operating system, so two processes forked at the same moment still differ.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

MAX_NAME_CHARS = 63
"""Longest name of a cluster, pool or worker: it stays a valid DNS label and Kubernetes label value."""

MAX_REQUEST_ID_CHARS = 128
"""Longest request id that a client may choose."""

SHOWN_CHARS = 80
"""So much of somebody's text goes into an error's own."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_HEX64 = re.compile(r"[0-9a-f]{16}")
_UINT64_MAX = (1 << 64) - 1


@dataclass(frozen=True, slots=True, order=True)
class WorkerKey:
    """Which start of which worker. Equal only if name *and* incarnation are."""

    name: str
    incarnation: int

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ValueError(
                f"worker name {self.name[:SHOWN_CHARS]!r} is not a lower-case DNS label of at most {MAX_NAME_CHARS}"
            )
        if not 0 < self.incarnation <= _UINT64_MAX:
            raise ValueError(f"incarnation {self.incarnation} of worker {self.name!r} is not in 1..2**64-1")

    def __str__(self) -> str:
        return f"{self.name}@{to_hex64(self.incarnation)}"

    @classmethod
    def parse(cls, text: str) -> WorkerKey:
        """The inverse of ``str``. Raises ValueError for anything that ``str`` could not have printed."""
        name, at, incarnation = text.rpartition("@")
        if not at:
            raise ValueError(f"worker key {text[:SHOWN_CHARS]!r} has no '@'")
        return cls(name, from_hex64(incarnation))


def is_name(text: str) -> bool:
    """Whether ``text`` may name a cluster, a pool or a worker."""
    return _NAME.fullmatch(text) is not None


def is_request_id(text: str) -> bool:
    """Whether a client may use ``text`` as its request id (it goes into logs and metadata)."""
    return _REQUEST_ID.fullmatch(text) is not None


def new_incarnation() -> int:
    """A random number in 1..2**64-1 that names one start of one worker. 0 means "none" on the wire."""
    return secrets.randbits(64) or 1


def new_transfer_id() -> int:
    """A random number in 1..2**64-1 that the owner of blocks gives to one hand-off."""
    return secrets.randbits(64) or 1


def new_request_id() -> str:
    """A random id for a request whose client chose none: "req-" and 128 bits in hex."""
    return f"req-{secrets.token_hex(16)}"


def to_hex64(value: int) -> str:
    """16 lower-case hex digits of a 64-bit number, for keys and logs."""
    if not 0 <= value <= _UINT64_MAX:
        raise ValueError(f"{value} is not an unsigned 64-bit number")
    return f"{value:016x}"


def from_hex64(text: str) -> int:
    """The inverse of :func:`to_hex64`."""
    if _HEX64.fullmatch(text) is None:
        raise ValueError(f"{text[:SHOWN_CHARS]!r} is not 16 lower-case hex digits")
    return int(text, 16)
