# SPDX-License-Identifier: Apache-2.0
"""Wakes the coroutine that writes to a client, at once or when some more has gathered."""

import asyncio


class Waker:
    """For one waiting coroutine. ``pause_seconds``: how long what may wait gathers; 0: not at all."""

    __slots__ = ("_gathering", "_pause", "_set")

    def __init__(self, pause_seconds: float) -> None:
        self._pause = pause_seconds
        self._set = asyncio.Event()
        self._gathering: asyncio.TimerHandle | None = None

    def wake(self, at_once: bool = True) -> None:
        """There is something to write, or to raise. Not ``at_once``: it may wait for more to gather."""
        if at_once or not self._pause:
            self._set.set()
        elif self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(self._pause, self._gathered)

    async def wait(self) -> None:
        """Returns once there is something to do."""
        await self._set.wait()
        self._set.clear()

    def close(self) -> None:
        """Nobody waits any more."""
        if self._gathering is not None:
            self._gathering.cancel()

    def _gathered(self) -> None:
        self._gathering = None
        self._set.set()
