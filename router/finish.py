# SPDX-License-Identifier: Apache-2.0
"""The first and the last event of an answer."""

from functools import cache
from typing import Protocol

from prometheus_client import Counter

from twinpool import metrics
from twinpool.ids import WorkerKey
from twinpool.router import genai
from twinpool.router.request import Prepared
from twinpool.router.stream import Answer
from twinpool.router.timing import HopClock
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import worker_pb2 as worker

_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@cache
def _succeeded(reason: str) -> Counter:
    """The counter of choices that end so. Looking it up by its label costs more than counting does."""
    return metrics.ROUTER_REQUEST_SUCCESS.labels(reason)


class FinishedAttempt(Protocol):
    """What is told of the attempt that succeeded."""

    number: int
    prefill: WorkerKey
    decode: WorkerKey
    answer: Answer
    reserved: worker.Reserved | None
    prefill_done: worker.PrefillDone | None
    handoff: pb.HandoffStats | None


def _fetched(done: worker.PrefillDone) -> pb.HandoffStats | None:
    return done.fetched.stats if done.HasField("fetched") else None


def started_event(prepared: Prepared) -> pb.GenerateResponse:
    """The request was accepted and placed."""
    metrics.ROUTER_PROMPT_TOKENS.inc(prepared.prompt_tokens)
    metrics.ROUTER_REQUEST_PROMPT_TOKENS.observe(prepared.prompt_tokens)
    return pb.GenerateResponse(started=started_message(prepared))


def started_message(prepared: Prepared) -> pb.GenerateStarted:
    """What the client is told of an accepted request."""
    return pb.GenerateStarted(
        request_id=prepared.client_id,
        model=prepared.group.model,
        prompt_tokens=prepared.prompt_tokens,
        seed=prepared.sampling.seed,
    )


def finished_event(prepared: Prepared, attempt: FinishedAttempt, clock: HopClock) -> pb.GenerateResponse:
    """Every choice has ended: reasons, counts, times, and who did it."""
    answer = attempt.answer
    assert attempt.prefill_done is not None
    assert attempt.reserved is not None
    cached = min(attempt.reserved.cached_blocks * prepared.group.block_tokens, prepared.prompt_tokens)
    tokens = answer.completion_tokens
    metrics.ROUTER_GENERATION_TOKENS.inc(tokens)
    metrics.ROUTER_REQUEST_GENERATION_TOKENS.observe(tokens)
    for choice in answer.choices:
        _succeeded(_REASONS.get(choice.finish, "unknown")).inc()
    finished = pb.GenerateFinished(
        choices=answer.summaries(),
        usage=pb.Usage(
            prompt_tokens=prepared.prompt_tokens,
            completion_tokens=tokens,
            cached_tokens=min(attempt.prefill_done.cached_tokens, prepared.prompt_tokens),
            decode_cached_tokens=cached,
        ),
        timings=clock.finish(tokens // prepared.n),
        handoff=attempt.handoff,
        prefill_worker=attempt.prefill.name,
        decode_worker=attempt.decode.name,
        attempts=attempt.number,
        prefix_fetch=_fetched(attempt.prefill_done),
    )
    genai.answered(prepared.span, prepared, finished)
    return pb.GenerateResponse(finished=finished)


def resumed_event(prepared: Prepared, answer: Answer, decode_worker: str) -> pb.GenerateResponse:
    """As ``finished_event``, of an answer that was drawn to its end for a router that is lost: its times are lost, too."""
    return pb.GenerateResponse(
        finished=pb.GenerateFinished(
            choices=answer.summaries(),
            usage=pb.Usage(prompt_tokens=prepared.prompt_tokens, completion_tokens=answer.completion_tokens),
            decode_worker=decode_worker,
        )
    )
