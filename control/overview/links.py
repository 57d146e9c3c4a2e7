# SPDX-License-Identifier: Apache-2.0
"""Calls to many processes at once, each with its own deadline: none that hangs keeps the others waiting."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from twinpool.config import TwinpoolConfig
from twinpool.errors import TwinpoolError, as_twinpool_error, from_rpc_error
from twinpool.rpc import channel

T = TypeVar("T")
Connect = Callable[[str], grpc.aio.Channel]


class Links:
    """Channels to processes of one kind, kept while these are registered. On one event loop."""

    def __init__(self, connect: Connect, seconds: float) -> None:
        """``connect``: a channel to host:port. ``seconds``: deadline of a call."""
        self._connect = connect
        self._seconds = seconds
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def ask(
        self, endpoints: Mapping[str, str], call: Callable[[grpc.aio.Channel, float], Awaitable[T]]
    ) -> dict[str, T | TwinpoolError]:
        """Asks everybody at once: an answer or an error by name. ``endpoints``: host:port by name."""
        found = await asyncio.gather(*(self._one(endpoint, call) for endpoint in endpoints.values()))
        return dict(zip(endpoints, found, strict=True))

    async def keep(self, endpoints: Collection[str]) -> None:
        """Closes the channels to everybody else."""
        gone = [
            self._channels.pop(endpoint) for endpoint in list(self._channels) if endpoint not in endpoints
        ]
        await asyncio.gather(*(one.close(None) for one in gone))

    async def close(self) -> None:
        """Closes all channels."""
        await self.keep(())

    async def _one(
        self, endpoint: str, call: Callable[[grpc.aio.Channel, float], Awaitable[T]]
    ) -> T | TwinpoolError:
        try:
            if endpoint not in self._channels:
                self._channels[endpoint] = self._connect(endpoint)
            # gRPC's own deadline does not cover all that may hang, such as a name that is looked up.
            async with asyncio.timeout(self._seconds * 1.5):
                return await call(self._channels[endpoint], self._seconds)
        except TimeoutError:
            return TwinpoolError("DEADLINE_EXCEEDED", f"no answer within {self._seconds:g} s")
        except grpc.RpcError as error:
            # A channel that is made anew takes renewed certificates.
            if (lost := self._channels.pop(endpoint, None)) is not None:
                await lost.close(None)
            return from_rpc_error(error)
        except TwinpoolError as error:
            return as_twinpool_error(error)


def worker_links(config: TwinpoolConfig) -> Links:
    """Links to workers."""

    def connect(endpoint: str) -> grpc.aio.Channel:
        return channel(endpoint, config.rpc, config.tls, role="worker")

    return Links(connect, config.control.answer_seconds)


def router_links(config: TwinpoolConfig) -> Links:
    """Links to routers; where these have tenants, calls show an operator's key."""
    path = config.control.operator_key_file

    def connect(endpoint: str) -> grpc.aio.Channel:
        return channel(endpoint, config.rpc, config.tls, role="router", key=_key(path))

    return Links(connect, config.control.answer_seconds)


def failure(error: Any) -> str:
    """What an overview says of somebody who did not answer: reason and text."""
    return f"{error.reason}: {error.message}"[:256]


def _key(path: str) -> str:
    """Raises CONFIG_INVALID, by which a missing file shows as what it is."""
    if not path:
        return ""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise TwinpoolError(
            "CONFIG_INVALID", f"control.operator_key_file: cannot read {path}: {error.strerror}"
        ) from None
