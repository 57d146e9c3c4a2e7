# SPDX-License-Identifier: Apache-2.0
"""The table of failures has a row for everyone in every phase, and names tests that exist."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
PAGE = TESTS.parent / "docs" / "failures.md"
NAMED = re.compile(r"`((?:\.\./)?[\w./]+\.(?:py|cpp))(?:::(\w+))?`(?: \((\w+)\))?")
WHO = (
    "Router",
    "Prefill worker",
    "Decode worker",
    "The link between a prefill and a decode worker",
    "etcd",
    "Ray's head",
    "Controller",
)
PHASES = ("queued", "prefilling", "handing off", "decoding", "finishing")


def rows(title: str) -> list[list[str]]:
    """The cells of the rows below a heading."""
    section = PAGE.read_text().split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


@pytest.mark.parametrize("who", WHO)
def test_every_phase_has_a_row_with_a_test(who: str) -> None:
    found = rows(who)
    phases = [row[0] for row in found]
    assert [phase for phase in PHASES if phase not in phases] == []
    assert [row for row in found if len(row) != 6 or not all(row)] == []
    assert [row[0] for row in found if not NAMED.search(row[5])] == []


def test_every_named_test_exists() -> None:
    named = [match for match in NAMED.findall(PAGE.read_text()) if "test" in match[0]]
    assert len({name for _, name, _ in named}) >= 30
    missing = []
    for path, name, case in named:
        file = (TESTS / path).resolve()
        if not file.is_file():
            missing.append(path)
        elif name and not re.search(rf"def {name}\(", file.read_text()):
            missing.append(f"{path}::{name}")
        elif case and case not in file.read_text():
            missing.append(f"{path} ({case})")
    assert not missing
