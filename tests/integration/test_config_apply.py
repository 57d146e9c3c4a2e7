# SPDX-License-Identifier: Apache-2.0
"""Operators change the configuration of a real cluster while it runs: two routers, two workers, a control process, the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.control import KEYS, Control
from tests.support.fleet import Fleet, running_fleet
from tests.support.routers import Routers
from tests.support.waiting import until
from twinpool.client import Client, request
from twinpool.errors import TwinpoolError
from twinpool.v1.control_pb2 import WorkerRecord

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

NAMES = ("router-a", "router-b")


@pytest.fixture(scope="module")
def fleet(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    workers = {"prefill-0": "prefill", "decode-0": "decode"}
    directory = tmp_path_factory.mktemp("config-apply")
    with running_fleet(directory, checkpoints["deepseek_v3"], workers, {"log.format": "json"}) as running:
        yield running


@pytest.fixture(scope="module")
def routers(fleet: Fleet) -> Iterator[Routers]:
    made = Routers(fleet, {"log.format": "json"})
    try:
        for name in NAMES:
            asyncio.run(made.start(name))
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def control(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    made = Control(fleet, tmp_path_factory.mktemp("control"))
    made.start()
    try:
        asyncio.run(made.serving())
        yield made
    finally:
        made.kill()


async def refusal(endpoint: str, max_tokens: int) -> str:
    """What a router says to a request of so many tokens; "": it serves it."""
    async with Client(endpoint) as client:
        try:
            await client.complete(request([5] * 20, max_tokens=max_tokens, temperature=0.0), timeout=60)
        except TwinpoolError as error:
            return f"{error.reason}: {error.message}"
    return ""


def incarnations(fleet: Fleet) -> dict[str, int]:
    """Of all that is registered."""
    items = fleet.store.list_prefix(KEYS.workers()).items
    records = [WorkerRecord.FromString(item.value) for item in items.values()]
    return {record.worker.name: record.worker.incarnation for record in records}


def applied_in_logs(fleet: Fleet) -> list[tuple[str, int]]:
    """(file, generation) of each generation that a process has said it took."""
    found = []
    for path in sorted(fleet.directory.glob("*.log")):
        for line in path.read_text().splitlines():
            if '"config_applied"' in line:
                found.append((path.stem, int(json.loads(line)["generation"])))
    return found


async def test_limits_and_the_log_level_change_while_all_of_it_runs(
    fleet: Fleet, routers: Routers, control: Control, tmp_path: Path
) -> None:
    before = incarnations(fleet), {name: record.incarnation for name, record in routers.records.items()}
    file = tmp_path / "change.yaml"
    file.write_text("router:\n  max_output_tokens: 5\nlog:\n  level: warning\n")

    # Looked at first, and nothing happens.
    code, shown, _ = await control.run("config", "apply", "--file", str(file), "--dry-run")
    assert (code, shown["generation"]) == (0, 0)
    assert {each["key"]: each["after"] for each in shown["changes"]} == {
        "log.level": "warning",
        "router.max_output_tokens": 5,
    }
    for bad, words in (
        (("--set", "router.max_output_tokens=5", "--set", "kv.num_blocks=9"), "needs a restart"),
        (("--set", "router.max_output_tokens=0"), "router.max_output_tokens = 0"),
        (("--set", "router.max_output=5"), "there is no such key"),
    ):
        code, _, error = await control.run("config", "apply", *bad, "--yes")
        assert code == 2
        assert words in error
        assert "CONFIG_REFUSED" in error
    assert fleet.store.get(KEYS.applied_config) is None
    assert [await refusal(routers.endpoint(name), 8) for name in NAMES] == ["", ""]

    # Then applied: both routers refuse, nobody was restarted, and everybody says that it runs it.
    code, _, error = await control.run("config", "apply", "--file", str(file), "--yes", "--wait")
    assert code == 0, error
    assert "5 processes run generation 1" in error
    for name in NAMES:
        assert "stop.max_tokens is 8; the limit is 1 to 5" in await refusal(routers.endpoint(name), 8)
        assert await refusal(routers.endpoint(name), 5) == ""
        assert routers.metric(name, "twinpool_config_generation") == 1
    assert fleet.metric("decode-0", "twinpool_config_generation") == 1
    assert incarnations(fleet) == before[0]
    code, shown, _ = await control.run("config", "live")
    assert {(each["key"], each["value"], each["source"]) for each in shown["keys"]} == {
        ("log.level", "warning", "applied"),
        ("router.max_output_tokens", 5, "applied"),
    }
    assert {(each["name"], each["generation"]) for each in shown["processes"]} == {
        (name, 1) for name in (*NAMES, "prefill-0", "decode-0", control.endpoint)
    }

    # One that starts later begins with it, and one change more reaches all.
    await routers.start("router-late")
    assert "the limit is 1 to 5" in await refusal(routers.endpoint("router-late"), 8)
    assert applied_in_logs(fleet) == [], "it is said at level info"
    code, _, error = await control.run("config", "apply", "--reset", "log.level", "--yes", "--wait")
    assert code == 0, error
    await until(lambda: len(applied_in_logs(fleet)) == 5)
    assert {generation for _, generation in applied_in_logs(fleet)} == {2}
    assert "the limit is 1 to 5" in await refusal(routers.endpoint("router-a"), 8)
    code, _, error = await control.run("config", "apply", "--reset", "*", "--yes", "--wait")
    assert code == 0, error
    assert await refusal(routers.endpoint("router-late"), 8) == ""
    assert {name: routers.records[name].incarnation for name in NAMES} == before[1]
    assert all(routers.alive(name) for name in NAMES)
    code, events, _ = await control.run("events")
    assert [each["reason"] for each in events].count("ConfigApplied") == 3
    await fleet.assert_quiet()
