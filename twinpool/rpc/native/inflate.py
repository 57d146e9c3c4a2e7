# SPDX-License-Identifier: Apache-2.0
"""Messages that the other side has compressed. The core would unpack them to any size; here the limit of messages holds."""

from __future__ import annotations

import zlib
from typing import Final, TypeAlias

DECOMPRESS_OPTION: Final = ("grpc.per_message_decompression", 0)
"""Leaves messages to the core's user as they came."""

Raw: TypeAlias = bytes | tuple[int, bytes]
"""A message; compressed: the number of the way, and the bytes."""

_DEFLATE: Final = 1
_GZIP: Final = 2
# What zlib calls its own format and gzip's.
_FORMATS: Final = {_DEFLATE: zlib.MAX_WBITS, _GZIP: zlib.MAX_WBITS | 16}


class TooLargeError(Exception):
    """A message is larger than the limit once it is unpacked."""


class BrokenError(Exception):
    """What came is not what it says."""


def inflated(raw: Raw, limit: int) -> bytes:
    """A message as it was before its compression. Raises TooLargeError, BrokenError."""
    if isinstance(raw, bytes):
        return raw
    way, packed = raw
    if way not in _FORMATS:
        raise BrokenError(f"compression {way} is unknown")
    unpacker = zlib.decompressobj(_FORMATS[way])
    try:
        message = unpacker.decompress(packed, limit + 1)
    except zlib.error as error:
        raise BrokenError(str(error)) from None
    if len(message) > limit:
        raise TooLargeError(f"Received message larger than max ({len(message)}+ vs. {limit})")
    if not unpacker.eof:
        raise BrokenError("the message ends before its compression does")
    return message
