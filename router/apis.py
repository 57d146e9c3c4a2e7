# SPDX-License-Identifier: Apache-2.0
"""The other ways to the same requests: Chat and KServe's protocol over gRPC, and the OpenAI-compatible HTTP API."""

from typing import Final

from twinpool.config import TwinpoolConfig
from twinpool.router.backend import RouterBackend
from twinpool.router.chat import service as chat
from twinpool.router.kserve import service as kserve
from twinpool.router.models import ModelTable
from twinpool.router.openai.server import HttpServer
from twinpool.router.service import InferenceService
from twinpool.rpc import Server, join_address

SERVICES: Final = (chat.SERVICE, kserve.SERVICE)
"""Those on the gRPC port."""


class ClientApis:
    """One a router; ``http_endpoint`` is empty where there is no HTTP."""

    def __init__(
        self,
        config: TwinpoolConfig,
        inference: InferenceService,
        models: ModelTable,
    ) -> None:
        """Raises ConfigError."""
        self._port = config.router.http_port
        self._chats = chat.ChatService(inference, config.router)
        backend = RouterBackend(inference, self._chats, models)
        self._http = HttpServer(config, backend) if self._port >= 0 else None
        self._kserve = kserve.KserveService(backend, config.router)
        self.http_endpoint = ""

    def add(self, server: Server) -> None:
        """Adds Chat and KServe's protocol to the gRPC server."""
        server.add(chat.SERVICE, chat.register, self._chats)
        server.add(kserve.SERVICE, kserve.register, self._kserve)

    async def start(self, host: str, dialled: str) -> None:
        """Serves HTTP on ``host``, which others know as ``dialled``. Raises PORT_UNAVAILABLE."""
        if self._http is not None:
            self.http_endpoint = join_address(dialled, await self._http.start(host, self._port))

    def drain(self) -> None:
        """From now on streams that wait for a client's next request end."""
        self._kserve.drain()

    async def stop(self) -> None:
        """Stops to serve HTTP, once running requests have ended or their time is over."""
        if self._http is not None:
            await self._http.stop()

    def refresh(self) -> None:
        """Follows the files of TLS."""
        if self._http is not None:
            self._http.refresh_tls()
