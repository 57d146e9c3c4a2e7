# SPDX-License-Identifier: Apache-2.0
"""The decode worker's messages to routers: one a step and session, whatever the number of requests."""

from twinpool.decode_worker.attempt import Choice, DecodeAttempt
from twinpool.engine.sampling import Finish, TokenLogprobs
from twinpool.transfer.base import AttemptKey
from twinpool.transfer.session import PullStats
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.inference_pb2 import HandoffStats
from twinpool.worker.load import duration
from twinpool.worker.outbox import Outbox
from twinpool.worker.tokens import finish_reason, position_logprobs


def handoff_done(key: AttemptKey, stats: PullStats) -> pb.SessionResponse:
    """Says that all KV of the prompt is here."""
    moved = HandoffStats(bytes=stats.size_bytes, blocks=stats.blocks, read_time=duration(stats.read_seconds))
    return pb.SessionResponse(handoff_done=pb.HandoffDone(id=key.message(), stats=moved))


def prefill_done(
    attempt: DecodeAttempt, tokens: list[pb.FirstToken], cached_tokens: int, now: float
) -> pb.SessionResponse:
    """Says that the prompt was computed here."""
    started = attempt.arrived if attempt.started is None else attempt.started
    done = pb.PrefillDone(
        id=attempt.key.message(),
        first_tokens=tokens,
        cached_tokens=cached_tokens,
        queue_time=duration(started - attempt.arrived),
        compute_time=duration(now - started),
        fetched=attempt.fetched,
    )
    return pb.SessionResponse(prefill_done=done)


class StepOutput:
    """Gathers the tokens of one step."""

    def __init__(self) -> None:
        self._steps: dict[int, pb.StepTokens] = {}
        self._slots: dict[AttemptKey, int] = {}

    def add(self, choice: Choice, token: int, finish: Finish | None, logprobs: TokenLogprobs | None) -> None:
        """The choice drew ``token``, which is in its draw's history already."""
        attempt = choice.attempt
        step = self._steps.setdefault(attempt.session, pb.StepTokens())
        slot = self._slots.get(attempt.key)
        if slot is None:
            slot = self._slots[attempt.key] = len(step.ids)
            step.ids.append(attempt.key.message())
        entry = step.tokens.add(
            slot=slot, index=choice.index, offset=choice.draw.position - 1, token_id=token
        )
        if finish is not None:
            entry.finish = finish_reason(finish)
        if logprobs is not None:
            entry.logprobs.CopyFrom(position_logprobs(logprobs))

    def send(self, outbox: Outbox) -> None:
        """One message for each session that has tokens."""
        for session, step in self._steps.items():
            outbox.session(session, pb.SessionResponse(step=step))
