# SPDX-License-Identifier: Apache-2.0
"""The screen of `twinpool top`: what keys do, what fits, and what is asked before something is done."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.support.telling import seconds
from twinpool.control.cli import top_state
from twinpool.control.cli.main import app
from twinpool.control.cli.top_state import DOWN, UP, Top
from twinpool.control.cli.top_view import COLUMNS, whole
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2

PREFILL, DECODE = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE
EVERYTHING = frozenset(act.rpc for act in top_state.ACTS)


def overview(workers: int = 4, operations: int = 0) -> pb.Overview:
    made = pb.Overview(cluster="local")
    for at in range(workers):
        worker = made.workers.add(reachable=at != 1, error="DEADLINE_EXCEEDED: x" if at == 1 else "")
        worker.record.worker.name = f"w{at}"
        worker.record.pool = "default"
        worker.record.role = DECODE if at % 2 else PREFILL
        worker.record.state = pb.WORKER_STATE_READY
        worker.counts.total_blocks, worker.counts.free_blocks = 100, 50
        worker.counts.running = 100 - at
        worker.utilization = 0.1 * at
        worker.counts.step_time.CopyFrom(seconds(0.0123))
    role = made.pools.add(pool="default").roles.add(
        role=PREFILL, desired=3, registered=2, ready=1, unreachable=1
    )
    role.utilization = 0.9
    router = made.routers.add(reachable=True)
    router.record.name = "r0"
    router.telemetry.window.CopyFrom(seconds(60))
    router.telemetry.ended.add(reason="", count=120)
    router.telemetry.refused.add(reason="QUEUE_FULL", count=7)
    router.telemetry.time_to_first_token_summary.count = 3
    router.telemetry.time_to_first_token_summary.p50.CopyFrom(seconds(0.25))
    for at in range(operations):
        made.operations.add(id=f"op{at}", kind=pb.OPERATION_KIND_DRAIN, state=pb.OPERATION_STATE_RUNNING)
    return made


def top(workers: int = 4, methods: frozenset[str] = EVERYTHING) -> Top:
    made = Top(methods)
    made.take(overview(workers))
    return made


def drawn(made: Top, width: int = 200, height: int = 40) -> list[str]:
    console = Console(width=width, height=height, record=True, color_system=None, file=io.StringIO())
    console.print(made.render(width, height))
    return console.export_text().splitlines()


def test_all_parts_are_shown() -> None:
    text = "\n".join(drawn(top()))
    for part in (
        "local",
        "requests/s 2.0",
        "refused QUEUE_FULL 7",
        "1 unreachable",
        "▶ w0",
        "r0",
        "250",
        "90%",
        "12.3",
    ):
        assert part in text, part


def test_the_chosen_worker_moves_and_stays_when_others_go() -> None:
    made = top()
    assert made.chosen == "w0"
    made.press(UP)
    assert made.chosen == "w0"
    for key in (DOWN, "j", "j", "j"):
        made.press(key)
    assert made.chosen == "w3"
    made.press("k")
    less = overview(4)
    del less.workers[0]
    made.take(less)
    assert made.chosen == "w2"
    made.take(overview(1))
    assert made.chosen == "w0"
    made.take(overview(0))
    assert made.chosen == ""
    made.press(DOWN)
    made.press("d")
    assert made.asked is None


def test_columns_sort_both_ways() -> None:
    made = top()
    titles = [column.title for column in COLUMNS]
    for _ in range(titles.index("UTIL")):
        made.press("s")
    assert [worker.record.worker.name for worker in made.workers] == ["w0", "w1", "w2", "w3"]
    made.press("r")
    assert [worker.record.worker.name for worker in made.workers] == ["w3", "w2", "w1", "w0"]
    assert any("UTIL▼" in line for line in drawn(made))
    made.press("S")
    assert COLUMNS[made.column].title == "WAIT"


def test_nothing_is_done_without_a_yes() -> None:
    made = top()
    assert made.press("d") is None
    assert any("Take w0 out for good? [y/n]" in line for line in drawn(made))
    assert made.press("x") is None
    assert made.asked is None
    assert any("nothing was done" in line for line in drawn(made))
    assert made.press("y") is None, "there is no question any more"
    made.press("f")
    assert any("Turn w0 into a decode worker?" in line for line in drawn(made))
    asked = made.press("y")
    assert asked is not None
    assert (asked.act.rpc, asked.worker.record.worker.name) == ("FlipWorker", "w0")


def test_only_what_the_control_process_can_do_is_offered() -> None:
    made = top(methods=frozenset({"DrainWorker"}))
    assert [act.label for act in made.acts] == ["drain"]
    made.press("f")
    assert made.asked is None
    footer = drawn(made)[-1]
    assert "drain" in footer
    assert "flip" not in footer


@pytest.mark.parametrize("key", ["q", "\x03", "\x04"])
def test_keys_that_end_it(key: str) -> None:
    made = top()
    made.press(key)
    assert made.over


@pytest.mark.parametrize(("width", "height"), [(200, 50), (120, 30), (80, 24)])
def test_it_fits_the_screen_and_shows_the_chosen_worker(width: int, height: int) -> None:
    made = top(60)
    for chosen in range(0, 60, 7):
        made.chosen = f"w{chosen}"
        lines = drawn(made, width, height)
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        assert any(line.startswith(f"▶ w{chosen} ") for line in lines)


def test_narrow_screens_lose_columns_and_no_names() -> None:
    wide, narrow = drawn(top(), 200), drawn(top(), 70)
    assert any("PINS" in line for line in wide)
    assert not any("PINS" in line for line in narrow)
    assert not any("…" in line for line in narrow[2:])
    assert any("unreachable" in line for line in narrow)


def test_a_lost_control_process_is_said_and_the_last_view_stays() -> None:
    made = Top(EVERYTHING)
    made.lost = "SERVER_UNREACHABLE: x"
    assert "SERVER_UNREACHABLE" in "\n".join(drawn(made))
    made.take(overview())
    assert "SERVER_UNREACHABLE" not in "\n".join(drawn(made))
    made.lost = "SERVER_UNREACHABLE: what you see is old"
    text = "\n".join(drawn(made))
    assert "what you see is old" in text
    assert "w0" in text


def test_a_page_has_every_worker() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(whole(overview(90, operations=2)))
    text = console.export_text()
    assert all(f"w{at}" in text for at in range(90))
    assert "op1" in text


def test_a_column_that_is_none_is_refused() -> None:
    found = CliRunner().invoke(app, ["top", "--control", "127.0.0.1:1", "--sort", "NOTHING"])
    assert found.exit_code == 2
    assert "there are WORKER" in found.output


def test_nobody_at_the_address_is_unavailable() -> None:
    found = CliRunner().invoke(app, ["top", "--control", "127.0.0.1:1", "-o", "json"])
    assert found.exit_code == 3, json.dumps(found.output)
