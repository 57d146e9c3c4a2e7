# SPDX-License-Identifier: Apache-2.0
"""What a fake worker is told to do, and one attempt on it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from twinpool.v1 import inference_pb2
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.resume_pb2 import PortableRequest

AttemptKey = tuple[str, int]
FIRST_TOKEN = 65


def counting_token(prompt: "Job", choice: int, offset: int) -> int:
    """Default: letters of the byte-level test tokenizer, another sequence for each choice."""
    return FIRST_TOKEN + (offset + choice) % 26


@dataclass
class Script:
    """What a fake worker does. It may be changed at any time; a command reads it when it comes.

    ``prefill_gate``: no prefill ends before it is set; ``handoff_gate``: no hand-off.
    ``report_seconds``: by so much prefill tells its reader before it tells the router.
    ``refuse``: the reason with which every command is refused. ``fail_prefill``: after ``prefill_seconds``.
    ``scored_a_message``: positions of a prompt that one message tells of; ``scored_before_failure``: such messages that go out before
    ``fail_prefill``; ``garble``: what is done to each of them.
    ``fail_fetch``: why no prefix is pulled. ``hold_after_tokens``: decode stands still once it has drawn so many tokens of a choice.
    ``fail_after_tokens``: decode fails with ``fail_reason`` once it has drawn so many tokens of a choice. ``silent``: messages that
    are not sent ("welcome", "reserved", "prompt_scored", "prefill_done", "handoff_done", "cancelled").
    """

    reserve_seconds: float = 0.0
    refuse: "pb.FailureReason.ValueType | None" = None
    detail: str = "scripted"
    reserved_cached_blocks: int = 0
    prefill_seconds: float = 0.0
    prefill_gate: asyncio.Event | None = None
    prefill_cached_tokens: int = 0
    fail_prefill: "pb.FailureReason.ValueType | None" = None
    scored_a_message: int = 8
    scored_before_failure: int = 0
    garble: "Callable[[inference_pb2.PromptLogprobs], object] | None" = None
    fail_fetch: "pb.FailureReason.ValueType | None" = None
    handoff_seconds: float = 0.0
    handoff_gate: asyncio.Event | None = None
    fail_handoff: "pb.FailureReason.ValueType | None" = None
    step_seconds: float = 0.0
    hold_after_tokens: int | None = None
    fail_after_tokens: int | None = None
    fail_reason: "pb.FailureReason.ValueType" = pb.FAILURE_REASON_INTERNAL
    cancel_seconds: float = 0.0
    extra_first_token: bool = False
    report_seconds: float = 0.0
    token: "Callable[[Job, int, int], int]" = counting_token
    silent: set[str] = field(default_factory=set)


@dataclass
class Job:
    """One attempt on a worker."""

    key: AttemptKey
    prompt: np.ndarray
    draw: pb.DrawSpec
    task: asyncio.Task[None] | None = None
    offsets: dict[int, int] = field(default_factory=dict)
    portable: PortableRequest | None = None
    rows: dict[int, list[int]] = field(default_factory=dict)

    def drew(self, choice: int, token_id: int) -> None:
        """A token of a choice is out."""
        drawn = self.draw.drawn
        earlier = self.prompt[len(self.prompt) - drawn :].tolist() if drawn else []
        self.rows.setdefault(choice, earlier).append(token_id)

    def first_token(self, script: Script, choice: int) -> pb.FirstToken:
        """What prefill draws for a choice, with the stop rules applied."""
        drawn = self.draw.drawn
        token_id = script.token(self, choice, drawn)
        token = pb.FirstToken(index=choice, token_id=token_id, finish=self.finish_of(token_id, drawn))
        if self.draw.HasField("logprobs"):
            token.logprobs.CopyFrom(fake_logprobs(token_id, self.draw.logprobs))
        return token

    def scored(self, script: Script) -> list[pb.PromptScored]:
        """What is said of the prompt, if it is asked for: position ``p`` has the log-probability ``-p``."""
        if not self.draw.HasField("prompt_logprobs"):
            return []
        out = []
        for begin in range(1, len(self.prompt), script.scored_a_message):
            said = pb.PromptScored(id=pb.AttemptId(request_id=self.key[0], attempt=self.key[1]))
            said.logprobs.offset = begin
            for at in range(begin, min(begin + script.scored_a_message, len(self.prompt))):
                position = fake_logprobs(int(self.prompt[at]), self.draw.prompt_logprobs)
                position.chosen.logprob = -float(at)
                said.logprobs.positions.append(position)
            if script.garble is not None:
                script.garble(said.logprobs)
            out.append(said)
        return out

    def finish_of(self, token_id: int, offset: int) -> "inference_pb2.FinishReason.ValueType":
        """Whether a token at ``offset`` ends its choice."""
        if token_id in self.draw.stop_token_ids and offset + 1 > self.draw.stop.min_tokens:
            return inference_pb2.FINISH_REASON_STOP
        if offset + 1 >= self.draw.stop.max_tokens:
            return inference_pb2.FINISH_REASON_LENGTH
        return inference_pb2.FINISH_REASON_UNSPECIFIED


def fake_logprobs(token_id: int, alternatives: int) -> inference_pb2.PositionLogprobs:
    """-0.5 for the token, then -1.0, -2.0 ... for the next ids."""
    message = inference_pb2.PositionLogprobs()
    message.chosen.token_id, message.chosen.logprob = token_id, -0.5
    for rank in range(alternatives):
        message.top.add(token_id=(token_id + rank) % 256, logprob=-float(rank + 1))
    return message
