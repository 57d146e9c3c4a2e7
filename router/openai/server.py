# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of a router.

A handler is cancelled when its client goes, like a gRPC call. An answer that is streamed has its status only once its first
event is there, so that what is refused before is refused with the status of its reason.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError

from twinpool.config import TwinpoolConfig
from twinpool.errors import TwinpoolError, as_twinpool_error
from twinpool.logs import get_logger
from twinpool.router.bodies import Body, parse_object, refusal
from twinpool.router.call import Call
from twinpool.router.openai.chats import ChatCompletion
from twinpool.router.openai.completions import Completion
from twinpool.router.openai.errors import body_of, headers_of, status_of
from twinpool.router.openai.response_request import ResponseRequest
from twinpool.router.openai.response_shape import ResponseShape
from twinpool.router.openai.shapes import ChatShape, Json
from twinpool.router.openai.texts import TextShape
from twinpool.router.validate import check_choices, check_key
from twinpool.rpc import Caller, HttpsContext, join_address, key_of, loopback_beside
from twinpool.text import Tokenizer
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb

log = get_logger(__name__)

B = TypeVar("B", bound=Body)
E = TypeVar("E")

_DONE: Final = b"data: [DONE]\n\n"


class Backend(Protocol):
    """What the server needs of a router."""

    async def chat(self, request: chat.ChatRequest, call: Call[chat.ChatResponse]) -> None:
        """Serves a chat."""
        ...

    async def generate(self, request: pb.GenerateRequest, call: Call[pb.GenerateResponse]) -> None:
        """Serves a prompt."""
        ...

    def models(self, caller: Caller) -> list[pb.Model]:
        """The models that a caller may use."""
        ...

    def tokenizer(self, model: str) -> Tokenizer:
        """The tokenizer of a model. Raises MODEL_NOT_FOUND."""
        ...

    def live(self) -> bool:
        """Whether the process does its work."""
        ...

    def ready(self) -> bool:
        """Whether requests are welcome."""
        ...


class HttpServer:
    """Serves ``/v1/chat/completions``, ``/v1/completions``, ``/v1/responses``, ``/v1/models``, ``/health``, ``/live`` and
    ``/metrics``."""

    def __init__(self, config: TwinpoolConfig, backend: Backend) -> None:
        """Raises ConfigError for TLS files that do not fit."""
        self._config = config.router
        self._backend = backend
        self._tls = HttpsContext(config.tls) if config.tls.enabled else None
        app = web.Application(
            client_max_size=config.router.max_message_bytes, middlewares=[web.middleware(_errors)]
        )
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._complete),
                web.post("/v1/responses", self._respond),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._model),
                web.get("/health", self._health),
                web.get("/live", self._live),
                web.get("/metrics", self._metrics),
            ]
        )
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=config.router.drain_timeout_seconds,
        )

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port, which is the system's choice for 0. Raises PORT_UNAVAILABLE.

        On the loopback as well where ``host`` leaves it out; all others are served without that, so a failure is only logged.
        """
        await self._runner.setup()
        try:
            await self._listen(host, port)
        except OSError as error:
            await self._runner.cleanup()
            raise TwinpoolError("PORT_UNAVAILABLE", f"cannot listen on {host}:{port}: {error}") from error
        bound: int = self._runner.addresses[0][1]
        if (loopback := loopback_beside(host)) is not None:
            try:
                await self._listen(loopback, bound)
            except OSError:
                log.warning("loopback_not_bound", address=join_address(loopback, bound))
        return bound

    async def _listen(self, host: str, port: int) -> None:
        context = self._tls.context if self._tls is not None else None
        site = web.TCPSite(self._runner, host, port, ssl_context=context, reuse_port=self._config.reuse_port)
        await site.start()

    async def stop(self) -> None:
        """Takes no more connections, lets running requests end for ``router.drain_timeout_seconds`` and cancels what is left."""
        await self._runner.cleanup()

    def refresh_tls(self) -> None:
        """Takes renewed TLS files."""
        if self._tls is not None:
            self._tls.refresh()

    # --- calls ----------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, ChatCompletion)
        asked = body.request()
        _set_key(request, asked.request)
        n = asked.request.n
        logprobs = asked.request.HasField("logprobs")
        shape = ChatShape(self._tokenizer(request, body.model).token_bytes, logprobs=logprobs)
        if not body.stream:

            async def gather(event: chat.ChatResponse) -> None:
                shape.add(event, n)

            await self._backend.chat(asked, _call(request, gather))
            return _json(shape.whole())
        out = EventStream(request)

        async def send(event: chat.ChatResponse) -> None:
            await out.send(shape.chunks(event, n))

        return await out.run(
            self._backend.chat(asked, _call(request, send)), shape.usage_chunk if body.wants_usage else None
        )

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, Completion)
        asked = body.requests()
        for number, one_asked in enumerate(asked):
            _set_key(request, one_asked, f"/{number}" if number else "")
        check_choices(asked[0].n, self._config)
        shape = TextShape(
            [_echoed(one) if body.echo else "" for one in asked],
            asked[0].n,
            self._tokenizer(request, body.model),
            logprobs=body.logprobs is not None,
            echo_only=body.echo_only,
            max_scored_tokens=self._config.max_scored_prompt_tokens,
        )
        out = EventStream(request) if body.stream else None

        async def one(number: int) -> None:
            async def take(event: pb.GenerateResponse) -> None:
                if out is None:
                    shape.add(number, event)
                else:
                    await out.send(shape.chunks(number, event))

            await self._backend.generate(asked[number], _call(request, take))

        if out is not None:
            return await out.run(_all(one, len(asked)), shape.usage_chunk if body.wants_usage else None)
        await _all(one, len(asked))
        return _json(shape.whole())

    def _tokenizer(self, request: web.Request, model: str) -> Tokenizer:
        """Of a model. Who is no tenant, where there are tenants, is told nothing of the models."""
        self._backend.models(_caller(request))
        return self._backend.tokenizer(model)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, ResponseRequest)
        asked, shape = body.request(), ResponseShape(body)
        _set_key(request, asked.request)
        if not body.stream:

            async def gather(event: chat.ChatResponse) -> None:
                shape.events(event)

            await self._backend.chat(asked, _call(request, gather))
            return _json(shape.whole())
        out = EventStream(request, named=True)

        async def send(event: chat.ChatResponse) -> None:
            await out.send(shape.events(event))

        return await out.run(self._backend.chat(asked, _call(request, send)), None)

    async def _models(self, request: web.Request) -> web.Response:
        return _json(
            {"object": "list", "data": [_model(model) for model in self._backend.models(_caller(request))]}
        )

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        for model in self._backend.models(_caller(request)):
            if model.name == name:
                return _json(_model(model))
        raise TwinpoolError(
            "MODEL_NOT_FOUND", f"model is {name[:64]!r}; no such model is served", field="model"
        )

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._backend.ready() else 503)

    async def _live(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._backend.live() else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _echoed(request: pb.GenerateRequest) -> str | Sequence[int]:
    return request.text if request.HasField("text") else request.token_ids.ids


def _call(request: web.Request, write: Callable[[E], Awaitable[None]]) -> Call[E]:
    return Call(write, traceparent=request.headers.get("traceparent", ""), who=partial(_caller, request))


def _set_key(request: web.Request, asked: pb.GenerateRequest, suffix: str = "") -> None:
    """Makes the request one that goes on without its client, which finds it by the header ``Idempotency-Key``. ``suffix`` tells
    the prompts of one request apart."""
    key = request.headers.get("Idempotency-Key", "")
    if not key:
        return
    check_key(key + suffix)
    asked.idempotency_key = key + suffix
    # OpenAI's clients say how often they have tried; of any other it is not known whether this is its first time.
    asked.repeated = request.headers.get("x-stainless-retry-count", "") != "0"


def _caller(request: web.Request) -> Caller:
    headers = {name.lower(): value for name, value in request.headers.items()}
    certificate: Mapping[str, Any] = (
        request.transport.get_extra_info("peercert") if request.transport is not None else None
    ) or {}
    subject = [
        value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"
    ]
    return Caller(key_of(headers), (*subject, *(value for _, value in certificate.get("subjectAltName", ()))))


class EventStream:
    """Server-sent events. ``named``: each has its type as its name, and none says that it was the last."""

    def __init__(self, request: web.Request, *, named: bool = False) -> None:
        self._request = request
        self._named = named
        self._response: web.StreamResponse | None = None
        # Several prompts of one request write to it, and must not begin it twice.
        self._lock = asyncio.Lock()

    async def send(self, chunks: list[Json]) -> None:
        """Sends each chunk as one event."""
        data = b"".join(map(self._written, chunks))
        async with self._lock:
            if self._response is None:
                headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
                response = web.StreamResponse(headers=headers)
                await response.prepare(self._request)
                self._response = response
            if data:
                await self._response.write(data)

    def _written(self, chunk: Json) -> bytes:
        name = f"event: {chunk['type']}\n" if self._named else ""
        return f"{name}data: {json.dumps(chunk)}\n\n".encode()

    def _failure(self, error: TwinpoolError) -> bytes:
        body = body_of(error)
        if not self._named:
            return self._written(body)
        found = body["error"]
        return self._written(
            {
                "type": "error",
                "sequence_number": 0,
                **{name: found[name] for name in ("message", "code", "param")},
            }
        )

    async def run(self, answer: Awaitable[None], last: Callable[[], Json] | None) -> web.StreamResponse:
        """Sends a whole answer. An error before its first event is raised; a later one is the last event."""
        try:
            await answer
            await self.send([last()] if last is not None else [])
            ending = b"" if self._named else _DONE
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            if self._response is None:
                raise
            ending = self._failure(as_twinpool_error(error))
        assert self._response is not None
        await self._response.write(ending)
        await self._response.write_eof()
        return self._response


async def _all(one: Callable[[int], Awaitable[None]], count: int) -> None:
    """Runs all of them; the first failure ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(_task(one(number)))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _task(work: Awaitable[None]) -> None:
    await work


async def _body(request: web.Request, kind: type[B]) -> B:
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise TwinpoolError(
            "MESSAGE_TOO_LARGE", f"the body is too large; the limit is {request.client_max_size} bytes"
        ) from error
    except web.RequestPayloadError as error:
        raise TwinpoolError("INVALID_ARGUMENT", "the body is not in its content encoding") from error
    try:
        return kind.model_validate(parse_object(raw))
    except ValidationError as error:
        raise refusal(error) from None


async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        message = {"message": error.reason, "type": "invalid_request_error", "param": None, "code": None}
        return _json({"error": message}, error.status)
    except ConnectionError as error:
        # The client has gone while something was written to it.
        raise asyncio.CancelledError from error
    except Exception as error:
        known = as_twinpool_error(error)
        if known.reason == "INTERNAL":
            log.error("http_request_failed", path=request.path, error=type(error).__name__)
        response = _json(body_of(known), status_of(known))
        response.headers.update(headers_of(known))
        return response


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), status=status, content_type="application/json")


def _model(model: pb.Model) -> Json:
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "twinpool",
        "max_model_len": model.max_context_tokens,
    }
