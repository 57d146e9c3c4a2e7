# SPDX-License-Identifier: Apache-2.0
"""The event loop of a process, and its signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs ``main`` to its end on uvloop, or on asyncio's own loop where uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def stop_event() -> asyncio.Event:
    """An event that SIGINT or SIGTERM sets. A second signal of the same kind ends the process as usual.

    Call it in the main thread, inside a running loop.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        stopped.set()
        loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return stopped
