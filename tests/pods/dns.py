# SPDX-License-Identifier: Apache-2.0
"""The DNS of a cluster: ``python -m tests.pods.dns ADDRESS FILE`` answers with what a JSON file says, {name: [addresses]}.

It reads the file for each question, so that a change counts at once.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import sys
from pathlib import Path
from typing import Final

_A: Final = 1
_IN: Final = 1
_NO_NAME: Final = 3
_SECONDS: Final = 5
"""For how long an answer may be kept, as with CoreDNS."""


def question(packet: bytes) -> tuple[str, int, bytes]:
    """The name and the kind that are asked for, and the question's own bytes."""
    at, labels = 12, []
    while length := packet[at]:
        labels.append(packet[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    (kind,) = struct.unpack_from("!H", packet, at + 1)
    return ".".join(labels).lower(), kind, packet[12 : at + 5]


def answer(packet: bytes, zone: dict[str, list[str]]) -> bytes:
    """What is said to a question. Raises what a packet that is none brings."""
    name, kind, asked = question(packet)
    # IPv4 alone: of everything else a name that is known has none.
    found = list(zone.get(name, ())) if kind == _A else []
    random.shuffle(found)
    flags = 0x8580 | (0 if name in zone else _NO_NAME)
    told = packet[:2] + struct.pack("!HHHHH", flags, 1, len(found), 0, 0) + asked
    for address in found:
        told += struct.pack("!HHHIH", 0xC00C, _A, _IN, _SECONDS, 4) + socket.inet_aton(address)
    return told


def serve(address: str, file: Path) -> None:
    """Answers until it is killed."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        while True:
            packet, sender = server.recvfrom(4096)
            server.sendto(answer(packet, json.loads(file.read_text())), sender)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
