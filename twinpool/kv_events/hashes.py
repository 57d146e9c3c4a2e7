# SPDX-License-Identifier: Apache-2.0
"""Block hashes as they lie in memory and on the wire: 16 bytes each, one after the other."""

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

HASH_BYTES: Final = 16
"""Bytes of a block hash."""


def split(raw: bytes) -> list[bytes]:
    """The single hashes of ``raw``, whose length is a multiple of 16."""
    return [raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES)]


def join(hashes: Iterable[bytes]) -> bytes:
    """The inverse of ``split``."""
    return b"".join(hashes)


def as_array(raw: bytes) -> NDArray[np.uint8]:
    """The hashes as the core takes them, ``uint8[n, 16]``; a view."""
    return np.frombuffer(raw, np.uint8).reshape(-1, HASH_BYTES)


def digest(raw: bytes, *, host: bool = False) -> int:
    """A 64-bit number of a *set* of hashes: the exclusive or of the first half of each; of the second half for copies in
    host memory, so that a block that moves from one tier to the other changes it.

    Adding or removing a hash changes it by that hash's own half, in whatever order. Two sets that differ have equal
    digests with probability 2**-64, so a reader whose digest is the writer's has the writer's set.
    """
    if not raw:
        return 0
    return int(np.bitwise_xor.reduce(np.frombuffer(raw, "<u8")[int(host) :: 2]))
