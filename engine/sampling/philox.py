# SPDX-License-Identifier: Apache-2.0
"""Philox4x32-10, a counter-based generator: a draw is a function of its place, not of what was drawn before.

So a stream that moves to another worker, or is computed again, draws what the first worker would have drawn, and no
generator state has to travel. Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

ROUNDS: Final = 10
_MULTIPLIER_0: Final = np.uint64(0xD2511F53)
_MULTIPLIER_1: Final = np.uint64(0xCD9E8D57)
_WEYL_0: Final = 0x9E3779B9
_WEYL_1: Final = 0xBB67AE85
_MASK: Final = np.uint64(0xFFFFFFFF)
_SHIFT: Final = np.uint64(32)

DRAW_TOKEN: Final = 0
"""Purpose word of the draw of a next token. Other uses of the same (seed, choice, position) take other words."""


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``counter[n, 4]`` and ``key[n, 2]`` of 32-bit words (held in uint64) -> ``[n, 4]`` random 32-bit words."""
    c0, c1, c2, c3 = (counter[:, i].copy() for i in range(4))
    k0, k1 = key[:, 0].copy(), key[:, 1].copy()
    for _ in range(ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = (product_1 >> _SHIFT) ^ c1 ^ k0
        c1 = product_1 & _MASK
        c2 = (product_0 >> _SHIFT) ^ c3 ^ k1
        c3 = product_0 & _MASK
        k0 = (k0 + np.uint64(_WEYL_0)) & _MASK
        k1 = (k1 + np.uint64(_WEYL_1)) & _MASK
    return np.stack([c0, c1, c2, c3], axis=1)


def uniforms(
    seeds: NDArray[np.uint64],
    choices: NDArray[np.uint64],
    positions: NDArray[np.uint64],
    purpose: int = DRAW_TOKEN,
) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, choice, position); all arrays ``[n]``.

    Key: the seed's low and high word. Counter: the position's low and high word, the choice, the purpose.
    """
    key = np.stack([seeds & _MASK, seeds >> _SHIFT], axis=1)
    tag = np.full(len(seeds), purpose, np.uint64)
    counter = np.stack([positions & _MASK, positions >> _SHIFT, choices & _MASK, tag], axis=1)
    words = philox4x32(counter, key)
    bits = ((words[:, 0] >> np.uint64(5)) << np.uint64(26)) | (words[:, 1] >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
