# SPDX-License-Identifier: Apache-2.0
"""Mooncake's traces (FAST'25): JSON lines with 512-token block ids, the last, partial block included."""

from pathlib import Path

import msgspec

from twinpool.control.replay.formats.lines import check_lengths, cut, decode_lines
from twinpool.control.replay.trace import Request, Trace

BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]


def read(path: Path, text: str) -> Trace:
    """Requests with recorded arrivals; none waits for another."""
    requests: list[Request] = []
    for number, line in decode_lines(path, text, _Line):
        # A few lines have no output: whoever asked stopped before the first token.
        output = max(1, line.output_length)
        check_lengths(path, number, line.input_length, output)
        runs, tail = cut(path, number, line.hash_ids, line.input_length, BLOCK_TOKENS)
        requests.append(
            Request(
                id=len(requests),
                input_length=line.input_length,
                output_length=output,
                arrival=line.timestamp / 1e3,
                runs=runs,
                tail_id=tail,
            )
        )
    return Trace(path.name, BLOCK_TOKENS, requests)
