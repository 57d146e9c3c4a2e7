# SPDX-License-Identifier: Apache-2.0
"""What a request may contain. Everything is checked before any block is reserved anywhere.

Each refusal names the field, the value and the limit. Numbers have their ranges in one table; the rest are rules over
lists, text and the prompt.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from twinpool.config.router import RouterSection
from twinpool.errors import TwinpoolError
from twinpool.ids import is_request_id
from twinpool.router.request import Group, Params
from twinpool.router.utf8 import refuse_unknown_fields
from twinpool.v1 import inference_pb2 as inference
from twinpool.v1.chat_pb2 import ChatRequest

_MAX_PRIORITY: Final = 100
_MAX_BIAS: Final = 100.0
_MAX_SHOWN_CHARS: Final = 48
MAX_KEY_CHARS: Final = 128
"""Longest idempotency key."""
MAX_SESSION_CHARS: Final = 128
"""Longest session id."""


@dataclass(frozen=True, slots=True)
class SamplingRange:
    """A sampling parameter: its default and the closed range of its values, open below where it says so."""

    name: str
    default: float
    low: float
    high: float
    above_low: bool = False

    def describe(self) -> str:
        """The range in words."""
        low = f"above {self.low:g}" if self.above_low else f"{self.low:g}"
        return f"{low} to {self.high:g}"

    def holds(self, value: float) -> bool:
        """False also for NaN, which compares false with everything."""
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high


SAMPLING: Final = (
    SamplingRange("temperature", 1.0, 0.0, 100.0),
    SamplingRange("top_p", 1.0, 0.0, 1.0, above_low=True),
    SamplingRange("min_p", 0.0, 0.0, 1.0),
    SamplingRange("presence_penalty", 0.0, -2.0, 2.0),
    SamplingRange("frequency_penalty", 0.0, -2.0, 2.0),
    SamplingRange("repetition_penalty", 1.0, 0.0, 10.0, above_low=True),
)
"""The parameters that are real numbers; ``top_k`` depends on the vocabulary and ``seed`` may be anything."""


def check_params(
    request: inference.GenerateRequest, limits: RouterSection, group: Group, seed: int
) -> Params:
    """All of a request but its prompt, with defaults filled in. ``seed`` is used if the client gave none.

    Raises TwinpoolError for the first rule that the request breaks.
    """
    refuse_unknown_fields(request)
    refuse_unknown_fields(request.sampling, "sampling")
    refuse_unknown_fields(request.stop, "stop")
    if request.request_id and not is_request_id(request.request_id):
        raise TwinpoolError(
            "INVALID_REQUEST_ID",
            f"request_id is {shown(request.request_id)}; the limit is 128 characters of A-Z a-z 0-9 . _ : -",
            field="request_id",
        )
    check_choices(request.n, limits)
    if request.HasField("logprobs"):
        _within("logprobs", "INVALID_LOGPROBS", request.logprobs, 0, limits.max_logprobs)
    if request.HasField("prompt_logprobs"):
        _within("prompt_logprobs", "INVALID_LOGPROBS", request.prompt_logprobs, 0, limits.max_logprobs)
    _within("priority", "INVALID_PRIORITY", request.priority, -_MAX_PRIORITY, _MAX_PRIORITY)
    _check_tenant(request.tenant, limits)
    check_session(request.session_id)
    if request.adapter:
        raise TwinpoolError(
            "ADAPTER_NOT_FOUND",
            f"adapter is {shown(request.adapter)}; the limit is none, since no worker of {group.model!r} has one",
            field="adapter",
        )
    stop = _check_stop(request.stop, limits, group)
    return Params(
        sampling=_check_sampling(request.sampling, group, limits, seed),
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        stop_strings=tuple(stop.stop_strings),
        stop_token_ids=tuple(stop.stop_token_ids),
        ignore_eos=stop.ignore_eos,
        include_stop=stop.include_stop,
        n=request.n or 1,
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        priority=request.priority,
        preemptible=request.preemptible if request.HasField("preemptible") else True,
        tenant=request.tenant,
        adapter=request.adapter,
        session_id=request.session_id,
    )


@dataclass(frozen=True, slots=True)
class Resumable:
    """That an answer can be resumed: for how many seconds, and under which idempotency key, if any. ``digest``: of the request
    that brings the key."""

    grace_seconds: float
    key: str
    digest: bytes


def check_resumable(
    request: inference.GenerateRequest, limits: RouterSection, turn: ChatRequest | None = None
) -> Resumable | None:
    """None: the client leaves it at one stream. ``turn``: the chat that it is the request of. Raises INVALID_RESUME."""
    key, given = request.idempotency_key, request.HasField("resume_grace")
    if not key and not given:
        if turn is not None and turn.positions:
            raise TwinpoolError(
                "INVALID_RESUME",
                "positions are set without an idempotency key or a resume grace",
                field="positions",
            )
        return None
    refuse_unknown_fields(request.resume_grace, "resume_grace")
    grace, most = request.resume_grace.ToNanoseconds() / 1e9, limits.max_resume_grace_seconds
    if not 0 <= grace <= most:
        raise TwinpoolError(
            "INVALID_RESUME",
            f"resume_grace is {grace:g} s; the limit is 0 to {most:g}",
            field="resume_grace",
            metadata={"limit": most},
        )
    check_key(key)
    grace = grace or (min(limits.resume_grace_seconds, most) if key else 0.0)
    if not grace:
        return None
    return Resumable(grace, key, _digest_of(request) if turn is None else _digest_of_turn(turn))


def check_key(key: str) -> None:
    """Raises INVALID_RESUME for what is no idempotency key."""
    if len(key) > MAX_KEY_CHARS or not key.isprintable():
        raise TwinpoolError(
            "INVALID_RESUME",
            f"idempotency_key has {len(key)} characters; the limit is {MAX_KEY_CHARS} printable ones",
            field="idempotency_key",
        )


def _digest_of(request: inference.GenerateRequest) -> bytes:
    """Of all that its answer depends on."""
    asked = inference.GenerateRequest()
    asked.CopyFrom(request)
    asked.ClearField("resume_grace")
    asked.ClearField("repeated")
    return hashlib.sha256(asked.SerializeToString(deterministic=True)).digest()


def _digest_of_turn(turn: ChatRequest) -> bytes:
    asked = ChatRequest()
    asked.CopyFrom(turn)
    asked.ClearField("positions")
    asked.request.ClearField("resume_grace")
    asked.request.ClearField("repeated")
    # No Generate is the same request as a Chat, whatever it says.
    return hashlib.sha256(b"chat:" + asked.SerializeToString(deterministic=True)).digest()


def check_text(text: str, field: str, limits: RouterSection) -> None:
    """Raises for text that is empty or too long to be worth tokenising."""
    if not text:
        raise TwinpoolError(
            "EMPTY_PROMPT", f"{field} is empty; the limit is at least 1 character", field=field
        )
    if len(text) > limits.max_prompt_chars:
        raise TwinpoolError(
            "PROMPT_TOO_LONG",
            f"{field} has {len(text)} characters; the limit is {limits.max_prompt_chars}",
            field=field,
            metadata={"limit": limits.max_prompt_chars},
        )


def check_token_ids(tokens: NDArray[np.uint32], group: Group) -> NDArray[np.int32]:
    """Token ids as the client sent them, as int32. Raises for an id outside the vocabulary."""
    if len(tokens) and int(tokens.max()) >= group.vocab_size:
        at = int(np.argmax(tokens >= group.vocab_size))
        field = f"token_ids.ids[{at}]"
        raise TwinpoolError(
            "TOKEN_OUT_OF_VOCABULARY",
            f"{field} is {int(tokens[at])}; the limit is {group.vocab_size - 1}",
            field=field,
            metadata={"limit": group.vocab_size - 1},
        )
    return tokens.astype(np.int32)


def check_vocabulary(tokens: NDArray[np.int32], field: str, group: Group) -> None:
    """Raises if the router's tokenizer gave an id that the model does not have: their files differ."""
    if len(tokens) and int(tokens.max()) >= group.vocab_size:
        raise TwinpoolError(
            "TOKEN_OUT_OF_VOCABULARY",
            f"{field} has a token of id {int(tokens.max())}; the limit is {group.vocab_size - 1}",
            field=field,
        )


def check_length(tokens: int, params: Params, field: str, limits: RouterSection, group: Group) -> int:
    """Raises if a prompt of ``tokens`` is empty or too long; returns the most tokens that the answer may have."""
    if tokens == 0:
        raise TwinpoolError("EMPTY_PROMPT", f"{field} has 0 tokens; the limit is at least 1", field=field)
    # One position must be left for the answer.
    most = min(limits.max_prompt_tokens, group.max_context_tokens - 1)
    if tokens > most:
        raise TwinpoolError(
            "PROMPT_TOO_LONG",
            f"{field} has {tokens} tokens; the limit is {most}",
            field=field,
            metadata={"limit": most},
        )
    left = min(group.max_context_tokens, group.capacity_tokens) - tokens
    if params.max_tokens > group.max_context_tokens - tokens:
        raise TwinpoolError(
            "CONTEXT_LIMIT_EXCEEDED",
            f"the prompt of {tokens} tokens and stop.max_tokens of {params.max_tokens} make "
            f"{tokens + params.max_tokens}; the limit is {group.max_context_tokens}",
            field="stop.max_tokens",
            metadata={"limit": group.max_context_tokens},
        )
    if params.prompt_logprobs is not None and tokens > limits.max_scored_prompt_tokens:
        raise TwinpoolError(
            "PROMPT_TOO_LONG",
            f"prompt_logprobs is set for a prompt of {tokens} tokens; the limit is {limits.max_scored_prompt_tokens}",
            field="prompt_logprobs",
            metadata={"limit": limits.max_scored_prompt_tokens},
        )
    _check_capacity(tokens, params, group)
    allowed = params.max_tokens or min(left, limits.max_output_tokens)
    if params.min_tokens > allowed:
        raise TwinpoolError(
            "INVALID_STOP",
            f"stop.min_tokens is {params.min_tokens}; the limit is stop.max_tokens, {allowed}",
            field="stop.min_tokens",
        )
    return allowed


def _check_capacity(tokens: int, params: Params, group: Group) -> None:
    """Raises for a request that would wait for ever: no pool of the group holds it, however idle."""
    # A decode worker reserves one block beyond the prompt.
    need = max(-(-tokens // group.block_tokens) + 1, -(-(tokens + params.max_tokens) // group.block_tokens))
    if need > group.num_blocks:
        raise TwinpoolError(
            "REQUEST_EXCEEDS_CAPACITY",
            f"the prompt of {tokens} tokens and stop.max_tokens of {params.max_tokens} need {need} KV blocks of "
            f"{group.block_tokens}; the limit is {group.num_blocks}",
            metadata={"limit": group.num_blocks},
        )


def _check_sampling(
    given: inference.SamplingParams, group: Group, limits: RouterSection, seed: int
) -> inference.SamplingParams:
    full = inference.SamplingParams(seed=given.seed if given.HasField("seed") else seed)
    for rule in SAMPLING:
        value: float = getattr(given, rule.name) if given.HasField(rule.name) else rule.default  # type: ignore[arg-type]
        if not rule.holds(value):
            field = f"sampling.{rule.name}"
            raise TwinpoolError(
                "INVALID_SAMPLING", f"{field} is {value:g}; the limit is {rule.describe()}", field=field
            )
        setattr(full, rule.name, value)
    _within("sampling.top_k", "INVALID_SAMPLING", given.top_k, 0, group.vocab_size)
    full.top_k = given.top_k
    _check_bias(given.logit_bias, group, limits)
    full.logit_bias.extend(given.logit_bias)
    return full


def _check_bias(entries: Sequence[inference.LogitBias], group: Group, limits: RouterSection) -> None:
    name = "sampling.logit_bias"
    if len(entries) > limits.max_logit_biases:
        raise TwinpoolError(
            "INVALID_SAMPLING",
            f"{name} has {len(entries)} entries; the limit is {limits.max_logit_biases}",
            field=name,
        )
    seen: set[int] = set()
    for index, entry in enumerate(entries):
        field = f"{name}[{index}]"
        refuse_unknown_fields(entry, field)
        _within(f"{field}.token_id", "TOKEN_OUT_OF_VOCABULARY", entry.token_id, 0, group.vocab_size - 1)
        if not -_MAX_BIAS <= entry.bias <= _MAX_BIAS:
            text = f"{field}.bias is {entry.bias:g}; the limit is {-_MAX_BIAS:g} to {_MAX_BIAS:g}"
            raise TwinpoolError("INVALID_SAMPLING", text, field=f"{field}.bias")
        if entry.token_id in seen:
            text = f"{field}.token_id is named before; the limit is once"
            raise TwinpoolError("INVALID_SAMPLING", text, field=f"{field}.token_id")
        seen.add(entry.token_id)


def _check_stop(
    stop: inference.StopConditions, limits: RouterSection, group: Group
) -> inference.StopConditions:
    if stop.HasField("max_tokens"):
        _within("stop.max_tokens", "INVALID_STOP", stop.max_tokens, 1, limits.max_output_tokens)
    strings = stop.stop_strings
    _count("stop.stop_strings", len(strings), limits.max_stop_strings)
    for index, text in enumerate(strings):
        field = f"stop.stop_strings[{index}]"
        if not 1 <= len(text) <= limits.max_stop_string_chars:
            raise TwinpoolError(
                "INVALID_STOP",
                f"{field} has {len(text)} characters; the limit is 1 to {limits.max_stop_string_chars}",
                field=field,
            )
    _count("stop.stop_token_ids", len(stop.stop_token_ids), limits.max_stop_token_ids)
    for index, token in enumerate(stop.stop_token_ids):
        _within(f"stop.stop_token_ids[{index}]", "TOKEN_OUT_OF_VOCABULARY", token, 0, group.vocab_size - 1)
    return stop


def _check_tenant(tenant: str, limits: RouterSection) -> None:
    if len(tenant) > limits.max_tenant_chars or not tenant.isprintable():
        raise TwinpoolError(
            "INVALID_TENANT",
            f"tenant is {shown(tenant)}; the limit is {limits.max_tenant_chars} printable characters",
            field="tenant",
        )


def check_session(session_id: str) -> None:
    """Raises INVALID_SESSION."""
    if len(session_id) > MAX_SESSION_CHARS or not session_id.isprintable():
        raise TwinpoolError(
            "INVALID_SESSION",
            f"session_id has {len(session_id)} characters; the limit is {MAX_SESSION_CHARS} printable ones",
            field="session_id",
            metadata={"limit": MAX_SESSION_CHARS},
        )


def check_choices(n: int, limits: RouterSection) -> None:
    """Raises INVALID_N. For who makes something for each choice before the request is checked as a whole."""
    _within("n", "INVALID_N", n or 1, 1, limits.max_choices)


def _within(field: str, reason: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise TwinpoolError(
            reason, f"{field} is {value}; the limit is {low} to {high}", field=field, metadata={"limit": high}
        )


def _count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise TwinpoolError("INVALID_STOP", f"{field} has {count} entries; the limit is {limit}", field=field)


def shown(text: str) -> str:
    """A short identifier as it may appear in a message."""
    return repr(text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…")
