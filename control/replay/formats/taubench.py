# SPDX-License-Identifier: Apache-2.0
"""Tool-calling dialogues (tau-bench) with 16-token block ids; the arrival times are invented, sessions are real."""

from pathlib import Path

import msgspec

from twinpool.control.replay.formats.lines import check_lengths, cut, decode_lines
from twinpool.control.replay.trace import Request, Trace

BLOCK_TOKENS = 16


class _Line(msgspec.Struct):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: int


def read(path: Path, text: str) -> Trace:
    """Requests by arrival; each turn of a session waits for the one before it. The pauses are not recorded: they are what
    the recorded arrivals leave."""
    lines = sorted(decode_lines(path, text, _Line), key=lambda entry: (entry[1].timestamp, entry[0]))
    requests: list[Request] = []
    last: dict[int, int] = {}
    for number, line in lines:
        check_lengths(path, number, line.input_length, line.output_length)
        runs, tail = cut(path, number, line.hash_ids, line.input_length, BLOCK_TOKENS)
        arrival = line.timestamp / 1e3
        before = last.get(line.session_id)
        last[line.session_id] = len(requests)
        requests.append(
            Request(
                id=len(requests),
                input_length=line.input_length,
                output_length=line.output_length,
                arrival=arrival,
                runs=runs,
                tail_id=tail,
                session=str(line.session_id),
                after=before,
                think=0.0 if before is None else arrival - requests[before].arrival,
            )
        )
    return Trace(path.name, BLOCK_TOKENS, requests)
