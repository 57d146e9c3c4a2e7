# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that cuts, stalls and heals the connections through it."""

import contextlib
import socket
import threading

CHUNK_BYTES = 65536


class TcpProxy:
    """Listens on ``endpoint``, a port of ``listen``, and forwards to ``target`` (host:port). All threads end with ``close``."""

    def __init__(self, target: str, listen: str = "127.0.0.1") -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server((listen, 0))
        self.endpoint = f"{listen}:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._open = threading.Event()
        self._open.set()
        self._cut = False
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def _spawn(self, target, *args) -> None:  # type: ignore[no-untyped-def]
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def cut(self) -> None:
        """Resets all connections and refuses new ones (they are accepted and closed at once)."""
        with self._lock:
            self._cut = True
            pairs = list(self._pairs)
        for pair in pairs:
            self._drop(pair)

    def stall(self) -> None:
        """Swallows nothing, delivers nothing: a black hole that keeps the connections open."""
        self._open.clear()

    def heal(self) -> None:
        """Works again; what was held up while stalled is delivered."""
        self._cut = False
        self._open.set()

    def close(self) -> None:
        """Ends everything."""
        self._closed = True
        self._open.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while not self._closed:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            self._spawn(self._connect, inner)

    def _connect(self, inner: socket.socket) -> None:
        self._open.wait()
        if self._cut or self._closed:
            inner.close()
            return
        try:
            outer = socket.create_connection(self._target, 5)
        except OSError:
            inner.close()
            return
        outer.settimeout(None)
        pair = (inner, outer)
        with self._lock:
            self._pairs.add(pair)
        self._spawn(self._pump, pair, inner, outer)
        self._spawn(self._pump, pair, outer, inner)

    def _pump(
        self, pair: tuple[socket.socket, socket.socket], source: socket.socket, sink: socket.socket
    ) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(CHUNK_BYTES):
                self._open.wait()
                sink.sendall(content)
        self._drop(pair)

    def _drop(self, pair: tuple[socket.socket, socket.socket]) -> None:
        with self._lock:
            self._pairs.discard(pair)
        for end in pair:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
