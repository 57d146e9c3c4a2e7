# SPDX-License-Identifier: Apache-2.0
"""docs/lifecycle.md says what the core does. ``TWINPOOL_REWRITE=1`` writes the table anew; review the diff."""

import os
from pathlib import Path

from twinpool._core import AdmissionConfig, RouterCore
from twinpool.errors import TABLE

PAGE = Path(__file__).parents[3] / "docs" / "lifecycle.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->"
TERMINAL = ["Finished", "Rejected", "Cancelled", "Expired", "Failed"]


def table() -> str:
    """The transition table: a row an event, a column a state; the terminal states behave alike and share one."""
    cells = {(event, state): result for event, state, result in RouterCore.TRANSITIONS}
    events = list(dict.fromkeys(event for event, _, _ in RouterCore.TRANSITIONS))
    living = [state for state in RouterCore.STATES if state not in TERMINAL]
    lines = [f"| event | {' | '.join(living)} | at the end |", "|---" * (len(living) + 2) + "|"]
    for event in events:
        ends = {cells[event, state] for state in TERMINAL}
        assert len(ends) == 1, f"the terminal states differ for {event}"
        row = [cells[event, state] for state in living] + [ends.pop()]
        lines.append(f"| {event} | {' | '.join('-' if cell == 'error' else cell for cell in row)} |")
    return "\n".join(lines) + "\n"


def test_the_page_has_the_table_of_the_code() -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    expected = before + BEGIN + table() + END + after
    if os.environ.get("TWINPOOL_REWRITE") == "1":
        PAGE.write_text(expected)
    assert text == expected, "run with TWINPOOL_REWRITE=1 and review the diff"


def test_the_page_names_every_state_event_and_reason() -> None:
    text = PAGE.read_text()
    for name in [*RouterCore.STATES, *RouterCore.EVENTS]:
        assert name in text, name
    reasons = {
        word
        for line in text.split("## Reasons and causes")[1].split("## Events")[0].splitlines()
        if line.startswith("| ")
        for word in line.split("|")[1].replace(",", " ").split()
        if word.isupper()
    }
    assert reasons >= {"QUEUE_FULL", "WORKER_LOST", "INTERNAL"}
    assert not reasons - set(TABLE), "a reason that has no row in docs/errors.md"


def test_the_limits_that_the_page_names_exist() -> None:
    text = PAGE.read_text()
    for name in (
        "queue_ttl_seconds",
        "ageing_seconds",
        "order_stretch",
        "max_bypass",
        "max_refusals",
        "max_attempts",
        "preemption",
    ):
        assert f"`{name}`" in text
        assert name in AdmissionConfig.FIELDS
