# SPDX-License-Identifier: Apache-2.0
"""How well the index knows one worker, for operators."""

from dataclasses import dataclass

from twinpool.ids import WorkerKey


@dataclass(frozen=True, slots=True)
class WorkerLocality:
    """``state``: "live", "resyncing", "unreachable" (asked in vain) or "segments" (it has no event stream, so etcd alone is
    followed). ``cause``: why it is not live. ``heard_seconds``: age of the last message; negative: none came."""

    key: WorkerKey
    state: str
    cause: str
    blocks: int
    next_sequence: int
    heard_seconds: float
    resyncs: int
    failures: int
