# SPDX-License-Identifier: Apache-2.0
"""What each tenant has used: counted when it is sent, so that an answer which goes on elsewhere is counted once.

Totals are for ``GetUsage``, counters for Prometheus, and, if the operator wants it, a line of JSON a stream goes to a file that he can
bill by. None of them holds text or tokens.
"""

import json
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO

from prometheus_client import Counter

from twinpool import metrics
from twinpool.logs import get_logger
from twinpool.v1 import inference_pb2 as pb

log = get_logger(__name__)

Write = Callable[[pb.GenerateResponse], Awaitable[None]]

OTHER = "other"
"""Label of tenants that the operator has not named: their names are the clients' own, and without bound."""


@dataclass(slots=True)
class Totals:
    """Requests and tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@cache
def _requests(label: str) -> Counter:
    """A label's counter of requests. Looking it up costs more than counting does; labels are bounded by what operators name."""
    return metrics.ROUTER_TENANT_REQUESTS.labels(label)


@cache
def _tokens(label: str, kind: str) -> Counter:
    """A label's counter of tokens of a kind: prompt, cached or completion."""
    return metrics.ROUTER_TENANT_TOKENS.labels(label, kind)


class UsageBook:
    """One a router. ``known``: whether the operator has named a tenant."""

    def __init__(self, path: str, known: Callable[[str], bool], max_tenants: int) -> None:
        """``path`` is appended to; "": no file. Raises OSError. Of more than ``max_tenants`` the rest share one entry."""
        self._known = known
        self._max_tenants = max_tenants
        self._totals: dict[str, Totals] = {}
        # It stays open as long as the router runs.
        self._file: IO[str] | None = Path(path).open("a", buffering=1) if path else None  # noqa: SIM115
        self._lock = threading.Lock()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def totals(self, tenant: str) -> Totals:
        """What a tenant has used."""
        return self._totals.get(self._entry(tenant), Totals())

    def metered(self, tenant: str, write: Write) -> "Meter":
        """Counts what goes to ``write``."""
        return Meter(self, tenant, write)

    def add(self, tenant: str, used: Totals) -> None:
        """Adds to what a tenant has used."""
        total = self._totals.setdefault(self._entry(tenant), Totals())
        label = tenant if self._known(tenant) else OTHER
        total.requests += used.requests
        total.prompt_tokens += used.prompt_tokens
        total.cached_tokens += used.cached_tokens
        total.completion_tokens += used.completion_tokens
        if used.requests:
            _requests(label).inc(used.requests)
        if used.prompt_tokens:
            _tokens(label, "prompt").inc(used.prompt_tokens)
        if used.cached_tokens:
            _tokens(label, "cached").inc(used.cached_tokens)
        if used.completion_tokens:
            _tokens(label, "completion").inc(used.completion_tokens)

    @property
    def recording(self) -> bool:
        """Whether there is a file."""
        return self._file is not None

    def record(self, line: dict[str, object]) -> None:
        """Appends a line to the file."""
        if self._file is None:
            return
        try:
            with self._lock:
                self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            # A full disk must not end answers.
            log.error("usage_log_failed", error=str(error))

    def _entry(self, tenant: str) -> str:
        full = len(self._totals) >= self._max_tenants and tenant not in self._totals
        return OTHER if full and not self._known(tenant) else tenant


class Meter:
    """Counts one stream. To be ended, however the stream ends."""

    def __init__(self, book: UsageBook, tenant: str, write: Write) -> None:
        self._book = book
        self._tenant = tenant
        self._write = write
        self._used = Totals()
        self._request_id = self._model = ""
        self._ended = "incomplete"
        self.resumed = False
        """Whether the stream reads an answer that was counted as a request where it began."""
        self.counted: dict[int, int] = {}
        """Of each choice, the offset behind the tokens that are counted: what a client left unread comes twice."""

    async def write(self, event: pb.GenerateResponse) -> None:
        """Sends an event, then counts it."""
        await self._write(event)
        kind = event.WhichOneof("event")
        if kind == "tokens":
            self._count(event.tokens)
        elif kind == "finished":
            usage = event.finished.usage
            self._used.cached_tokens = max(usage.cached_tokens, usage.decode_cached_tokens)
            self._ended = "finished"
        elif kind == "started":
            self._request_id, self._model = event.started.request_id, event.started.model
            self._used.requests, self._used.prompt_tokens = 1, event.started.prompt_tokens

    def _count(self, tokens: pb.GenerateTokens) -> None:
        end = tokens.offset + len(tokens.token_ids)
        counted = self.counted.get(tokens.index, tokens.offset)
        self.counted[tokens.index] = max(counted, end)
        self._used.completion_tokens += max(0, end - counted)

    def end(self) -> None:
        """The stream has ended."""
        if self.resumed:
            self._used.requests = self._used.prompt_tokens = self._used.cached_tokens = 0
        if self._used == Totals():
            return
        self._book.add(self._tenant, self._used)
        if not self._book.recording:
            return
        line: dict[str, object] = {
            "time": time.time(),
            "tenant": self._tenant,
            "request_id": self._request_id,
        }
        self._book.record(line | {"model": self._model, "ended": self._ended, **asdict(self._used)})
