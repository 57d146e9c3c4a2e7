# SPDX-License-Identifier: Apache-2.0
"""What the last minute was like: percentiles of the times that clients see, and counts.

Times go into sketches. Counts are differences of the metrics, of which a copy is kept each 5 s: they cost a request nothing.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import Counter, Histogram
from prometheus_client.samples import Sample

from twinpool import metrics
from twinpool.config import MetricsConfig
from twinpool.sketch import SLOT_SECONDS, WINDOW_SECONDS, Sketch, summary
from twinpool.v1 import telemetry_pb2 as pb

_COUNTED: Final = {
    "prompt_tokens": metrics.ROUTER_PROMPT_TOKENS,
    "generation_tokens": metrics.ROUTER_GENERATION_TOKENS,
    "query_tokens": metrics.ROUTER_QUERY_TOKENS,
    "cached_tokens": metrics.ROUTER_CACHED_TOKENS,
}
_BY_REASON: Final = {"ended": metrics.ROUTER_REQUESTS, "refused": metrics.ROUTER_REJECTIONS}

Key = tuple[str, str]
PoolModel = tuple[str, str]


class Recent:
    """One a router. On its event loop."""

    def __init__(self, config: MetricsConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """``config``: ``short_prompt_tokens``: longest prompt of a request that counts as short."""
        self._config = config
        self._clock = clock
        self.ttft, self.itl, self.short_ttft = Sketch(clock), Sketch(clock), Sketch(clock)
        # Looking them up by labels costs more than counting does.
        self._of_pool: dict[PoolModel, tuple[Histogram, Histogram]] = {}
        self._copies: deque[tuple[float, Mapping[Key, float]]] = deque()
        self.watch()

    def first_token(self, seconds: float, prompt_tokens: int, pool: PoolModel = ("", "")) -> None:
        """A request's first token is about to be written, so long after the request's arrival. ``pool``: pool and model."""
        metrics.ROUTER_TTFT.observe(seconds)
        self._times(pool)[0].observe(seconds)
        self.ttft.add(seconds)
        if prompt_tokens <= self._config.short_prompt_tokens:
            metrics.ROUTER_SHORT_TTFT.observe(seconds)
            self.short_ttft.add(seconds)

    def gave_way(self, prompt_tokens: int, to_tokens: int) -> None:
        """A request was preempted for another one; both by the lengths of their prompts."""
        most = self._config.short_prompt_tokens
        kinds = ("long" if tokens > most else "short" for tokens in (prompt_tokens, to_tokens))
        metrics.ROUTER_PREEMPTIONS.labels("_by_".join(kinds)).inc()

    def next_tokens(self, seconds: float, pool: PoolModel = ("", "")) -> None:
        """Further tokens are about to be written, so long after the ones before. ``pool``: pool and model."""
        metrics.ROUTER_ITL.observe(seconds)
        self._times(pool)[1].observe(seconds)
        self.itl.add(seconds)

    def _times(self, pool: PoolModel) -> tuple[Histogram, Histogram]:
        """To the first token, and between tokens."""
        if pool not in self._of_pool:
            self._of_pool[pool] = (
                metrics.ROUTER_POOL_TTFT.labels(*pool),
                metrics.ROUTER_POOL_ITL.labels(*pool),
            )
        return self._of_pool[pool]

    def watch(self) -> None:
        """Copies the counts if that is due. To be called now and then."""
        now = self._clock()
        if self._copies and now < self._copies[-1][0] + SLOT_SECONDS:
            return
        self._copies.append((now, _counts()))
        while len(self._copies) > 1 and self._copies[1][0] <= now - WINDOW_SECONDS:
            self._copies.popleft()

    def tell(self, message: pb.RouterTelemetry) -> None:
        """Fills in what the last minute was like."""
        began, before = self._copies[0]
        counts = _counts()
        message.window.FromNanoseconds(int((self._clock() - began) * 1e9))
        for name in _COUNTED:
            setattr(message, name, int(counts[name, ""] - before.get((name, ""), 0.0)))
        for name in _BY_REASON:
            told = getattr(message, name)
            for (kind, reason), count in sorted(counts.items()):
                if kind == name and (new := int(count - before.get((kind, reason), 0.0))):
                    told.append(pb.ReasonCount(reason=reason, count=new))
        for field, sketch in (
            ("time_to_first_token", self.ttft),
            ("inter_token_latency", self.itl),
            ("short_time_to_first_token", self.short_ttft),
        ):
            told_sketch = sketch.message()
            getattr(message, field).CopyFrom(told_sketch)
            getattr(message, f"{field}_summary").CopyFrom(summary([told_sketch]))


def _counts() -> dict[Key, float]:
    """The counters as they stand, by name and reason."""
    found: dict[Key, float] = {}
    for name, counter in (*_COUNTED.items(), *_BY_REASON.items()):
        for sample in _samples(counter):
            key = (name, sample.labels.get("reason", ""))
            found[key] = found.get(key, 0.0) + sample.value
    return found


def _samples(counter: Counter) -> Iterable[Sample]:
    return (
        sample for family in counter.collect() for sample in family.samples if sample.name.endswith("_total")
    )
