# SPDX-License-Identifier: Apache-2.0
"""``ClusterClient`` for programs without an event loop: its loop runs on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from twinpool.client import Completion
from twinpool.cluster_client import ClusterClient
from twinpool.config import RpcConfig, TlsConfig
from twinpool.retry import RetryPolicy
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb

T = TypeVar("T")


class SyncClusterClient:
    """Any number of threads may use it at once. Errors are raised as TwinpoolError."""

    def __init__(
        self,
        endpoints: Sequence[str],
        rpc: RpcConfig | None = None,
        tls: TlsConfig | None = None,
        *,
        policy: RetryPolicy | None = None,
        hang_seconds: float | None = None,
        key: str = "",
    ) -> None:
        """See ``ClusterClient``."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="twinpool-client", daemon=True)
        self._thread.start()

        async def make() -> ClusterClient:
            return ClusterClient(endpoints, rpc, tls, policy=policy, hang_seconds=hang_seconds, key=key)

        self._client = self._run(make())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends what is in flight, and the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def complete(self, message: pb.GenerateRequest, *, timeout: float | None = None) -> Completion:
        """Collects a whole answer."""
        return self._run(self._client.complete(message, timeout=timeout))

    def warm(
        self, message: pb.GenerateRequest, *, pin_seconds: float | None = None, timeout: float | None = None
    ) -> pb.WarmResponse:
        """See ``ClusterClient.warm``."""
        return self._run(self._client.warm(message, pin_seconds=pin_seconds, timeout=timeout))

    def release(
        self,
        *,
        session_id: str = "",
        pin_id: str = "",
        prompt: pb.GenerateRequest | None = None,
        tenant: str = "",
        timeout: float | None = None,
    ) -> pb.ReleaseResponse:
        """See ``ClusterClient.release``."""
        asked = self._client.release(
            session_id=session_id, pin_id=pin_id, prompt=prompt, tenant=tenant, timeout=timeout
        )
        return self._run(asked)

    def stream(
        self, message: pb.GenerateRequest, *, timeout: float | None = None
    ) -> Generator[pb.GenerateResponse, None, None]:
        """Yields the events of an answer. Closing the generator early cancels the request."""
        return self._each(self._client.stream(message, timeout=timeout))

    def chat(
        self, message: chat.ChatRequest, *, timeout: float | None = None
    ) -> Generator[chat.ChatResponse, None, None]:
        """Yields the events of a conversation's next turn. Closing the generator early cancels it."""
        return self._each(self._client.chat(message, timeout=timeout))

    def _each(self, events: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        async def following() -> T | None:
            return await anext(events, None)

        try:
            while (event := self._run(following())) is not None:
                yield event
        finally:
            self._run(events.aclose())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
