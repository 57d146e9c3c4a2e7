# SPDX-License-Identifier: Apache-2.0
"""Which of several control processes acts: the one that holds ``leader/controller`` in etcd, by lease."""

import asyncio
import contextlib
from typing import Final

from twinpool.errors import TwinpoolError
from twinpool.store import Election, Keys, Store

CHECK_SECONDS: Final = 0.25
"""The end of a lease is a matter of the clock alone, so it is looked at this often."""


class Leadership:
    """A candidate. On one event loop."""

    def __init__(self, store: Store, cluster: str, endpoint: str, ttl_seconds: int) -> None:
        """``endpoint``: where the ControlService of this process listens; others send operators there while it leads."""
        self._endpoint = endpoint
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._election = Election(
            store,
            Keys(cluster).leader("controller"),
            endpoint.encode(),
            ttl_seconds=ttl_seconds,
            on_change=self._on_change,
        )

    def leads(self) -> bool:
        """Whether this process surely leads now."""
        return self._election.is_leader

    def start(self) -> None:
        """Becomes a candidate."""
        self._election.start()

    async def stop(self) -> None:
        """Gives the leadership up, at once for the others."""
        await asyncio.to_thread(self._election.stop)

    async def changed(self) -> None:
        """Returns once something may have changed. Look first, then wait."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), CHECK_SECONDS)
        self._changed.clear()

    def other(self) -> str:
        """Where another process that leads listens; "": none is known."""
        value = self._election.leader()
        endpoint = "" if value is None else value.decode(errors="replace")
        return "" if endpoint == self._endpoint else endpoint

    def check(self) -> None:
        """Raises NOT_LEADER, with the address of the leader if there is one, unless this process leads."""
        if self.leads():
            return
        other = self.other()
        text = f"{other} leads" if other else "no control process leads now; etcd may be away"
        raise TwinpoolError("NOT_LEADER", text, metadata={"leader": other} if other else {})

    def _on_change(self, _leads: bool) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._changed.set)
