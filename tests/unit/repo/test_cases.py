# SPDX-License-Identifier: Apache-2.0
"""The table of known faults names tests that exist, one row a case, in order."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (\d+) \| ")
NAMED = re.compile(r"`([\w./]+\.(?:py|cpp))(?:::(\w+))?`")


def rows() -> list[str]:
    return [line for line in (TESTS / "cases.md").read_text().splitlines() if ROW.match(line)]


def test_cases_are_in_order_and_named_once() -> None:
    numbers = [int(match[1]) for row in rows() if (match := ROW.match(row))]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 43, "all of the list"


def test_every_named_test_exists() -> None:
    missing = []
    for row in rows():
        for path, name in NAMED.findall(row):
            file = (TESTS / path).resolve()
            if not file.is_file() or (name and not re.search(rf"def {name}\(", file.read_text())):
                missing.append(f"{path}::{name}")
    assert not missing


def test_every_case_has_a_test_or_a_reason() -> None:
    assert [row for row in rows() if len(row.split("|")[3].strip()) < 10] == []
