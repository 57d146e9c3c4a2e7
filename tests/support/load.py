# SPDX-License-Identifier: Apache-2.0
"""Clients that ask without a pause while a test does things to the cluster."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.asking import Outcome, ask
from tests.support.fleet import Fleet
from tests.support.steps import prompt

MORE_SECONDS = 120.0


class Load:
    """``outcomes``: of all clients, in the order of their ends."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self._stopped = False
        self._came = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []

    async def _ask(self, fleet: Fleet, stream: int, seed: int, longest: int, max_tokens: int) -> None:
        async with fleet.client() as client:
            for number in itertools.count():
                if self._stopped:
                    return
                tokens = prompt(1 + (37 * number + 61 * stream) % longest, seed + stream)
                self.outcomes.append(await ask(client, fleet.oracle, tokens, max_tokens))
                self._came.set()

    async def more(self, count: int) -> None:
        """Waits for so many further outcomes. Raises what a client raised."""
        wanted = len(self.outcomes) + count
        async with asyncio.timeout(MORE_SECONDS):
            while len(self.outcomes) < wanted:
                self._came.clear()
                came = asyncio.create_task(self._came.wait())
                await asyncio.wait([came, *self._clients], return_when=asyncio.FIRST_COMPLETED)
                came.cancel()
                for client in self._clients:
                    if client.done():
                        client.result()


@asynccontextmanager
async def under_load(
    fleet: Fleet, *, seed: int, longest: int, max_tokens: int, streams: int = 3
) -> AsyncIterator[Load]:
    """So many clients, with prompts of 1 to ``longest`` tokens; at the end each finishes what it has asked."""
    load = Load()
    load._clients += [
        asyncio.create_task(load._ask(fleet, stream, seed, longest, max_tokens)) for stream in range(streams)
    ]
    try:
        yield load
    finally:
        load._stopped = True
        await asyncio.gather(*load._clients)
