# SPDX-License-Identifier: Apache-2.0
"""How long a client may take nothing while something waits for it.

A client that is alive but does not read blocks the writes of its stream for as long as it likes: its pings are answered by its
transport. What waits is bounded in tokens (``router.max_buffered_tokens``), and here in time, so that such streams do not gather.
"""

import asyncio
import types
from collections.abc import Generator
from typing import Any

from twinpool.errors import TwinpoolError
from twinpool.router.hops import Write
from twinpool.v1 import inference_pb2 as pb


def patient(write: Write, seconds: float) -> Write:
    """``write``, which raises CLIENT_TOO_SLOW where one event takes longer than ``seconds``."""

    async def bounded(event: pb.GenerateResponse) -> None:
        writing = write(event).__await__()
        # As a rule the transport takes an event at once, which needs no timer.
        try:
            awaited = next(writing)
        except StopIteration:
            return
        try:
            async with asyncio.timeout(seconds):
                await _rest(writing, awaited)
        except TimeoutError:
            raise TwinpoolError(
                "CLIENT_TOO_SLOW",
                f"the client has read nothing for {seconds:g} s",
                metadata={"limit_seconds": seconds},
            ) from None

    return bounded


@types.coroutine
def _rest(begun: Generator[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Goes on with a coroutine that was begun and waits for ``awaited``."""
    try:
        while True:
            try:
                given = yield awaited
            except BaseException as error:
                awaited = begun.throw(error)
            else:
                awaited = begun.send(given)
    except StopIteration:
        return
