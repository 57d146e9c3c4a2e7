# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the transfer thread: which agent it runs, and its peers as asyncio sees them."""

import asyncio
from collections.abc import Callable
from typing import Final

from twinpool.config import TransferConfig
from twinpool.ids import WorkerKey
from twinpool.transfer.base import PeerDescriptor, TransferAgent, TransferError
from twinpool.transfer.loopback import Fabric, LoopbackAgent
from twinpool.transfer.nixl import NixlAgent
from twinpool.transfer.thread import TransferThread
from twinpool.worker.stack import EngineStack

FABRIC: Final = Fabric()
"""Where the loopback agents of this process meet."""


def agent_factory(
    config: TransferConfig, worker: WorkerKey, stack: EngineStack
) -> Callable[[], TransferAgent]:
    """Makes the configured agent; to be called on the transfer thread."""

    def nixl() -> TransferAgent:
        return NixlAgent(
            worker, stack.fingerprint, stack.memory, stack.pool.generations, ucx_tls=config.ucx_tls or None
        )

    def loopback() -> TransferAgent:
        return LoopbackAgent(worker, stack.fingerprint, stack.memory, stack.pool.generations, fabric=FABRIC)

    return nixl if config.backend == "nixl" else loopback


class TransferPeers:
    """Connects and forgets peers on the transfer thread, awaited on the event loop."""

    def __init__(self, transfer: TransferThread) -> None:
        self._transfer = transfer

    async def connect(self, peer: PeerDescriptor) -> None:
        """Loads the peer's metadata and proves that it can be reached. Raises TransferError."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[TransferError | None] = loop.create_future()

        def tell(error: TransferError | None) -> None:
            if not result.done():
                result.set_result(error)

        def on_result(error: TransferError | None) -> None:
            # The thread's callbacks run on the step thread, so that this one takes another hop.
            loop.call_soon_threadsafe(tell, error)

        self._transfer.connect(peer, on_result)
        error = await result
        if error is not None:
            raise error

    def disconnect(self, peer: WorkerKey) -> None:
        """Forgets a peer. Reads from it go on until they end."""
        self._transfer.disconnect(peer)
