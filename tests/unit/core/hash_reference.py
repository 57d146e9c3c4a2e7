# SPDX-License-Identifier: Apache-2.0
"""The hashes of csrc/hash written a second time, in plain Python, and the golden vectors that pin both.

``python tests/unit/core/hash_reference.py`` writes golden_hash.json again. A change of that file is a change of what
router and workers of different releases agree on: it needs a new domain tag.
"""

import hashlib
import json
import random
import struct
from pathlib import Path
from typing import TypedDict

GOLDEN = Path(__file__).with_name("golden_hash.json")
ROOT_TAG = b"tp.root1"
BLOCK_TAG = b"tp.blk.1"
MASK = (1 << 64) - 1
GOLDEN_RATIO = 0x9E3779B97F4A7C15


class RootVector(TypedDict):
    fingerprint: str
    tenant_salt: str | None
    adapter: str | None
    hash: str


class ChainVector(TypedDict):
    parent: str
    block_tokens: int
    tokens: list[int]
    hashes: list[str]


class DigestVector(TypedDict):
    data: str
    digest: str


class Golden(TypedDict):
    roots: list[RootVector]
    chains: list[ChainVector]
    digests: list[DigestVector]


def root_hash(fingerprint: bytes, tenant_salt: bytes | None, adapter: bytes | None) -> bytes:
    message = ROOT_TAG
    for tag, value in enumerate((fingerprint, tenant_salt, adapter), start=1):
        if value is not None:
            message += struct.pack("<BQ", tag, len(value)) + value
    return hashlib.sha256(message).digest()[:16]


def hash_blocks(parent: bytes, tokens: list[int], block_tokens: int) -> list[bytes]:
    hashes = []
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        packed = struct.pack(f"<{block_tokens}i", *tokens[end - block_tokens : end])
        parent = hashlib.sha256(BLOCK_TAG + parent + packed).digest()[:16]
        hashes.append(parent)
    return hashes


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def digest64(data: bytes) -> int:
    """The digest of csrc/hash/digest.h."""
    total = _mix(len(data))
    for index, at in enumerate(range(0, len(data), 8), start=1):
        word = int.from_bytes(data[at : at + 8], "little")
        total += _mix((word + index * GOLDEN_RATIO) & MASK)
    return total & MASK


def _roots() -> list[RootVector]:
    cases: list[tuple[bytes, bytes | None, bytes | None]] = [
        (b"", None, None),
        (b"", b"", None),
        (b"", None, b""),
        (b"", b"", b""),
        (b"model", None, None),
        (b"model", b"x", None),
        (b"model", None, b"x"),
        (b"model", b"x", b"x"),
        (b"modelx", b"", b""),
        (b"model", b"xy", b""),
        (b"model", b"x", b"y"),
        (bytes(range(256)), bytes(300), b"\xff" * 70),
    ]
    return [
        {
            "fingerprint": fingerprint.hex(),
            "tenant_salt": None if salt is None else salt.hex(),
            "adapter": None if adapter is None else adapter.hex(),
            "hash": root_hash(fingerprint, salt, adapter).hex(),
        }
        for fingerprint, salt, adapter in cases
    ]


def _chains(draw: random.Random) -> list[ChainVector]:
    vectors: list[ChainVector] = []
    for block_tokens in (1, 16, 64, 128, 200):
        for count in (0, 1, block_tokens - 1, block_tokens, block_tokens + 1, 3 * block_tokens):
            parent = draw.randbytes(16)
            tokens = [draw.choice((0, 1, 255, 256, 128_255, draw.randrange(2**31))) for _ in range(count)]
            hashes = [value.hex() for value in hash_blocks(parent, tokens, block_tokens)]
            vectors.append(
                {"parent": parent.hex(), "block_tokens": block_tokens, "tokens": tokens, "hashes": hashes}
            )
    return vectors


def golden() -> Golden:
    draw = random.Random(20)
    digests: list[DigestVector] = []
    for length in (0, 1, 3, 4, 7, 8, 15, 31, 32, 33, 63, 64, 100, 257):
        data = draw.randbytes(length)
        digests.append({"data": data.hex(), "digest": f"{digest64(data):016x}"})
    return {"roots": _roots(), "chains": _chains(draw), "digests": digests}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden(), separators=(",", ":")) + "\n")
