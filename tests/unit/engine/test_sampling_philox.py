# SPDX-License-Identifier: Apache-2.0
"""The counter-based generator: published vectors, independence of the batch, uniformity."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.engine.sampling.philox import philox4x32, uniforms

# Known answers for philox4x32-10 of the Random123 distribution (counter, key, output).
VECTORS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def draw(*places: tuple[int, int, int]) -> list[float]:
    seeds, choices, positions = (np.array(column, np.uint64) for column in zip(*places, strict=True))
    return uniforms(seeds, choices, positions).tolist()


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox4x32(np.array([counter], np.uint64), np.array([key], np.uint64))
    assert words.tolist() == [expected]


place = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 15), st.integers(0, 2**20))


@settings(deadline=None)
@given(st.lists(place, min_size=1, max_size=8))
def test_a_draw_depends_on_its_place_alone(places: list[tuple[int, int, int]]) -> None:
    together = draw(*places)
    assert together == [draw(one)[0] for one in places]
    assert all(0 <= value < 1 for value in together)


@settings(deadline=None)
@given(place)
def test_each_part_of_the_place_matters(one: tuple[int, int, int]) -> None:
    seed, choice, position = one
    others = [
        (seed ^ 1, choice, position),
        (seed ^ (1 << 63), choice, position),
        (seed, choice + 1, position),
        (seed, choice, position + 1),
    ]
    values = draw(one, *others)
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_uniform_along_each_part(axis: int) -> None:
    count, bins = 32_000, 64
    columns = [np.full(count, 7, np.uint64) for _ in range(3)]
    columns[axis] = np.arange(count, dtype=np.uint64)
    values = uniforms(*columns)
    observed = np.bincount((values * bins).astype(int), minlength=bins)
    chi_square = float((((observed - count / bins) ** 2) / (count / bins)).sum())
    assert chi_square < 125  # 63 degrees of freedom: exceeded once in 200,000 uniform samples
    serial = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(serial) < 0.025
