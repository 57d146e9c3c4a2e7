# SPDX-License-Identifier: Apache-2.0
"""Every transcript prints today what it says. ``TWINPOOL_REWRITE=1`` writes what it prints; review the diff."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transcript import replay

TRANSCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    expected = path.read_text()
    actual = replay(expected)
    if os.environ.get("TWINPOOL_REWRITE") == "1":
        path.write_text(actual)
    assert actual == expected


def test_a_difference_is_seen() -> None:
    assert replay("submit a\n----\na: refused\n") == "submit a\n----\na: accepted\n"
