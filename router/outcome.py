# SPDX-License-Identifier: Apache-2.0
"""How a request ends otherwise than well: from what workers and the core say to what the client is told."""

from dataclasses import dataclass
from typing import Final

from twinpool.errors import TABLE, TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.v1 import worker_pb2 as pb

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The cause of a failed attempt.

    ``event`` and ``detail`` are what the state machine is told; whether the request is placed anew is its decision.
    ``reason`` and ``message`` are what the client is told if it is not.
    """

    event: str
    detail: str
    reason: str
    message: str
    worker: str = ""
    # It can be reached, but did not answer in time.
    late: bool = False

    @property
    def _failure(self) -> str:
        return self.detail.partition(":")[0] if self.event == "attempt_failed" else ""

    @property
    def costs_budget(self) -> bool:
        """Whether another placement of it costs of the retry budget: a worker had the attempt and failed it."""
        return self.late or self._failure in _COSTLY

    @property
    def blames_worker(self) -> bool:
        """Whether ``worker`` is at fault."""
        return bool(self.worker) and (self.late or self._failure == "INTERNAL")

    @property
    def blames_pair(self) -> bool:
        """Whether one of the two workers is at fault, but not which."""
        return self._failure in _BETWEEN

    @property
    def blames_peer(self) -> bool:
        """Whether ``worker`` says that the other one is at fault."""
        return self._failure == "PEER_LOST"

    def as_error(self, attempts: int, delivered: bool) -> TwinpoolError:
        """What the client is told after ``attempts`` placements; ``delivered``: it has tokens already."""
        facts: dict[str, object] = {"attempts": attempts}
        if self.worker:
            facts["worker"] = self.worker
        if attempts > 1 and not delivered and TABLE[self.reason].retryable:
            text = f"{attempts} placements failed, the last one with {self.reason}: {self.message}"
            return TwinpoolError("ATTEMPTS_EXHAUSTED", text, metadata=facts | {"cause": self.reason})
        return TwinpoolError(self.reason, self.message, metadata=facts)

    def without_budget(self, attempts: int) -> TwinpoolError:
        """What the client is told where the budget does not allow another placement."""
        facts: dict[str, object] = {"attempts": attempts, "cause": self.reason}
        text = f"too many attempts fail to try again; this one with {self.reason}: {self.message}"
        return TwinpoolError("RETRY_BUDGET_EXHAUSTED", text, metadata=facts)

    def log(self, request_id: str, attempt: int, state: str) -> None:
        """Notes the failed attempt, and the state of the request after it."""
        _log.info(
            "attempt_failed",
            request_id=request_id,
            attempt=attempt,
            reason=self.reason,
            worker=self.worker,
            state=state,
        )


# Failures of something between the two workers of an attempt.
_BETWEEN: Final = frozenset({"TRANSFER", "FENCED"})
# Failures that a worker's death does not explain, after which something has run in vain.
_COSTLY: Final = frozenset({"INTERNAL"}) | _BETWEEN

_REASONS: Final[dict[int, str]] = {
    pb.FAILURE_REASON_NO_CAPACITY: "NO_CAPACITY",
    pb.FAILURE_REASON_NOT_SERVING: "NO_CAPACITY",
    pb.FAILURE_REASON_STALE_EPOCH: "NO_CAPACITY",
    pb.FAILURE_REASON_FENCED: "KV_FENCED",
    pb.FAILURE_REASON_TRANSFER: "TRANSFER_FAILED",
    pb.FAILURE_REASON_PEER_LOST: "WORKER_LOST",
    pb.FAILURE_REASON_INVALID: "INVALID_ARGUMENT",
    pb.FAILURE_REASON_INTERNAL: "INTERNAL",
    pb.FAILURE_REASON_DEADLINE: "DEADLINE_EXCEEDED",
    # The router mints the ids: a fault of ours and no client's.
    pb.FAILURE_REASON_DUPLICATE: "INTERNAL",
    pb.FAILURE_REASON_TAKEN_OVER: "STREAM_SUPERSEDED",
}

# As the core calls reasons that it has no row for: no other placement would help; nothing ran there.
_CORE_NAMES: Final[dict[int, str]] = {
    pb.FAILURE_REASON_TAKEN_OVER: "INVALID",
    pb.FAILURE_REASON_STALE_EPOCH: "NOT_SERVING",
}


def said_by(message: pb.AttemptFailed, key: WorkerKey, side: str, *, reserving: bool) -> Outcome:
    """A worker's AttemptFailed. ``side`` is its leg, "prefill" or "decode"; ``reserving``: it is the decode worker's
    answer to the command itself.

    A reason that this version does not know counts as INTERNAL.
    """
    known = message.reason if message.reason in _REASONS else pb.FAILURE_REASON_INTERNAL
    name = _CORE_NAMES.get(known) or pb.FailureReason.Name(known).removeprefix("FAILURE_REASON_")
    text = f"{key.name}: {message.detail or name}"
    refused = reserving and known == pb.FAILURE_REASON_NO_CAPACITY
    if refused:
        return Outcome("decode_refused", "", _REASONS[known], text, key.name)
    return Outcome("attempt_failed", f"{name}:{side}", _REASONS[known], text, key.name)


def lost(key: WorkerKey, side: str, cause: str, *, late: bool = False) -> Outcome:
    """A worker cannot be reached (any more), or is ``late``. ``side``: "prefill" or "decode"."""
    return Outcome("worker_lost", side, "WORKER_LOST", f"{key.name}: {cause}", key.name, late)


def leaving(key: WorkerKey) -> Outcome:
    """The decode worker is about to leave, and another one takes the answer."""
    return Outcome("attempt_failed", "NOT_SERVING:decode", "WORKER_LOST", f"{key.name}: it drains", key.name)


# The answer itself, or its reader, is at fault: no other worker would help.
_FINAL: Final = frozenset({"CLIENT_TOO_SLOW", "DETOKENIZE_FAILED"})


def found(error: TwinpoolError) -> Outcome:
    """A failure that the router itself found in what workers sent."""
    detail = "INVALID" if error.reason in _FINAL else "INTERNAL"
    return Outcome("attempt_failed", detail, error.reason, error.message)


def core_error(cause: str, retry_after: float) -> TwinpoolError:
    """A refusal or an end that the core decided."""
    return TwinpoolError(cause if cause in TABLE else "INTERNAL", retry_after=retry_after or None)
