# SPDX-License-Identifier: Apache-2.0
"""Reads trace files: one file a format beside this one."""

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from twinpool.control.replay.formats import agents, azure, mooncake, scaled, taubench
from twinpool.control.replay.trace import Trace, TraceError

Reader = Callable[[Path, str], Trace]

READERS: Mapping[str, Reader] = {
    "mooncake": mooncake.read,
    "scaled": scaled.read,
    "agents": agents.read,
    "taubench": taubench.read,
    "azure": azure.read,
}


def read_trace(path: Path, format: str = "auto") -> Trace:
    """Reads a trace. ``format`` is one of READERS or "auto". Raises TraceError."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from error
    if format == "auto":
        format = _guess(path, text)
    reader = READERS.get(format)
    if reader is None:
        raise TraceError(f"unknown format {format!r}; known: {', '.join(READERS)}")
    trace = reader(path, text)
    if not trace.requests:
        raise TraceError(f"{path}: no requests")
    return trace


def _guess(path: Path, text: str) -> str:
    head = text.split("\n", 1)[0].strip()
    if head.upper().startswith("TIMESTAMP,"):
        return "azure"
    try:
        first = json.loads(head)
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}: line 1: neither a JSON object nor a known header: {error}") from error
    fields = set(first) if isinstance(first, dict) else set()
    if {"requests", "block_size"} <= fields:
        return "agents"
    if {"after", "think_ms"} <= fields:
        return "scaled"
    if {"session_id", "turn"} <= fields:
        return "taubench"
    if {"hash_ids", "timestamp"} <= fields:
        return "mooncake"
    raise TraceError(f"{path}: line 1: fields {sorted(fields)} are of no known format")
