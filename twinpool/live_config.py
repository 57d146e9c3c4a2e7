# SPDX-License-Identifier: Apache-2.0
"""The configuration that a process runs: what it was started with, and over it what operators have applied since.

What was applied is one key in etcd. It is taken up as a whole or refused as a whole. Whoever reads a section through
``LiveConfig.following`` at each use has the present values; who has copied one, as the core does, is told by ``on_change``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, cast

from google.protobuf.message import DecodeError

from twinpool import logs, metrics
from twinpool.config import TwinpoolConfig, Values, overlay, sections
from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger
from twinpool.store import Batch, Keys, PrefixWatch, Store
from twinpool.v1 import control_pb2 as pb

log = get_logger(__name__)

TEXT_CHARS_MAX: Final = 1000
"""Longest cause of a refusal in a record; what is longer is cut."""

Prepare = Callable[[TwinpoolConfig], Callable[[], None]]
"""Looks at a configuration and returns what takes it up, which must not fail. Raises TwinpoolError to refuse it."""


class LiveConfig:
    """One a process. On its event loop, but for reading."""

    def __init__(self, base: TwinpoolConfig) -> None:
        """``base``: what the process was started with."""
        self.base = base
        self.present = base
        self.values: Values = {}
        """What was applied."""
        self.generation = 0
        self.refused = 0
        """The last generation that was refused since one was taken; 0: none."""
        self.refusal = ""
        self._prepares: list[Prepare] = []
        parts = {name: _Following(partial(self._section, name)) for name in sections()}
        self._following = _Following(lambda: self.present, parts)

    def _section(self, name: str) -> object:
        return getattr(self.present, name)

    @property
    def following(self) -> TwinpoolConfig:
        """Reads as the configuration in force; so does each section that is taken from it and kept."""
        return cast(TwinpoolConfig, self._following)

    def on_change(self, prepare: Prepare) -> None:
        """``prepare`` is asked before another configuration is taken up; see there."""
        self._prepares.append(prepare)

    def take(self, generation: int, values: Values) -> bool:
        """Takes a generation up as a whole; whether it did. One that is refused changes nothing but ``refused`` and ``refusal``."""
        try:
            config = overlay(self.base, values)
            commits = [prepare(config) for prepare in self._prepares]
        except TwinpoolError as error:
            self.refused, self.refusal = generation, error.message
            metrics.CONFIG_REFUSALS.inc()
            log.error("config_refused", generation=generation, running=self.generation, detail=self.refusal)
            return False
        self.present, self.values, self.generation = config, dict(values), generation
        self.refused, self.refusal = 0, ""
        for commit in commits:
            commit()
        metrics.CONFIG_GENERATION.set(generation)
        log.info("config_applied", generation=generation, keys=sorted(values))
        return True


class _Following:
    """Attributes of an object that takes another's place at times."""

    __slots__ = ("_parts", "_present")

    def __init__(self, present: Callable[[], object], parts: Mapping[str, object] | None = None) -> None:
        """``parts``: attributes that are followed themselves."""
        self._present = present
        self._parts = parts or {}

    def __getattr__(self, name: str) -> Any:
        return self._parts[name] if name in self._parts else getattr(self._present(), name)


def set_log_level(config: TwinpoolConfig) -> Callable[[], None]:
    """What every process takes up."""
    return lambda: logs.set_level(config.log.level)


class ConfigFollower:
    """Follows the key and hands what it holds to a ``LiveConfig``. On one event loop.

    Without etcd, and where an etcd has lost its data, what was taken last stays in force.
    """

    def __init__(self, live: LiveConfig, store: Store, cluster: str) -> None:
        self.live = live
        self.lost = False
        """Whether the key was there and is gone."""
        self._on_state: Callable[[pb.ConfigState], object] = lambda _state: None
        self.applied = pb.AppliedConfig()
        """What the key holds, taken or refused; generation 0: nothing."""
        self._key = Keys(cluster).applied_config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._synced = asyncio.Event()
        self._watch = PrefixWatch(store, Keys(cluster).config, self._from_thread, name="config")

    @property
    def state(self) -> pb.ConfigState:
        """As it stands in the records of processes."""
        live = self.live
        return pb.ConfigState(
            generation=live.generation, refused=live.refused, refusal=live.refusal[:TEXT_CHARS_MAX]
        )

    def tell(self, on_state: Callable[[pb.ConfigState], object]) -> None:
        """``on_state`` is told what the process runs, now and each time that has changed."""
        self._on_state = on_state
        on_state(self.state)

    async def start(self, seconds: float) -> None:
        """Begins to follow. Returns once the key was read and taken, or after ``seconds``."""
        self._loop = asyncio.get_running_loop()
        self._watch.start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._synced.wait(), seconds)

    async def stop(self) -> None:
        """Ends it. Idempotent."""
        await asyncio.to_thread(self._watch.close)

    def _from_thread(self, batch: Batch) -> None:
        """On the watch's thread."""
        assert self._loop is not None, "a batch before start()"
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._apply, batch)

    def _apply(self, batch: Batch) -> None:
        for change in batch.changes:
            if change.key != self._key:
                continue
            self.lost = change.now is None
            if change.now is not None:
                self._read(change.now.value)
        self._synced.set()

    def _read(self, value: bytes) -> None:
        try:
            applied = pb.AppliedConfig.FromString(value)
            values = values_of(applied)
        except (DecodeError, ValueError):
            metrics.MEMBERSHIP_INVALID_RECORDS.labels("decode").inc()
            log.error("config_not_read", key=self._key)
            return
        self.applied = applied
        self.live.take(applied.generation, values)
        self._on_state(self.state)


def values_of(applied: pb.AppliedConfig) -> dict[str, object]:
    """Its keys and their values. Raises ValueError for a value that is not JSON."""
    try:
        return {each.key: json.loads(each.value) for each in applied.values}
    except RecursionError:
        raise ValueError("a value is nested too deeply") from None
