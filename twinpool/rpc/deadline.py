# SPDX-License-Identifier: Apache-2.0
"""A point in time by which something must be done. Travels as what is left, since clocks differ."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration

# gRPC reports a call without deadline as a remaining time of centuries in some versions, None in others.
_FOREVER_SECONDS = 10 * 365 * 86400.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """``at`` is ``time.monotonic()`` seconds; None: no deadline."""

    at: float | None = None

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """``seconds`` from now; None: never."""
        return cls(None if seconds is None else time.monotonic() + seconds)

    @classmethod
    def of_call(cls, context: grpc.aio.ServicerContext[Any, Any]) -> Deadline:
        """The deadline that the caller set on the call."""
        left = context.time_remaining()
        return cls() if left is None or left > _FOREVER_SECONDS else cls.after(max(0.0, left))

    @classmethod
    def from_proto(cls, left: Duration | None) -> Deadline:
        """From a field that holds what was left when the message was sent; None: no deadline."""
        return cls.after(None if left is None else left.ToNanoseconds() / 1e9)

    def to_proto(self) -> Duration | None:
        """What is left now, at least zero; None if there is no deadline."""
        left = self.remaining()
        if left is None:
            return None
        duration = Duration()
        duration.FromNanoseconds(int(left * 1e9))
        return duration

    def remaining(self) -> float | None:
        """Seconds left, at least 0; None: no deadline."""
        return None if self.at is None else max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether it has passed."""
        return self.at is not None and time.monotonic() >= self.at

    def earlier(self, seconds: float) -> Deadline:
        """The earlier of this one and ``seconds`` from now."""
        other = time.monotonic() + seconds
        return Deadline(other if self.at is None else min(self.at, other))
