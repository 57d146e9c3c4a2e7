# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: frequencies of each scaling kind, and the rotation."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twinpool.engine.kernels.operations import RotaryTablesOf
from twinpool.engine.rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """Cosines and signed sines of a step's tokens, ``[T, 1, dim]`` each; computed once a step, used by all layers.

    The first half of ``sin`` is negated, so that the rotation is ``x * cos + roll(x, dim / 2) * sin``.
    """

    cos: Tensor
    sin: Tensor

    def rotate(self, heads: Tensor) -> Tensor:
        """Rotates ``[T, n, dim]`` whose pairs are ``(i, i + dim / 2)``."""
        return heads * self.cos + torch.roll(heads, heads.shape[-1] // 2, dims=-1) * self.sin


class RotaryEmbedding(nn.Module):
    """Angles of positions. They are computed per step: a table of the longest context would be mostly unused."""

    inverse_frequencies: Tensor

    def __init__(self, config: RopeConfig, device: torch.device | str = "cpu") -> None:
        super().__init__()
        frequencies, self.attention_scaling = inverse_frequencies(config)
        self.register_buffer("inverse_frequencies", frequencies.to(device), persistent=False)

    def tables(self, positions: Tensor, dtype: torch.dtype, kernel: RotaryTablesOf) -> RotaryTables:
        """Tables for ``positions int64[T]``: angles in float32, then ``dtype``."""
        return RotaryTables(*kernel(positions, self.inverse_frequencies, self.attention_scaling, dtype))


def inverse_frequencies(config: RopeConfig) -> tuple[Tensor, float]:
    """``float32[dim / 2]`` inverse frequencies, and the factor on cosines and sines."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.int64).to(torch.float32) / config.dim
    plain = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return plain / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(config, plain), 1.0
    if config.kind == "yarn":
        return _yarn(config, exponents), _yarn_attention_factor(config)
    return plain, 1.0


def softmax_scale(config: RopeConfig, head_dim: int) -> float:
    """Scale on MLA attention scores: ``head_dim ** -0.5``, times DeepSeek's correction for a stretched context."""
    scale: float = head_dim**-0.5
    if config.kind != "default" and config.mscale_all_dim:
        scale *= _mscale(config.factor, config.mscale_all_dim) ** 2
    return scale


def deinterleave(dim: int) -> Tensor:
    """Order of rows that turns pairs ``(2i, 2i + 1)`` into ``(i, i + dim / 2)``: ``int64[dim]``."""
    return torch.cat((torch.arange(0, dim, 2), torch.arange(1, dim, 2)))


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim)
    return _mscale(config.factor)


def _yarn(config: RopeConfig, exponents: Tensor) -> Tensor:
    """Blends plain and stretched frequencies: fast ones stay, slow ones stretch, a ramp lies between."""

    def correction_dim(rotations: float) -> float:
        wavelengths = config.original_max_positions / (rotations * 2 * math.pi)
        return config.dim * math.log(wavelengths) / (2 * math.log(config.theta))

    low, high = correction_dim(config.beta_fast), correction_dim(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    frequencies = config.theta**exponents
    return 1.0 / (config.factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Divides slow frequencies by the factor, keeps fast ones, and smooths between the two wavelengths."""
    low_wavelength = config.original_max_positions / config.low_freq_factor
    high_wavelength = config.original_max_positions / config.high_freq_factor
    wavelengths = 2 * math.pi / plain
    scaled = torch.where(wavelengths > low_wavelength, plain / config.factor, plain)
    smooth = config.original_max_positions / wavelengths - config.low_freq_factor
    smooth = smooth / (config.high_freq_factor - config.low_freq_factor)
    smoothed = (1 - smooth) * scaled / config.factor + smooth * scaled
    between = ~(wavelengths < high_wavelength) & ~(wavelengths > low_wavelength)
    return torch.where(between, smoothed, scaled)
