# SPDX-License-Identifier: Apache-2.0
"""The hash of the core against its plain Python twin and the golden vectors."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hash_reference import GOLDEN, digest64, golden, hash_blocks, root_hash
from hypothesis import given
from hypothesis import strategies as st

from twinpool import _core

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=70)


def test_golden_vectors_are_what_the_reference_says() -> None:
    assert json.loads(GOLDEN.read_text()) == golden()


@pytest.mark.parametrize("vector", golden()["roots"])
def test_roots_equal_the_golden_vectors(vector: dict[str, str | None]) -> None:
    fields = [
        None if vector[name] is None else bytes.fromhex(vector[name] or "")
        for name in ("fingerprint", "tenant_salt", "adapter")
    ]
    assert _core.root_hash(*fields).hex() == vector["hash"]


@given(parent=st.binary(min_size=16, max_size=16), tokens=TOKENS, block_tokens=st.integers(1, 40))
def test_chains_equal_the_reference(parent: bytes, tokens: list[int], block_tokens: int) -> None:
    hashes = _core.hash_blocks(parent, np.array(tokens, np.int32), block_tokens)
    assert hashes.shape == (len(tokens) // block_tokens, 16)
    assert [row.tobytes() for row in hashes] == hash_blocks(parent, tokens, block_tokens)


@given(fields=st.tuples(st.binary(), st.none() | st.binary(), st.none() | st.binary()))
def test_roots_equal_the_reference(fields: tuple[bytes, bytes | None, bytes | None]) -> None:
    assert _core.root_hash(*fields) == root_hash(*fields)


@given(
    a=st.tuples(st.binary(max_size=4), st.none() | st.binary(max_size=4), st.none() | st.binary(max_size=4)),
    b=st.tuples(st.binary(max_size=4), st.none() | st.binary(max_size=4), st.none() | st.binary(max_size=4)),
)
def test_different_namespaces_have_different_roots(
    a: tuple[bytes, bytes | None, bytes | None], b: tuple[bytes, bytes | None, bytes | None]
) -> None:
    assert (_core.root_hash(*a) == _core.root_hash(*b)) == (a == b)


def test_processes_agree_whatever_their_hash_seed() -> None:
    program = (
        "import numpy as np; from twinpool import _core;"
        "print(_core.hash_blocks(_core.root_hash(b'm', b's', b'a'), np.arange(256, dtype=np.int32), 64).tobytes().hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    tokens = list(range(256))
    wanted = b"".join(hash_blocks(root_hash(b"m", b"s", b"a"), tokens, 64)).hex()
    assert seen == {wanted + "\n"}


@given(data=st.binary(max_size=200), count=st.integers(1, 4))
def test_digests_cover_the_valid_bytes_of_each_block(data: bytes, count: int) -> None:
    stride = len(data) // count
    memory = np.frombuffer(data + b"\0", np.uint8).copy()
    lengths = np.array([stride * i // count for i in range(count)], np.int64)
    digests = _core.block_digest(memory.ctypes.data, stride, lengths)
    assert digests.dtype == np.uint64
    assert digests.tolist() == [
        digest64(data[i * stride : i * stride + length]) for i, length in enumerate(lengths.tolist())
    ]


def test_bad_arguments_are_named() -> None:
    tokens = np.arange(8, dtype=np.int32)
    with pytest.raises(ValueError, match="parent must be 16 bytes, not 15"):
        _core.hash_blocks(bytes(15), tokens, 4)
    with pytest.raises(_core.CoreError, match="block_tokens"):
        _core.hash_blocks(bytes(16), tokens, 0)
    with pytest.raises(TypeError, match="tokens must be an aligned C-contiguous array of int32, not int64"):
        _core.hash_blocks(bytes(16), tokens.astype(np.int64), 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="C-contiguous"):
        _core.hash_blocks(bytes(16), tokens[::2], 4)
    with pytest.raises(_core.CoreError, match="between 0 and stride_bytes"):
        _core.block_digest(tokens.ctypes.data, 4, np.array([5], np.int64))
