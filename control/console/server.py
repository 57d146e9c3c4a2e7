# SPDX-License-Identifier: Apache-2.0
"""Serves the console page and what it reads. Nothing here changes the cluster, and nothing tells a prompt, a token or a key.

With TLS a browser has to show a certificate that the CA signed and, where certificates name roles, that of an operator. A
page of another site can neither read answers (no CORS) nor have its own name point here (names are checked).
"""

import asyncio
import contextlib
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from typing import Any, Final

import grpc
from aiohttp import web
from google.protobuf.message import Message

from twinpool.config import TwinpoolConfig
from twinpool.control.console.gate import Gate
from twinpool.control.overview.collect import Collector
from twinpool.control.overview.plain import plain
from twinpool.errors import TwinpoolError, as_twinpool_error
from twinpool.logs import get_logger
from twinpool.rpc import HttpsContext
from twinpool.v1 import control_pb2 as pb

log = get_logger(__name__)

STREAMS_MAX: Final = 32
"""Most pages that are kept up to date at a time."""

INTERVAL_SECONDS: Final = 1.0
"""Time between two overviews of a stream."""

SLOW_EVERY: Final = 5
"""Prefixes and events, which change slowly, come with each overview of so many."""

REQUESTS: Final = 200
"""Requests in a stream's message."""

PREFIXES: Final = 24
EVENTS: Final = 200

STOP_SECONDS: Final = 1.0
TLS_SECONDS: Final = 10.0
"""Time between two looks at the files of TLS."""

PAGES: Final = {
    "/": ("index.html", "text/html"),
    "/console.css": ("console.css", "text/css"),
    "/console.js": ("console.js", "text/javascript"),
    "/draw.js": ("draw.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

_STATUS: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 503,
}

Events = Callable[[], Sequence[Message]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Console:
    """Start once, stop once, both on the control process's event loop."""

    def __init__(
        self,
        config: TwinpoolConfig,
        collector: Collector,
        operations: Callable[[], Sequence[pb.Operation]],
        events: Events | None = None,
    ) -> None:
        """``operations`` and ``events``: all that are known, the newest first; no ``events``: there are none to be had."""
        self._config = config
        self._collector = collector
        self._operations = operations
        self._events = events
        self._gate = Gate(config)
        self._tls = HttpsContext(config.tls) if config.tls.enabled else None
        self._stopping = asyncio.Event()
        self._streams = 0
        self._renewer: asyncio.Task[None] | None = None
        files = resources.files("twinpool.control.console") / "static"
        self._pages = {path: ((files / name).read_bytes(), kind) for path, (name, kind) in PAGES.items()}

        @web.middleware
        async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._answer(request, handler)

        app = web.Application(middlewares=[around])
        app.add_routes([web.get(path, self._page) for path in PAGES])
        app.add_routes(
            [
                web.get("/api/overview", self._overview),
                web.get("/api/requests", self._requests),
                web.get("/api/prefixes", self._prefixes),
                web.get("/api/operations", self._list_operations),
                web.get("/api/events", self._list_events),
                web.get("/api/stream", self._stream, allow_head=False),
            ]
        )
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_SECONDS
        )
        self.url = ""

    async def start(self) -> None:
        """Listens, and sets ``url``. Raises PORT_UNAVAILABLE."""
        control = self._config.control
        bound = control.http_host or control.host
        await self._runner.setup()
        context = self._tls.context if self._tls is not None else None
        site = web.TCPSite(self._runner, bound, control.http_port, ssl_context=context)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise TwinpoolError(
                "PORT_UNAVAILABLE", f"cannot listen on {bound}:{control.http_port}: {error.strerror}"
            ) from error
        host = socket.gethostname() if _any_address(bound) else bound
        shown = f"[{host}]" if ":" in host else host
        port = self._runner.addresses[0][1]
        self.url = f"{'https' if self._tls is not None else 'http'}://{shown}:{port}/"
        if self._tls is not None:
            self._renewer = asyncio.get_running_loop().create_task(self._renew(self._tls))

    async def stop(self) -> None:
        """Ends the streams and closes."""
        self._stopping.set()
        if self._renewer is not None:
            self._renewer.cancel()
        await self._runner.cleanup()
        self._gate.close()

    # --- what is read

    async def _page(self, request: web.Request) -> web.Response:
        body, kind = self._pages[request.path]
        return web.Response(body=body, content_type=kind, charset="utf-8")

    async def _overview(self, request: web.Request) -> web.Response:
        return _json(plain(await self._collector.overview(request.query.get("pool", ""))))

    async def _requests(self, request: web.Request) -> web.Response:
        self._gate.note(request)
        query = request.query
        asked = pb.ListRequestsRequest(
            state=query.get("state", ""),
            pool=query.get("pool", ""),
            router=query.get("router", ""),
            limit=_limit(request),
        )
        return _json(plain(await self._collector.requests(asked)))

    async def _prefixes(self, request: web.Request) -> web.Response:
        found = await self._collector.prefixes(_limit(request) or PREFIXES)
        return _json({"prefixes": [plain(one) for one in found]})

    async def _list_operations(self, request: web.Request) -> web.Response:
        return _json({"operations": [plain(one) for one in self._operations()]})

    async def _list_events(self, request: web.Request) -> web.Response:
        if self._events is None:
            return _error(404, "NOT_FOUND", "this control process keeps no events")
        return _json({"events": [plain(one) for one in self._events()[: _limit(request) or EVENTS]]})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events, each with a part of what the page shows under its name."""
        if self._streams >= STREAMS_MAX:
            return _error(503, "RESOURCE_EXHAUSTED", f"{STREAMS_MAX} pages are open")
        self._gate.note(request)
        self._streams += 1
        try:
            response = web.StreamResponse(headers=self._gate.headers | {"Cache-Control": "no-store"})
            response.content_type, response.charset = "text/event-stream", "utf-8"
            await response.prepare(request)
            turn = 0
            while not self._stopping.is_set():
                await response.write(await self._turn(turn))
                turn += 1
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), INTERVAL_SECONDS)
            return response
        finally:
            self._streams -= 1

    async def _turn(self, turn: int) -> bytes:
        asked = pb.ListRequestsRequest(limit=REQUESTS)
        overview, requests = await asyncio.gather(self._collector.overview(), self._collector.requests(asked))
        parts: dict[str, Any] = {
            "overview": plain(overview),
            "requests": plain(requests),
            "operations": [plain(one) for one in self._operations()],
        }
        if turn % SLOW_EVERY == 0:
            parts["prefixes"] = [plain(one) for one in await self._collector.prefixes(PREFIXES)]
            if self._events is not None:
                parts["events"] = [plain(one) for one in self._events()[:EVENTS]]
        return b"".join(
            f"event: {name}\ndata: {json.dumps(part)}\n\n".encode() for name, part in parts.items()
        )

    # --- around every answer

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._gate.admit(request)
            response = await handler(request)
        except web.HTTPException as error:
            response = _error(error.status, error.reason.upper().replace(" ", "_"), error.reason)
        except ConnectionError as error:
            # The page has gone while something was written to it.
            raise asyncio.CancelledError from error
        except Exception as error:
            known = as_twinpool_error(error)
            if known.reason == "INTERNAL":
                log.exception("console_request_failed", path=request.path, type=type(error).__name__)
            response = _error(_STATUS.get(known.code, 500), known.reason, known.message)
        if not response.prepared:
            response.headers.update(self._gate.headers)
            response.headers["Cache-Control"] = "no-store"
        return response

    async def _renew(self, tls: HttpsContext) -> None:
        while True:
            await asyncio.sleep(TLS_SECONDS)
            tls.refresh()


def _limit(request: web.Request) -> int:
    """Raises INVALID_ARGUMENT."""
    text = request.query.get("limit", "0")
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        raise TwinpoolError("INVALID_ARGUMENT", "limit is not a number", field="limit")
    return int(text)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), status=status, content_type="application/json")


def _error(status: int, reason: str, message: str) -> web.Response:
    return _json({"error": {"reason": reason, "message": message}}, status)


def _any_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    return False
