# SPDX-License-Identifier: Apache-2.0
"""Prefixes that routers ask a worker to keep in its cache, and what sessions have left there.

A pin is a lease on this worker's own clock, so it ends with no further word from anybody. Limits are those of this worker:
it alone knows what it keeps. Pinned blocks are cached blocks that cannot be evicted, so the room for requests shrinks with
them; where a request could not go on at all otherwise, the pin that would end first ends early.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from twinpool import metrics
from twinpool._core import BlockManager, CoreError, StepScheduler
from twinpool.config import SessionsSection
from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger
from twinpool.transfer.base import AttemptKey
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.chains import parse_chains
from twinpool.worker.commands import SESSION_BYTES, Limits
from twinpool.worker.load import duration

TENANT_CHARS_MAX: Final = 256
"""Longest name of a tenant."""

RETRY_SECONDS_MAX: Final = 60.0
"""Longest delay that a refusal names: a pin may also be released before its time."""

LINGER_SECONDS: Final = 1.0
"""So long after a session's release what was still held then is looked at once more: its last turn may be about to end."""

log = get_logger(__name__)

Turn = tuple[AttemptKey, list[NDArray[np.int32]], list[NDArray[np.uint64]]]


class PrefixPins:
    """Step thread only, but for ``check_pin`` and ``check_release``."""

    def __init__(
        self,
        blocks: BlockManager,
        generations: NDArray[np.uint64],
        scheduler: StepScheduler,
        limits: Limits,
        config: SessionsSection,
        clock: Callable[[], float],
    ) -> None:
        """``generations``: of the pool's blocks, uint64[blocks]."""
        self._blocks = blocks
        self._generations = generations
        self._scheduler = scheduler
        self._limits = limits
        self._config = config
        self._clock = clock
        self._max_blocks = int(config.max_pinned_ratio * limits.num_blocks)
        self._turns: OrderedDict[bytes, Turn] = OrderedDict()
        # Of sessions that were released a moment ago: until when, and what was noted of them.
        self._released: OrderedDict[bytes, tuple[float, Turn | None]] = OrderedDict()

    # --- pins

    def check_pin(self, request: pb.PinPrefixRequest) -> None:
        """Raises INVALID_ARGUMENT for what no router would have sent, INVALID_PIN for more time than this worker gives."""
        _check_owner(request.tenant, request.session)
        parse_chains([request.chain], self._limits)
        seconds, most = request.lease.ToNanoseconds() / 1e9, self._config.max_pin_seconds
        if not 0 < seconds <= most:
            raise TwinpoolError("INVALID_PIN", f"lease is {seconds:g} s; the limit is {most:g}", field="pin")

    def pin(self, request: pb.PinPrefixRequest) -> pb.PinPrefixResponse:
        """Keeps a checked request's prefix. An empty answer: not all of it is cached. Raises PIN_CAPACITY, PIN_QUOTA."""
        now, size = self._clock(), self._limits.block_tokens
        self.tick(now)
        (chain,) = parse_chains([request.chain], self._limits)
        name = pin_name(request.tenant, request.session, chain.hashes[-1].tobytes())
        known = self._blocks.has_prefix_pin(name)
        if request.renew and not known:
            return pb.PinPrefixResponse()
        try:
            refusal, blocks, ends = self._blocks.pin_prefix(
                name,
                request.tenant,
                request.session.hex(),
                chain.hashes,
                now + request.lease.ToNanoseconds() / 1e9,
                max_pins=self._config.max_pins,
                max_blocks=self._max_blocks,
                max_tenant_blocks=request.max_tenant_tokens // size,
            )
        except CoreError as error:
            raise TwinpoolError("INVALID_ARGUMENT", f"chain: {error}", field="chain") from None
        if refusal == "missing":
            return pb.PinPrefixResponse()
        if refusal:
            metrics.WORKER_PIN_EVENTS.labels("refused").inc()
            raise self._refusal(refusal, request, now)
        metrics.WORKER_PIN_EVENTS.labels("renewed" if known else "pinned").inc()
        return pb.PinPrefixResponse(pin_id=name, tokens=blocks * size, expires_in=duration(ends - now))

    def check_release(self, request: pb.ReleasePrefixRequest) -> None:
        """Raises INVALID_ARGUMENT for what no router would have sent."""
        kind = request.WhichOneof("target")
        _check_owner(request.tenant, request.session if kind == "session" else b"")
        if kind == "chain":
            parse_chains([request.chain], self._limits)
        elif kind is None or not getattr(request, kind):
            raise TwinpoolError("INVALID_ARGUMENT", "target is not set", field="target")

    def release(self, request: pb.ReleasePrefixRequest) -> pb.ReleasePrefixResponse:
        """Ends the pins of a checked request, and puts what they and the session kept at the front of the order of eviction."""
        now, tenant, session = self._clock(), request.tenant, request.session
        self.tick(now)
        if request.WhichOneof("target") == "chain":
            (chain,) = parse_chains([request.chain], self._limits)
            count, blocks = self._blocks.unpin_prefixes(tenant, last=chain.hashes[-1].tobytes())
        elif session:
            count, blocks = self._blocks.unpin_prefixes(tenant, session=session.hex())
        else:
            count, blocks = self._blocks.unpin_prefixes(tenant, pin=request.pin_id)
        demoted = self._blocks.demote(blocks, self._generations[blocks])
        if session:
            turn = self._turns.pop(session, None)
            demoted += self._demote(turn)
            self._released.pop(session, None)
            self._released[session] = (now + LINGER_SECONDS, turn)
            if len(self._released) > self._config.max_noted_sessions:
                self._released.popitem(last=False)
        metrics.WORKER_PIN_EVENTS.labels("released").inc(count)
        size = self._limits.block_tokens
        return pb.ReleasePrefixResponse(pins=count, tokens=len(blocks) * size, demoted_tokens=demoted * size)

    def make_way(self) -> bool:
        """Nothing could be planned. Where requests wait and nothing is held that could come free, only pins are in the way: the
        one that would end first ends. Whether one did."""
        blocks = self._blocks
        if not self._scheduler.waiting or blocks.held_blocks or blocks.quarantined_blocks:
            return False
        if not blocks.end_next_prefix_pin():
            return False
        log.warning("prefix_pin_gave_way", waiting=self._scheduler.waiting, pins=blocks.prefix_pins)
        metrics.WORKER_PIN_EVENTS.labels("gave_way").inc()
        return True

    # --- sessions

    def note(self, session: bytes, attempt: AttemptKey, seq: int) -> None:
        """A sequence of a session's turn is about to be removed: its blocks are the session's. Those of the turn before are not
        any more; what a turn shares with it is in both."""
        if not session:
            return
        blocks = np.array(self._scheduler.blocks(seq), np.int32)
        known = self._turns.pop(session, None)
        turn: Turn = known if known is not None and known[0] == attempt else (attempt, [], [])
        turn[1].append(blocks)
        turn[2].append(self._generations[blocks])
        self._turns[session] = turn
        if len(self._turns) > self._config.max_noted_sessions:
            self._turns.popitem(last=False)

    # --- time

    def tick(self, now: float) -> None:
        """Ends what has expired."""
        while self._released and next(iter(self._released.values()))[0] <= now:
            session, (_, turn) = self._released.popitem(last=False)
            for each in (turn, self._turns.get(session)):
                self._demote(each)
        if ended := self._blocks.expire_prefix_pins(now):
            metrics.WORKER_PIN_EVENTS.labels("expired").inc(ended)

    def next_wake(self) -> float | None:
        """When ``tick`` has something to do; None: never."""
        times = [next(iter(self._released.values()))[0]] if self._released else []
        if (expiry := self._blocks.next_prefix_expiry()) is not None:
            times.append(expiry)
        return min(times, default=None)

    def _demote(self, turn: Turn | None) -> int:
        if turn is None:
            return 0
        return self._blocks.demote(np.concatenate(turn[1]), np.concatenate(turn[2]))

    def _refusal(self, refusal: str, request: pb.PinPrefixRequest, now: float) -> TwinpoolError:
        first = self._blocks.next_prefix_expiry()
        retry = min(RETRY_SECONDS_MAX, max(0.0, first - now)) if first is not None else None
        if refusal == "tenant_blocks":
            limit = str(request.max_tenant_tokens)
            detail = (
                f"the tenant would have more tokens pinned on this worker than it may; the limit is {limit}"
            )
            return TwinpoolError("PIN_QUOTA", detail, retry_after=retry, metadata={"limit": limit})
        name = "max_pins" if refusal == "pins" else "max_pinned_ratio"
        limit = f"sessions.{name}={getattr(self._config, name):g}"
        detail = f"the worker has {self._blocks.prefix_pins} pins of {self._blocks.prefix_pinned_blocks} blocks; the limit is {limit}"
        return TwinpoolError("PIN_CAPACITY", detail, retry_after=retry, metadata={"limit": limit})


def pin_name(tenant: str, session: bytes, last: bytes) -> str:
    """What a pin is called: the same on every worker. ``last``: hash of the prefix's last block."""
    return hashlib.sha256(b"\0".join((tenant.encode(), session.hex().encode(), last))).hexdigest()[:32]


def _check_owner(tenant: str, session: bytes) -> None:
    if len(tenant) > TENANT_CHARS_MAX or len(session) not in (0, SESSION_BYTES):
        detail = (
            f"tenant has {len(tenant)} characters and session {len(session)} bytes; the limits are "
            f"{TENANT_CHARS_MAX} and 0 or {SESSION_BYTES}"
        )
        raise TwinpoolError("INVALID_ARGUMENT", detail)
