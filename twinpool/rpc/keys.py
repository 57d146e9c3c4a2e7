# SPDX-License-Identifier: Apache-2.0
"""API keys: random, and known by their digests alone."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc.aio

KEY_PREFIX: Final = "tp-"


def new_key() -> tuple[str, str]:
    """A new API key, and what the file is to hold of it."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, digest_of(key)


def digest_of(key: str) -> str:
    """What the file holds of a key. Keys are random, so that no salt or slow hash is needed."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def key_interceptors(key: str) -> list[grpc.aio.ClientInterceptor]:
    """What makes every call of a channel show ``key``; nothing for none."""
    return [_UnaryKey(key), _StreamKey(key)] if key else []


class _Key:
    def __init__(self, key: str) -> None:
        self._header = ("authorization", f"Bearer {key}")

    def _shown(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), self._header)
        return grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )


class _UnaryKey(_Key, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Awaitable[Any]],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await continuation(self._shown(client_call_details), request)


class _StreamKey(_Key, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Awaitable[Any]],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await continuation(self._shown(client_call_details), request)
