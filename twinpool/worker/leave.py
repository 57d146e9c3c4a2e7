# SPDX-License-Identifier: Apache-2.0
"""Lets whoever runs a node of Ray ask the workers there to leave, and wait for it: ``python -m twinpool.worker.leave``.

Ray ends the processes of a node that is told to stop at once, without a drain. So a worker with the options of its node listens
on a socket of its file system: a connection asks it to leave, and is closed when it has left.
"""

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from twinpool.logs import get_logger

log = get_logger(__name__)


def directory() -> Path:
    """Where the sockets of this node's workers are."""
    return Path(tempfile.gettempdir()) / "twinpool-leave"


@contextlib.asynccontextmanager
async def asked_at(path: Path | None, told: Callable[[], None]) -> AsyncIterator[None]:
    """While it is entered, ``told`` is called for each connection to ``path``; they are closed at its end. None: nobody can ask."""
    if path is None:
        yield
        return
    waiting: list[asyncio.StreamWriter] = []

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        log.info("asked_to_leave_by_node")
        waiting.append(writer)
        told()

    _make_room(path)
    server = await asyncio.start_unix_server(connected, path)
    try:
        yield
    finally:
        server.close()
        for writer in waiting:
            writer.close()
        _remove(path)


def _make_room(path: Path) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    # Of one that was killed.
    _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def leave(place: Path) -> int:
    """Asks every worker that listens below ``place``, returns once they have left; how many there were."""
    asked: list[socket.socket] = []
    for path in sorted(place.glob("*.sock")):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(os.fspath(path))
        except OSError:  # a worker that was killed has left its socket
            connection.close()
        else:
            asked.append(connection)
    for connection in asked:
        with connection, contextlib.suppress(OSError):
            while connection.recv(1):
                pass
    return len(asked)


if __name__ == "__main__":
    leave(directory())
    sys.exit(0)
