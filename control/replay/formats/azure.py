# SPDX-License-Identifier: Apache-2.0
"""Azure's LLM inference traces (Splitwise, ISCA'24): arrival, context and generated tokens; nothing about prefixes."""

import csv
import datetime
import io
from pathlib import Path

from twinpool.control.replay.trace import Request, Trace, TraceError

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(path: Path, text: str) -> Trace:
    """Requests with recorded arrivals; no two share a prefix."""
    rows = csv.DictReader(io.StringIO(text))
    if rows.fieldnames is None or not set(_COLUMNS) <= set(rows.fieldnames):
        raise TraceError(f"{path}: columns {rows.fieldnames}, expected {', '.join(_COLUMNS)}")
    requests: list[Request] = []
    start = 0.0
    for row in rows:
        try:
            at, context, generated = (
                _seconds(row["TIMESTAMP"]),
                int(row["ContextTokens"]),
                int(row["GeneratedTokens"]),
            )
        except (ValueError, TypeError) as error:
            raise TraceError(f"{path}: line {rows.line_num}: {error}") from error
        if not requests:
            start = at
        requests.append(
            Request(
                id=len(requests),
                input_length=max(1, context),
                output_length=max(1, generated),
                arrival=at - start,
            )
        )
    return Trace(path.name, 0, requests)


def _seconds(text: str) -> float:
    # Seven digits of a second: one more than datetime reads.
    whole, _, fraction = text.partition(".")
    moment = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC)
    return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
