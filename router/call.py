# SPDX-License-Identifier: Apache-2.0
"""One call of a client, whichever protocol it came by."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import grpc.aio

from twinpool import tracing
from twinpool.rpc import Caller, Deadline

E = TypeVar("E")
F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class Call(Generic[E]):
    """Where the events of an answer go, and until when. ``arrival`` is in ``time.monotonic()`` seconds."""

    write: Callable[[E], Awaitable[None]]
    deadline: Deadline = field(default_factory=Deadline)
    traceparent: str = ""
    who: Callable[[], Caller] = Caller
    """Says who the caller is: not every router asks."""
    arrival: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, context: grpc.aio.ServicerContext[Any, E]) -> "Call[E]":
        """A call by gRPC."""
        return cls(
            context.write,
            Deadline.of_call(context),
            tracing.traceparent_of(context.invocation_metadata()),
            partial(Caller.of, context),
        )

    @property
    def caller(self) -> Caller:
        """Who calls."""
        return self.who()

    def to(self, write: Callable[[F], Awaitable[None]]) -> "Call[F]":
        """The same call, whose events go elsewhere."""
        return Call(write, self.deadline, self.traceparent, self.who, self.arrival)
