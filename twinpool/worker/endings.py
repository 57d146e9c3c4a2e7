# SPDX-License-Identifier: Apache-2.0
"""Ends the parts of a worker: one that does not end properly must not keep the others from ending."""

import contextlib
from collections.abc import Awaitable, Iterator

from twinpool.logs import get_logger

log = get_logger(__name__)


async def quietly(part: str, ending: Awaitable[object]) -> None:
    """Awaits the end of a part; what it raises is logged."""
    with logged(part):
        await ending


@contextlib.contextmanager
def logged(part: str) -> Iterator[None]:
    """What is raised inside is logged."""
    try:
        yield
    except Exception:
        log.exception("stop_failed", part=part)
