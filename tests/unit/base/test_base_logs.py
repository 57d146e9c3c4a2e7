# SPDX-License-Identifier: Apache-2.0
import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from twinpool import logs


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    logs.clear_context()


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_events_are_json_lines_with_time_level_and_logger() -> None:
    out = io.StringIO()
    logs.setup("info", json=True, stream=out)
    logs.get_logger("a.b").info("thing_happened", count=3)
    (line,) = lines(out)
    assert line["event"] == "thing_happened"
    assert (line["count"], line["level"], line["logger"]) == (3, "info", "a.b")
    assert str(line["timestamp"]).endswith("Z")


def test_context_is_on_every_event_until_cleared() -> None:
    out = io.StringIO()
    logs.setup("info", json=True, stream=out)
    logs.bind_context(request_id="r-1")
    logs.get_logger("a").info("one")
    logs.clear_context()
    logs.get_logger("a").info("two")
    assert [line.get("request_id") for line in lines(out)] == ["r-1", None]


def test_standard_logging_takes_the_same_way() -> None:
    out = io.StringIO()
    logs.setup("info", json=True, stream=out)
    logging.getLogger("some.library").warning("it %s", "broke")
    (line,) = lines(out)
    assert (line["event"], line["level"], line["logger"]) == ("it broke", "warning", "some.library")


def test_levels_filter_and_chatty_libraries_are_quiet() -> None:
    out = io.StringIO()
    logs.setup("info", json=True, stream=out)
    logs.get_logger("a").debug("hidden")
    logging.getLogger("ray.worker").info("chatter")
    logging.getLogger("ray.worker").error("problem")
    assert [line["event"] for line in lines(out)] == ["problem"]


@pytest.mark.parametrize("late", [False, True])
def test_a_library_with_a_handler_of_its_own_takes_the_same_way(late: bool) -> None:
    own, out = io.StringIO(), io.StringIO()
    if late:
        logs.setup("info", json=True, stream=out)
    # As Ray does when it is imported.
    logger = logging.getLogger("ray")
    logger.propagate = False
    logger.addHandler(logging.StreamHandler(own))
    if late:
        logs.adopt("ray")
    else:
        logs.setup("info", json=True, stream=out)
    logging.getLogger("ray.worker").error("problem")
    assert [line["event"] for line in lines(out)] == ["problem"]
    assert not own.getvalue()


@pytest.mark.parametrize("field", ["prompt", "token_ids", "password", "messages", "stop_strings"])
def test_private_fields_are_withheld(field: str) -> None:
    out = io.StringIO()
    logs.setup("info", json=True, stream=out)
    logs.get_logger("a").info("oops", **{field: ["secret", "words"]})
    assert "secret" not in out.getvalue()
    assert lines(out)[0][field] == "<2 withheld>"


def test_counts_under_a_private_name_are_kept() -> None:
    out = io.StringIO()
    logs.setup("info", json=True, stream=out)
    logs.get_logger("a").info("step", tokens=12)
    assert lines(out)[0]["tokens"] == 12


def test_exceptions_are_one_json_line() -> None:
    out = io.StringIO()
    logs.setup("info", json=True, stream=out)
    try:
        raise ValueError("x")
    except ValueError:
        logs.get_logger("a").exception("failed")
    (line,) = lines(out)
    assert "ValueError: x" in str(line["exception"])


def test_a_second_setup_replaces_the_first() -> None:
    one, two = io.StringIO(), io.StringIO()
    logger = logs.get_logger("a")
    logs.setup("info", json=True, stream=one)
    logs.setup("info", json=True, stream=two)
    logger.info("hello")
    assert (one.getvalue(), len(lines(two))) == ("", 1)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="'loud'"):
        logs.setup("loud")


@pytest.mark.parametrize("as_json", [True, False])
def test_a_traceback_shows_no_local_variables(as_json: bool) -> None:
    out = io.StringIO()
    logs.setup("info", json=as_json, stream=out)
    tokens = [11110000 + 1111]
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logs.get_logger("a").exception("failed")
    assert "RuntimeError: boom" in out.getvalue()
    assert str(tokens[0]) not in out.getvalue()
