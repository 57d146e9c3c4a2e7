# SPDX-License-Identifier: Apache-2.0
"""Wakes a thread that polls sockets."""

import contextlib
import socket
from typing import Final

_READ_BYTES: Final = 4096


class Waker:
    """``wake`` may be called from any thread and costs a system call only if the sleeper has not been woken yet.

    The sleeper polls ``fileno()``, calls ``clear()`` and then looks at whatever it was woken for, in this order.
    """

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._woken = False

    def fileno(self) -> int:
        """What to poll for reading."""
        return self._receiver.fileno()

    def wake(self) -> None:
        """Ends the sleeper's present or next poll."""
        if not self._woken:
            self._woken = True
            try:
                self._sender.send(b"\0")
            except OSError:
                # Closed: nobody sleeps here any more. A full buffer can't be: it holds at most one byte a thread.
                return

    def clear(self) -> None:
        """For the sleeper: from now on ``wake`` wakes again."""
        with contextlib.suppress(BlockingIOError):
            self._receiver.recv(_READ_BYTES)
        # Last: a wake in between sends nothing, and what it is for is seen after this. The other way round its byte would be
        # read here while it counts as woken, and no later wake would send one.
        self._woken = False

    def close(self) -> None:
        """Closes both ends."""
        self._receiver.close()
        self._sender.close()
