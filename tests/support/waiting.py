# SPDX-License-Identifier: Apache-2.0
"""Waiting for what happens on the other side of a socket."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.002
ASK_SECONDS = 0.02
GIVE_UP_SECONDS = 60.0
"""How long a test waits for what must happen: far beyond what a loaded machine needs, since only a failing test waits so
long."""


async def until(condition: Callable[[], object], seconds: float = GIVE_UP_SECONDS) -> None:
    """Returns once ``condition()`` is true; raises TimeoutError after ``seconds``."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(POLL_SECONDS)


async def until_told(ask: Callable[[], Awaitable[object]], seconds: float = GIVE_UP_SECONDS) -> None:
    """As ``until``, of a condition that another process has to be asked for."""
    async with asyncio.timeout(seconds):
        while not await ask():  # noqa: ASYNC110 - it is another process's state
            await asyncio.sleep(ASK_SECONDS)


def until_sync(found: Callable[[], T], seconds: float = GIVE_UP_SECONDS) -> T:
    """What ``found`` returns once that is true, for tests without an event loop; raises TimeoutError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not there after {seconds} s")
        time.sleep(ASK_SECONDS)
    return value
