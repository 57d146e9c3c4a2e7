# SPDX-License-Identifier: Apache-2.0
"""What must be equal for two workers to exchange KV: the model's content and the layout of its cache."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from twinpool.engine.checkpoint import Checkpoint
from twinpool.engine.config import ModelConfig, canonical_json
from twinpool.engine.kv.formats import KVDtype
from twinpool.engine.models.base import KVLayout

LAYOUTS: dict[KVDtype, str] = {
    "auto": "block-major/latent+rope/half-pairs",
    "fp8_latent": "block-major/latent-e4m3-128+rope-bf16/half-pairs",
}
"""Name of the bytes' order in a block. Changes whenever ``KVLayout``, a row's form or the pool changes what a byte means."""

_WHOLE_FILE = 16 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Unequal fingerprints never pair. ``str()`` is the form that travels; the fields explain a difference."""

    family: str
    revision: str
    dtype: str
    block_tokens: int
    layers: int
    latent_dim: int
    rope_dim: int
    layout: str

    def __str__(self) -> str:
        digest = hashlib.sha256(b"twinpool-fingerprint-1")
        for name, value in asdict(self).items():
            for part in (name.encode(), str(value).encode()):
                digest.update(len(part).to_bytes(4, "little") + part)
        return f"tp1-{digest.hexdigest()[:40]}"

    def differences(self, other: "Fingerprint") -> list[str]:
        """One line for each field that differs, empty if none does."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name}: {mine[name]} != {theirs[name]}" for name in mine if mine[name] != theirs[name]]


def fingerprint(
    path: str | Path, *, dtype: torch.dtype, block_tokens: int, kv_dtype: KVDtype = "auto"
) -> Fingerprint:
    """The fingerprint of a checkpoint served with ``dtype``, ``block_tokens`` and ``kv_dtype``.

    How attention reads the cache (latent or GQA) is not part of it: the bytes are the same. Raises CheckpointError.
    """
    config = ModelConfig.from_pretrained(path)
    layout = KVLayout.of(config)
    return Fingerprint(
        family=config.family,
        revision=revision(path),
        dtype=str(dtype).removeprefix("torch."),
        block_tokens=block_tokens,
        layers=layout.layers,
        latent_dim=layout.latent_dim,
        rope_dim=layout.rope_dim,
        layout=LAYOUTS[kv_dtype],
    )


def revision(path: str | Path) -> str:
    """Content hash of a checkpoint: its config, every tensor's name, shape, dtype and file, and the weights' bytes.

    Files above 16 MiB are sampled at 64 evenly spaced places: another training of the same architecture differs
    nearly everywhere, and hashing every byte of a large model at each start would take minutes.
    """
    digest = hashlib.sha256(canonical_json(path))
    checkpoint = Checkpoint(path)
    for tensor in sorted(checkpoint.tensors.values(), key=lambda stored: stored.name):
        digest.update(f"{tensor.name}|{tensor.shape}|{tensor.dtype}|{tensor.file}\n".encode())
    for file in sorted(checkpoint.files):
        _hash_file(digest, checkpoint.path / file)
    return digest.hexdigest()[:32]


def _hash_file(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as stream:
        if size <= _WHOLE_FILE:
            digest.update(stream.read())
            return
        for index in range(_SAMPLES):
            stream.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_BYTES))
