# SPDX-License-Identifier: Apache-2.0
"""The weights of a float8 checkpoint as ordinary ones, for those who read no float8."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SCALES = "_scale_inv"
BLOCK = 128


def widen(codes: Tensor, scales: Tensor) -> Tensor:
    """Code times scale of its block, value by value: written without what is to be tested."""
    rows = torch.arange(codes.shape[0]) // BLOCK
    columns = torch.arange(codes.shape[1]) // BLOCK
    return codes.float() * scales.float()[rows[:, None], columns[None, :]]


def read_all(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, of one file or several."""
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def write_widened(packed: Path, path: Path) -> Path:
    """The checkpoint ``packed`` with every code widened to float32, as one file, and no word of float8 left."""
    tensors = read_all(packed)
    plain = {
        name: widen(tensor, tensors[name + SCALES]) if name + SCALES in tensors else tensor
        for name, tensor in tensors.items()
        if not name.endswith(SCALES)
    }
    path.mkdir(parents=True)
    for file in packed.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, path)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    save_file(plain, path / "model.safetensors", metadata={"format": "pt"})
    return path
