# SPDX-License-Identifier: Apache-2.0
"""Tiles of the float8 experts' kernels."""

from typing import NamedTuple


class Tile(NamedTuple):
    """Rows and columns of a program, its warps and its pipeline depth; a step is a block of 128 inner columns."""

    rows: int
    columns: int
    warps: int
    stages: int
