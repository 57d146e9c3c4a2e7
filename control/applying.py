# SPDX-License-Identifier: Apache-2.0
"""What operators change of the configuration of running processes: one key in etcd, written whole or not at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.message import DecodeError

from twinpool.config import (
    TwinpoolConfig,
    Values,
    check_reloadable,
    fields,
    overlay,
    reloadable,
    source_of,
    value_at,
)
from twinpool.control.events import EventLog
from twinpool.control.view import ClusterView
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.live_config import ConfigFollower, values_of
from twinpool.logs import get_logger
from twinpool.store import Item, Keys, Store
from twinpool.v1 import control_pb2 as pb

ALL: Final = "*"
"""Resets every key."""

VALUE_CHARS_MAX: Final = 4096
"""Longest value of a key, as JSON."""

WATCH_SECONDS: Final = 1.0
"""How often the records of processes are looked at for refusals."""

log = get_logger(__name__)


class ConfigDesk:
    """One a control process. On its event loop."""

    def __init__(
        self,
        follower: ConfigFollower,
        store: Store,
        cluster: str,
        view: ClusterView,
        events: EventLog,
        pool: str,
    ) -> None:
        """``pool``: the one whose events name what happens to the configuration."""
        self._live, self._follower = follower.live, follower
        self._store, self._view, self._events, self._pool = store, view, events, pool
        self._key = Keys(cluster).applied_config
        self._told: set[tuple[str, int]] = set()
        self.endpoint = ""
        """Address of this process, once it is known."""

    def get(self) -> pb.GetConfigResponse:
        """What is in force, and who runs it."""
        live, allowed = self._live, set(reloadable())
        answer = pb.GetConfigResponse(processes=self._processes())
        if self._follower.applied.generation:
            answer.applied.CopyFrom(self._follower.applied)
        for section, name, _ in fields():
            key = f"{section}.{name}"
            answer.keys.add(
                key=key,
                value=_json(value_at(live.present, key)),
                source=source_of(live.base, live.values, key),
                reloadable=key in allowed,
            )
        return answer

    async def apply(self, request: pb.ApplyConfigRequest) -> pb.ApplyConfigResponse:
        """Changes what is asked for, or nothing. Raises CONFIG_REFUSED, CONFIG_CHANGED, STORE_UNAVAILABLE."""
        item = await asyncio.to_thread(self._store.get, self._key)
        applied = pb.AppliedConfig() if item is None else _read(item)
        if request.HasField("generation") and request.generation != applied.generation:
            raise TwinpoolError(
                "CONFIG_CHANGED",
                f"generation {applied.generation} is in force, and the change was made for generation {request.generation}",
            )
        before = _values(item, applied)
        after = _without(before, request.reset) | _asked(request, before)
        now, then = self._in_force(before), self._checked(after)
        changes = [
            pb.ConfigChange(key=key, before=_shown(now, before, key), after=_shown(then, after, key))
            for key in sorted(before.keys() | after.keys())
            if (key in before) != (key in after) or value_at(now, key) != value_at(then, key)
        ]
        if request.dry_run or not changes:
            return pb.ApplyConfigResponse(generation=applied.generation, changes=changes)
        written = pb.AppliedConfig(
            generation=applied.generation + 1,
            values=[pb.ConfigValue(key=key, value=_json(value_at(then, key))) for key in sorted(after)],
        )
        written.at.GetCurrentTime()
        await self._write(item, written)
        text = ", ".join(f"{change.key}: {change.before} to {change.after}" for change in changes)
        self._events.record("ConfigApplied", f"generation {written.generation}: {text}", pool=self._pool)
        return pb.ApplyConfigResponse(generation=written.generation, changes=changes)

    async def watch(self) -> None:
        """While this process leads, until it is cancelled: tells of each process that refuses what was applied, once; gives an etcd
        that has lost its data the key again."""
        while True:
            if self._follower.lost:
                await self._restore()
            for process in self._processes():
                refused = process.state.refused
                if not refused or (process.name, refused) in self._told:
                    continue
                self._told.add((process.name, refused))
                text = f"{process.kind} {process.name} keeps generation {process.state.generation} and refuses {refused}"
                self._events.record(
                    "ConfigRefused",
                    f"{text}: {process.state.refusal}",
                    pool=self._pool,
                    subject=process.name if process.kind == "worker" else "",
                    warning=True,
                )
            await asyncio.sleep(WATCH_SECONDS)

    async def _restore(self) -> None:
        try:
            if await asyncio.to_thread(
                self._store.create, self._key, self._follower.applied.SerializeToString()
            ):
                log.warning("config_restored", generation=self._follower.applied.generation)
        except TwinpoolError as error:
            log.warning("config_not_restored", reason=error.reason)

    async def _write(self, item: Item | None, applied: pb.AppliedConfig) -> None:
        value = applied.SerializeToString()
        if item is None:
            done = await asyncio.to_thread(self._store.create, self._key, value)
        else:
            done = await asyncio.to_thread(self._store.replace, self._key, value, item.mod_revision)
        if not done:
            raise TwinpoolError("CONFIG_CHANGED", "somebody else has applied another change at the same time")

    def _in_force(self, values: Values) -> TwinpoolConfig:
        """What holds before a change. What this process refuses, of another release maybe, can be changed all the same."""
        try:
            return overlay(self._live.base, values)
        except ConfigError:
            return self._live.present

    def _checked(self, values: Values) -> TwinpoolConfig:
        try:
            return overlay(self._live.base, values)
        except ConfigError as error:
            raise TwinpoolError("CONFIG_REFUSED", error.message, metadata=error.metadata) from None

    def _processes(self) -> list[pb.ConfigProcess]:
        own = pb.ConfigProcess(kind="control", name=self.endpoint, state=self._follower.state)
        routers = [
            pb.ConfigProcess(kind="router", name=record.name, state=record.config)
            for record in self._view.routers()
        ]
        workers = [
            pb.ConfigProcess(kind="worker", name=record.worker.name, state=record.config)
            for record in self._view.workers()
        ]
        return [own, *routers, *workers]


def _asked(request: pb.ApplyConfigRequest, applied: Values) -> dict[str, object]:
    """The new values. What is ``applied`` can be reset, whatever it is. Raises CONFIG_REFUSED."""
    asked: dict[str, object] = {}
    for each in request.values:
        if len(each.value) > VALUE_CHARS_MAX:
            raise TwinpoolError(
                "CONFIG_REFUSED",
                f"{each.key[:128]} has {len(each.value)} characters; the limit is {VALUE_CHARS_MAX}",
            )
        if each.key in asked or each.key in request.reset:
            raise TwinpoolError("CONFIG_REFUSED", f"{each.key[:128]} is named twice")
        try:
            asked[each.key] = json.loads(each.value)
        except (ValueError, RecursionError):
            raise TwinpoolError("CONFIG_REFUSED", f"{each.key[:128]}: its value is not JSON") from None
    try:
        check_reloadable([*asked, *(key for key in request.reset if key != ALL and key not in applied)])
    except ConfigError as error:
        raise TwinpoolError("CONFIG_REFUSED", error.message, metadata=error.metadata) from None
    return asked


def _without(values: Mapping[str, object], reset: Iterable[str]) -> dict[str, object]:
    gone = set(reset)
    return {} if ALL in gone else {key: value for key, value in values.items() if key not in gone}


def _shown(config: TwinpoolConfig, values: Values, key: str) -> str:
    """A value as JSON; of a key that this release does not know as it was applied."""
    try:
        return _json(value_at(config, key))
    except AttributeError:
        return _json(values.get(key))


def _read(item: Item) -> pb.AppliedConfig:
    try:
        return pb.AppliedConfig.FromString(item.value)
    except DecodeError:
        raise _corrupt(item) from None


def _values(item: Item | None, applied: pb.AppliedConfig) -> dict[str, object]:
    try:
        return values_of(applied)
    except ValueError:
        assert item is not None
        raise _corrupt(item) from None


def _corrupt(item: Item) -> TwinpoolError:
    return TwinpoolError("STORE_CORRUPT", f"{item.key} does not hold an applied configuration")


def _json(value: object) -> str:
    return json.dumps(value)
