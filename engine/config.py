# SPDX-License-Identifier: Apache-2.0
"""Model configuration read from a checkpoint's ``config.json``."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Filled in by ``ModelConfig.from_pretrained``."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
