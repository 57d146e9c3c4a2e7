# SPDX-License-Identifier: Apache-2.0
"""Coding-agent sessions: one session a line, 64-token block ids local to the session as runs, nested sub-agents.

A session's requests follow each other: each waits for the answer before it, plus its think time. A sub-agent is a chain of its
own beside its parent's: it starts when the parent's request before it is answered; the parent's next think time already covers
what it waits for the sub-agent.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from twinpool.control.replay.formats.lines import check_lengths, decode_lines
from twinpool.control.replay.trace import NO_RUNS, Request, Trace, TraceError


class _Entry(msgspec.Struct):
    t: float
    type: str
    input: int = msgspec.field(name="in", default=0)
    out: int = 0
    runs: list[tuple[int, int]] = []
    think_time: float | None = None
    api_time: float = 0.0
    requests: list["_Entry"] = []


class _Session(msgspec.Struct):
    id: str
    block_size: int
    requests: list[_Entry]


@dataclass(slots=True)
class _Flat:
    """One request of a session; ``before`` is an index into the session's flat list."""

    entry: _Entry
    at: float
    before: int | None
    think: float


def read(path: Path, text: str) -> Trace:
    """All sessions, each from time 0 (see ``Trace.spread``). Sessions recorded twice count once."""
    requests: list[Request] = []
    seen: set[bytes] = set()
    block_tokens = 0
    lines = text.splitlines()
    for number, session in decode_lines(path, text, _Session):
        block_tokens = block_tokens or session.block_size
        if session.block_size != block_tokens:
            raise TraceError(f"{path}: line {number}: block_size {session.block_size}, before {block_tokens}")
        content = hashlib.sha256(lines[number - 1].partition('"requests"')[2].encode()).digest()
        if content in seen:
            continue
        seen.add(content)
        flat = sorted(enumerate(_flatten(session.requests)), key=lambda item: (item[1].at, item[0]))
        first = len(requests)
        places = {index: first + place for place, (index, _) in enumerate(flat)}
        for index, item in flat:
            requests.append(_request(path, number, session, len(seen), item, places, places[index]))
    return Trace(path.name, block_tokens, requests)


def _flatten(entries: list[_Entry]) -> list[_Flat]:
    found: list[_Flat] = []

    def walk(chain: list[_Entry], start: float, before: int | None, pause: float) -> None:
        previous: _Entry | None = None
        for entry in chain:
            if previous is not None:
                pause = max(0.0, entry.t - previous.t - previous.api_time)
            if entry.requests:
                walk(entry.requests, start + entry.t, before, pause)
                continue
            think = pause if entry.think_time is None else entry.think_time
            found.append(_Flat(entry, start + entry.t, before, 0.0 if before is None else think))
            before, previous = len(found) - 1, entry

    walk(entries, 0.0, None, 0.0)
    return found


def _request(
    path: Path, number: int, session: _Session, namespace: int, item: _Flat, places: dict[int, int], own: int
) -> Request:
    entry = item.entry
    output = max(1, entry.out)
    check_lengths(path, number, entry.input, output)
    runs = np.asarray(entry.runs, np.int64).reshape(-1, 2) if entry.runs else NO_RUNS
    if int(runs[:, 1].sum()) != entry.input // session.block_size:
        raise TraceError(f"{path}: line {number}: {int(runs[:, 1].sum())} block ids for {entry.input} tokens")
    return Request(
        id=own,
        input_length=entry.input,
        output_length=output,
        arrival=item.at,
        runs=runs,
        namespace=namespace,
        session=session.id,
        after=None if item.before is None else places[item.before],
        think=item.think,
    )
