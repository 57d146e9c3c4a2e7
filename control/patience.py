# SPDX-License-Identifier: Apache-2.0
"""What an operation does while etcd is away: it waits, and says so."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from twinpool.control.flips import RETRY_SECONDS
from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger
from twinpool.v1 import control_pb2 as pb

T = TypeVar("T")

log = get_logger(__name__)


def is_away(error: TwinpoolError) -> bool:
    """Whether etcd could not be reached."""
    return error.reason == "STORE_UNAVAILABLE"


async def patiently(
    operation: pb.Operation,
    act: Callable[[], Awaitable[T]],
    event: str,
    passes: Callable[[TwinpoolError], bool] = is_away,
) -> T:
    """What ``act`` gives, tried anew however long its errors are of those that pass; others are raised. ``event``: for the log."""
    while True:
        try:
            return await act()
        except TwinpoolError as error:
            if not passes(error):
                raise
            log.warning(event, operation=operation.id, reason=error.reason)
            if operation.steps:
                operation.steps[-1].detail = f"etcd cannot be written: {error.reason}"
            await asyncio.sleep(RETRY_SECONDS)
