# SPDX-License-Identifier: Apache-2.0
"""Fingerprints differ whenever the KV bytes of two workers could mean different things."""

from pathlib import Path

import pytest
import torch

from twinpool.engine import fingerprint as module
from twinpool.engine.checkpoint import SINGLE_FILE
from twinpool.engine.fingerprint import Fingerprint, fingerprint, revision
from twinpool.engine.tiny import write_tiny


def of(path: Path, dtype: torch.dtype = torch.float32, block_tokens: int = 16) -> Fingerprint:
    return fingerprint(path, dtype=dtype, block_tokens=block_tokens)


def test_equal_checkpoints_agree_wherever_they_lie(tmp_path: Path) -> None:
    first = of(write_tiny(tmp_path / "a", "qwen3"))
    second = of(write_tiny(tmp_path / "b", "qwen3"))
    assert first == second
    assert str(first) == str(second)
    assert first.differences(second) == []
    assert str(first).startswith("tp1-")


def test_every_difference_shows_and_is_explained(tmp_path: Path) -> None:
    base = of(write_tiny(tmp_path / "a", "qwen3"))
    others = {
        "dtype": of(tmp_path / "a", torch.bfloat16),
        "block_tokens": of(tmp_path / "a", block_tokens=32),
        "revision": of(write_tiny(tmp_path / "seed", "qwen3", seed=1)),
        "layers": of(write_tiny(tmp_path / "layers", "qwen3", layers=2)),
        "latent_dim": of(write_tiny(tmp_path / "heads", "qwen3", overrides={"num_key_value_heads": 1})),
        "family": of(write_tiny(tmp_path / "family", "deepseek_v2")),
    }
    assert len({str(item) for item in [base, *others.values()]}) == len(others) + 1
    for field, other in others.items():
        assert any(line.startswith(f"{field}: ") for line in base.differences(other)), field
    assert base.differences(others["dtype"]) == ["dtype: float32 != bfloat16"]


@pytest.mark.parametrize("whole", [True, False])
def test_weights_are_part_of_the_revision(
    tmp_path: Path, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:
        monkeypatch.setattr(module, "_WHOLE_FILE", 0)
    path = write_tiny(tmp_path, "llama", layers=1)
    before = revision(path)
    assert revision(path) == before
    content = bytearray((path / SINGLE_FILE).read_bytes())
    content[-1] ^= 1
    (path / SINGLE_FILE).write_bytes(bytes(content))
    assert revision(path) != before
