# SPDX-License-Identifier: Apache-2.0
"""Keeps a lease alive on a thread of its own, and grants another when it was lost."""

from __future__ import annotations

import random
import threading
import time
from typing import Final, Protocol

from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger
from twinpool.store.types import Lease, LeaseLostError, Store

_log = get_logger(__name__)

_MIN_WAIT_SECONDS: Final = 0.1
_MAX_WAIT_SECONDS: Final = 1.0


class LeaseUser(Protocol):
    """What is done under the lease. All methods run on the keeper's thread."""

    def hold(self, lease: Lease) -> None:
        """Puts what belongs under the lease, as far as it is not there. Called after a grant and after each renewal.

        Raises LeaseLostError or TwinpoolError; it is called again.
        """

    def lost(self) -> None:
        """The lease is gone, or must be taken for gone since etcd was not reached in its time."""


class LeaseKeeper:
    """The thread. Never raises into its owner; without etcd it tries on, with jitter."""

    def __init__(self, store: Store, ttl_seconds: int, user: LeaseUser, *, name: str) -> None:
        self._store = store
        self._ttl = ttl_seconds
        self._user = user
        self._name = name
        self._wake = threading.Condition()
        self._nudged = False
        self._stopping = False
        self._lease: Lease | None = None
        self._valid_until = 0.0
        self._told_lost = True
        self._thread = threading.Thread(target=self._run, name=f"lease-{name}", daemon=True)

    @property
    def valid(self) -> bool:
        """Whether the lease surely lives: by our own clock, counted from before the last renewal was sent."""
        return self._lease is not None and time.monotonic() < self._valid_until

    def start(self) -> None:
        """Starts the thread. Returns at once."""
        self._thread.start()

    def nudge(self) -> None:
        """Calls ``hold`` soon: what it puts has changed."""
        with self._wake:
            self._nudged = True
            self._wake.notify()

    def stop(self) -> None:
        """Ends the thread and revokes the lease, so that its keys vanish at once. Takes at most the store's timeout
        once or twice; without etcd the lease runs out by itself. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        failures = 0
        while not self._stopping:
            try:
                self._turn()
                failures = 0
            except LeaseLostError:
                self._lease = None
                self._tell_lost("lease_lost")
                failures += 1
                if failures == 1:
                    # Granted anew at once. A second loss in a row waits: something ends our leases.
                    continue
            except TwinpoolError as error:
                failures += 1
                if failures == 1:
                    _log.warning("lease_renewal_failed", lease=self._name, error=error.message)
            except Exception as error:
                failures += 1
                _log.exception("lease_keeper_failed", lease=self._name, type=type(error).__name__)
            if not self.valid:
                self._tell_lost("lease_expired")
            self._wait(failures)
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                self._store.revoke(lease.id)
            except TwinpoolError as error:
                _log.warning("lease_not_revoked", lease=self._name, error=error.message)

    def _turn(self) -> None:
        """Renews the lease, or grants one, then lets the user put its keys. Raises what the store raises."""
        sent = time.monotonic()
        if self._lease is None:
            lease = self._store.grant(self._ttl)
            self._valid_until = sent + lease.ttl_seconds
            self._lease = lease
        else:
            self._valid_until = sent + self._store.keep_alive(self._lease.id)
        self._user.hold(self._lease)
        self._told_lost = False

    def _tell_lost(self, event: str) -> None:
        """Once for each loss. An expired lease is still asked for: an etcd that was down may have prolonged it."""
        if self._told_lost:
            return
        self._told_lost = True
        _log.warning(event, lease=self._name)
        self._user.lost()

    def _wait(self, failures: int) -> None:
        """Half of what remains, so that a failed renewal is tried again ever sooner; after the end with back-off."""
        left = self._valid_until - time.monotonic()
        seconds = min(_MAX_WAIT_SECONDS, _MIN_WAIT_SECONDS * 2 ** min(failures, 10))
        if left > 0:
            seconds = max(_MIN_WAIT_SECONDS, left / 2)
        # Jitter: all workers of a cluster lose etcd at the same moment.
        seconds *= random.uniform(0.7, 1.0)
        with self._wake:
            if not self._nudged and not self._stopping:
                self._wake.wait(seconds)
            self._nudged = False
