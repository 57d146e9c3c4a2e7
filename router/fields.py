# SPDX-License-Identifier: Apache-2.0
"""What each leg of a request gets of each field that a client can set, as one table.

The two legs of an attempt run on different workers. A field that reaches one leg by accident (a token limit on the
prefill leg, a stop string on a worker that has no tokenizer) breaks requests in ways that only show under load, so no
field is copied anywhere that this table does not name. A property test walks the request's descriptor and fails for a
field without a row, and for a command that differs from its row.

The prefill leg draws exactly one token a choice by its role, not by a rewritten limit: it sees the request's true
limits, because it must know whether that one token already ends the choice.
"""

from dataclasses import dataclass
from typing import Final

from twinpool.ids import WorkerKey
from twinpool.router.prefix import Source
from twinpool.router.request import Prepared
from twinpool.v1 import control_pb2
from twinpool.v1 import inference_pb2 as inference
from twinpool.v1 import worker_pb2 as worker


@dataclass(frozen=True, slots=True)
class FieldRule:
    """One field of GenerateRequest.

    ``prefill`` and ``decode`` are the path in PrefillCommand or DecodeCommand that carries it, or "" if that leg never
    sees it. ``answer`` says who acts on it: "router", "prefill" (on the first token), "decode" (on all others) or both.
    """

    field: str
    prefill: str
    decode: str
    answer: str
    why: str


def _router(field: str, why: str) -> FieldRule:
    return FieldRule(field, "", "", "router", why)


def _both(field: str, path: str, why: str) -> FieldRule:
    return FieldRule(field, path, path, "prefill+decode", why)


def _kept(field: str, path: str, why: str) -> FieldRule:
    return FieldRule(field, "", path, "router", why)


def _sampling(name: str) -> FieldRule:
    return _both(
        f"sampling.{name}",
        f"draw.sampling.{name}",
        "the first token is drawn by the same rule as all others",
    )


CHAT: Final = (
    "messages.role",
    "messages.content",
    "messages.tool_calls.id",
    "messages.tool_calls.name",
    "messages.tool_calls.arguments_json",
    "messages.tool_call_id",
    "messages.name",
    "messages.reasoning",
    "omit_generation_prompt",
    "tools.name",
    "tools.description",
    "tools.parameters_json",
    "documents.title",
    "documents.text",
    "variables_json",
    "continue_final_message",
)
"""All of a conversation becomes the prompt."""

FIELDS: Final[tuple[FieldRule, ...]] = (
    _router("model", "chooses the group of workers"),
    _both("token_ids.ids", "prompt.token_ids", "decode needs the ids for penalties and recompute"),
    _both("text", "prompt.token_ids", "tokenised once, by the router"),
    *(
        _both(f"chat.{name}", "prompt.token_ids", "rendered and tokenised once, by the router")
        for name in CHAT
    ),
    *(
        _sampling(name.name)
        for name in inference.SamplingParams.DESCRIPTOR.fields
        if name.message_type is None
    ),
    *(_sampling(f"logit_bias.{name}") for name in ("token_id", "bias")),
    _both("stop.max_tokens", "draw.stop.max_tokens", "prefill must know whether its one token is the last"),
    _both("stop.min_tokens", "draw.stop.min_tokens", "the first token may not be a stop token below it"),
    _router("stop.stop_strings", "only the router has text; it cancels the decode leg at a match"),
    _both("stop.stop_token_ids", "draw.stop_token_ids", "joined with the model's own end-of-sequence ids"),
    _router("stop.include_stop", "only the router has text"),
    _both("stop.ignore_eos", "draw.stop.ignore_eos", "leaves the model's own ids out of draw.stop_token_ids"),
    *(
        _both(f"structured.{form}", "draw.grammar", "compiled to one grammar by the router")
        for form in ("json_schema", "regex", "lark", "choices.texts")
    ),
    _both("n", "draw.n", "prefill draws the first token of each choice, decode forks the sequence"),
    FieldRule(
        "prompt_logprobs",
        "draw.prompt_logprobs",
        "draw.prompt_logprobs",
        "prefill",
        "whoever computes the prompt reports them; both legs draw by one rule",
    ),
    _both("logprobs", "draw.logprobs", "each leg reports those of the tokens that it draws"),
    _router("request_id", "the client's name for it; workers see the id that the router minted"),
    _both("priority", "priority", "order of waiting on the worker"),
    _both("preemptible", "preemptible", "each worker decides whose blocks to take"),
    _both("tenant", "prompt.root_hash", "salts the block hashes: tenants share no prefix"),
    _both("adapter", "prompt.root_hash", "part of the namespace of the block hashes"),
    _kept("resume_grace.seconds", "portable.grace.seconds", "how long the decode worker keeps the tokens"),
    _kept("resume_grace.nanos", "portable.grace.nanos", "how long the decode worker keeps the tokens"),
    _both("session_id", "session", "each leg's worker notes what the session has left in its cache"),
    _router("repeated", "where else an answer with its key is looked for"),
    _kept("idempotency_key", "portable.key", "by its digest a router finds an answer whose router is lost"),
)
"""One row for each leaf field of GenerateRequest."""


def worker_id(key: WorkerKey) -> worker.WorkerId:
    """A worker's name and incarnation on the wire."""
    return worker.WorkerId(name=key.name, incarnation=key.incarnation)


def draw_spec(prepared: Prepared) -> worker.DrawSpec:
    """How both legs draw tokens: every default filled in, stop strings left out."""
    spec = worker.DrawSpec(n=prepared.n, stop_token_ids=prepared.stop_token_ids, drawn=prepared.drawn)
    spec.grammar = prepared.grammar
    spec.sampling.CopyFrom(prepared.sampling)
    spec.stop.max_tokens = prepared.max_tokens
    spec.stop.min_tokens = prepared.min_tokens
    spec.stop.ignore_eos = prepared.ignore_eos
    if prepared.logprobs is not None:
        spec.logprobs = prepared.logprobs
    if prepared.prompt_logprobs is not None:
        spec.prompt_logprobs = prepared.prompt_logprobs
    return spec


def prompt_spec(prepared: Prepared) -> worker.PromptSpec:
    """The prompt and its hashes, packed."""
    return worker.PromptSpec(
        token_ids=prepared.tokens.astype("<i4", copy=False).tobytes(),
        block_hashes=prepared.hashes.tobytes(),
        root_hash=prepared.root,
    )


def decode_command(
    prepared: Prepared,
    attempt: worker.AttemptId,
    owner: control_pb2.WorkerRecord | None,
    prefix: Source | None = None,
) -> worker.DecodeCommand:
    """The decode leg's command. Its deadline is what is left of the client's now. ``owner`` None: it computes the prompt
    itself, after it has pulled ``prefix``."""
    return worker.DecodeCommand(
        id=attempt,
        prompt=prompt_spec(prepared),
        draw=draw_spec(prepared),
        owner=owner.worker if owner is not None else None,
        owner_endpoint=owner.endpoint if owner is not None else "",
        priority=prepared.priority,
        preemptible=prepared.preemptible,
        deadline=prepared.deadline.to_proto(),
        prefix=prefix.message if prefix is not None and owner is None else None,
        traceparent=prepared.span.traceparent,
        portable=prepared.portable,
        session=prepared.session,
    )


def prefill_command(
    prepared: Prepared,
    attempt: worker.AttemptId,
    reader: worker.WorkerId,
    reader_cached_blocks: int,
    prefix: Source | None = None,
) -> worker.PrefillCommand:
    """The prefill leg's command. ``reader_cached_blocks`` is what the decode worker said when it reserved; ``prefix`` is
    pulled before anything is computed."""
    return worker.PrefillCommand(
        id=attempt,
        prompt=prompt_spec(prepared),
        draw=draw_spec(prepared),
        reader=reader,
        reader_cached_blocks=reader_cached_blocks,
        priority=prepared.priority,
        preemptible=prepared.preemptible,
        deadline=prepared.deadline.to_proto(),
        prefix=prefix.message if prefix is not None else None,
        traceparent=prepared.span.traceparent,
        session=prepared.session,
    )
