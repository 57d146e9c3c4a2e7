# SPDX-License-Identifier: Apache-2.0
"""A kubectl whose ``port-forward`` goes to processes of this machine; all else it leaves to the real one.

There is no API server here that forwards ports. TWINPOOL_TEST_TARGETS names where "service/NAME" and "pod/NAME" are, as JSON;
TWINPOOL_TEST_KUBECTL is the real kubectl. It says what kubectl says, and forwards real connections.
"""

import contextlib
import json
import os
import re
import socket
import sys
import threading


def main() -> None:
    arguments = sys.argv[1:]
    if "port-forward" not in arguments:
        real = os.environ["TWINPOOL_TEST_KUBECTL"]
        os.execv(real, [real, *arguments])
    targets: dict[str, str] = json.loads(os.environ["TWINPOOL_TEST_TARGETS"])
    target, ports = arguments[-2:]
    local, _, remote = ports.rpartition(":")
    if target not in targets:
        kind, _, name = target.partition("/")
        sys.exit(f'Error from server (NotFound): {kind}s "{name}" not found')
    if targets[target] == "pending":
        sys.exit("error: unable to forward port because pod is not running. Current status=Pending")
    listener = socket.create_server(("127.0.0.1", int(local or 0)))
    port = listener.getsockname()[1]
    print(f"Forwarding from 127.0.0.1:{port} -> {remote}", flush=True)
    while True:
        connection, _ = listener.accept()
        host, _, there = targets[target].rpartition(":")
        assert re.fullmatch(r"\d+", there)
        onward = socket.create_connection((host, int(there)))
        for source, sink in ((connection, onward), (onward, connection)):
            threading.Thread(target=_copy, args=(source, sink), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    finally:
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
