# SPDX-License-Identifier: Apache-2.0
"""A node's workers leave when whoever stops the node asks them, and are waited for."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.waiting import until, until_told
from twinpool.worker.leave import asked_at, leave


async def test_who_asks_is_answered_when_the_worker_has_left(tmp_path: Path) -> None:
    told = asyncio.Event()
    path = tmp_path / "place" / "worker.sock"
    async with asked_at(path, told.set):
        asking = asyncio.create_task(asyncio.to_thread(leave, path.parent))
        await told.wait()
        assert not asking.done()
    assert await asking == 1
    assert not path.exists()


async def test_all_of_a_node_are_asked_at_once(tmp_path: Path) -> None:
    told: list[str] = []
    async with asked_at(tmp_path / "a.sock", lambda: told.append("a")):
        async with asked_at(tmp_path / "b.sock", lambda: told.append("b")):
            asking = asyncio.create_task(asyncio.to_thread(leave, tmp_path))
            await until(lambda: len(told) == 2)
        assert not asking.done()
    assert await asking == 2
    assert sorted(told) == ["a", "b"]


async def test_one_that_was_killed_is_not_waited_for_and_its_next_one_listens(tmp_path: Path) -> None:
    path = tmp_path / "worker.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(os.fspath(path))
    dead.close()
    assert path.exists()
    assert leave(tmp_path) == 0
    told = asyncio.Event()
    async with asked_at(path, told.set):
        asking = asyncio.create_task(asyncio.to_thread(leave, tmp_path))
        await told.wait()
    assert await asking == 1


def test_nobody_to_ask_is_no_fault(tmp_path: Path) -> None:
    assert leave(tmp_path / "none") == 0
    command = [sys.executable, "-m", "twinpool.worker.leave"]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    assert subprocess.run(command, env=env, check=False).returncode == 0


async def test_only_its_own_user_may_ask(tmp_path: Path) -> None:
    place = tmp_path / "place"
    async with asked_at(place / "worker.sock", lambda: None):
        assert place.stat().st_mode & 0o777 == 0o700

        async def there() -> bool:
            return (place / "worker.sock").exists()

        await until_told(there, 10)
