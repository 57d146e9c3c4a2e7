# SPDX-License-Identifier: Apache-2.0
"""Traces scaled down for small models: JSON lines with 16-token full-block ids; ``after`` and ``think_ms`` close the loop."""

from pathlib import Path

import msgspec

from twinpool.control.replay.formats.lines import check_lengths, cut, decode_lines
from twinpool.control.replay.trace import Request, Trace, TraceError

BLOCK_TOKENS = 16


class _Line(msgspec.Struct):
    id: int
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]
    session: str | None = None
    after: int | None = None
    think_ms: float = 0.0


def read(path: Path, text: str) -> Trace:
    """Requests with recorded arrivals and, in a session, the request that each waits for."""
    requests: list[Request] = []
    numbers: dict[int, int] = {}
    for number, line in decode_lines(path, text, _Line):
        check_lengths(path, number, line.input_length, line.output_length)
        if line.after is not None and line.after not in numbers:
            raise TraceError(f"{path}: line {number}: waits for {line.after}, which is not before it")
        runs, _ = cut(path, number, line.hash_ids, line.input_length, BLOCK_TOKENS)
        numbers[line.id] = len(requests)
        requests.append(
            Request(
                id=len(requests),
                input_length=line.input_length,
                output_length=line.output_length,
                arrival=line.timestamp / 1e3,
                runs=runs,
                session=line.session or "",
                after=None if line.after is None else numbers[line.after],
                think=line.think_ms / 1e3,
            )
        )
    return Trace(path.name, BLOCK_TOKENS, requests)
