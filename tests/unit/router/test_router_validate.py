# SPDX-License-Identifier: Apache-2.0
"""Bad input is refused with the reason of its kind and a message that names field, value and limit."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.config.router import RouterSection
from twinpool.errors import TwinpoolError
from twinpool.router.chat.conversation import check_conversation
from twinpool.router.request import Group, Params
from twinpool.router.utf8 import Unparsed, lenient
from twinpool.router.validate import (
    SAMPLING,
    check_length,
    check_params,
    check_text,
    check_token_ids,
)
from twinpool.v1 import inference_pb2 as pb

GROUP = Group("default", "fake", "fp", "llama", 258, 16, 128, 64, (257,), "/models/fake")
LIMITS = RouterSection(
    max_prompt_chars=1000, max_stop_string_chars=8, max_output_tokens=100, max_tenant_chars=8
)


def params(change: Callable[[pb.GenerateRequest], object] = lambda request: None) -> Params:
    request = pb.GenerateRequest()
    change(request)
    return check_params(request, LIMITS, GROUP, seed=7)


def refusal(change: Callable[[pb.GenerateRequest], object]) -> TwinpoolError:
    with pytest.raises(TwinpoolError) as caught:
        params(change)
    return caught.value


def test_defaults_are_filled_in() -> None:
    full = params()
    assert full.n == 1
    assert full.max_tokens == 0
    assert full.logprobs is None
    assert full.sampling.seed == 7
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        if field.message_type is None:
            assert full.sampling.HasField(field.name), f"{field.name} is not filled in"
    assert (full.sampling.temperature, full.sampling.top_p, full.sampling.repetition_penalty) == (
        1.0,
        1.0,
        1.0,
    )


BAD: list[tuple[str, str, Callable[[pb.GenerateRequest], object], list[str]]] = [
    (
        "temperature",
        "INVALID_SAMPLING",
        lambda r: setattr(r.sampling, "temperature", -0.5),
        ["-0.5", "0 to 100"],
    ),
    ("temperature nan", "INVALID_SAMPLING", lambda r: setattr(r.sampling, "temperature", math.nan), ["nan"]),
    ("temperature inf", "INVALID_SAMPLING", lambda r: setattr(r.sampling, "temperature", math.inf), ["inf"]),
    ("temperature hot", "INVALID_SAMPLING", lambda r: setattr(r.sampling, "temperature", 101), ["101"]),
    (
        "top_p zero",
        "INVALID_SAMPLING",
        lambda r: setattr(r.sampling, "top_p", 0),
        ["sampling.top_p is 0", "above 0"],
    ),
    ("top_p", "INVALID_SAMPLING", lambda r: setattr(r.sampling, "top_p", 1.5), ["1.5", "above 0 to 1"]),
    ("min_p", "INVALID_SAMPLING", lambda r: setattr(r.sampling, "min_p", -1), ["-1", "0 to 1"]),
    ("top_k", "INVALID_SAMPLING", lambda r: setattr(r.sampling, "top_k", 259), ["259", "0 to 258"]),
    ("presence", "INVALID_SAMPLING", lambda r: setattr(r.sampling, "presence_penalty", 3), ["3", "-2 to 2"]),
    (
        "frequency",
        "INVALID_SAMPLING",
        lambda r: setattr(r.sampling, "frequency_penalty", -3),
        ["-3", "-2 to 2"],
    ),
    (
        "repetition",
        "INVALID_SAMPLING",
        lambda r: setattr(r.sampling, "repetition_penalty", 0),
        ["above 0 to 10"],
    ),
    (
        "max_tokens",
        "INVALID_STOP",
        lambda r: setattr(r.stop, "max_tokens", 0),
        ["stop.max_tokens is 0", "1 to 100"],
    ),
    ("max_tokens big", "INVALID_STOP", lambda r: setattr(r.stop, "max_tokens", 101), ["101", "1 to 100"]),
    (
        "stop empty",
        "INVALID_STOP",
        lambda r: r.stop.stop_strings.append(""),
        ["stop_strings[0]", "0", "1 to 8"],
    ),
    ("stop long", "INVALID_STOP", lambda r: r.stop.stop_strings.append("x" * 9), ["9 characters", "1 to 8"]),
    ("stop many", "INVALID_STOP", lambda r: r.stop.stop_strings.extend("x" * 17), ["17", "16"]),
    ("stop ids many", "INVALID_STOP", lambda r: r.stop.stop_token_ids.extend([1] * 65), ["65", "64"]),
    (
        "stop id",
        "TOKEN_OUT_OF_VOCABULARY",
        lambda r: r.stop.stop_token_ids.extend([1, 258]),
        ["stop.stop_token_ids[1] is 258", "0 to 257"],
    ),
    ("n", "INVALID_N", lambda r: setattr(r, "n", 17), ["n is 17", "1 to 16"]),
    ("logprobs", "INVALID_LOGPROBS", lambda r: setattr(r, "logprobs", 21), ["logprobs is 21", "0 to 20"]),
    (
        "prompt_logprobs",
        "INVALID_LOGPROBS",
        lambda r: setattr(r, "prompt_logprobs", 21),
        ["prompt_logprobs is 21", "0 to 20"],
    ),
    (
        "priority",
        "INVALID_PRIORITY",
        lambda r: setattr(r, "priority", 101),
        ["priority is 101", "-100 to 100"],
    ),
    ("priority low", "INVALID_PRIORITY", lambda r: setattr(r, "priority", -101), ["-101", "-100 to 100"]),
    ("request id", "INVALID_REQUEST_ID", lambda r: setattr(r, "request_id", "a b"), ["'a b'", "128"]),
    ("request id long", "INVALID_REQUEST_ID", lambda r: setattr(r, "request_id", "a" * 129), ["128"]),
    ("tenant", "INVALID_TENANT", lambda r: setattr(r, "tenant", "t" * 9), ["tenant", "8 printable"]),
    ("tenant control", "INVALID_TENANT", lambda r: setattr(r, "tenant", "a\n"), ["tenant"]),
    ("adapter", "ADAPTER_NOT_FOUND", lambda r: setattr(r, "adapter", "lora"), ["adapter is 'lora'"]),
]


@pytest.mark.parametrize(("reason", "change", "words"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_values_are_named(
    reason: str, change: Callable[[pb.GenerateRequest], object], words: list[str]
) -> None:
    error = refusal(change)
    assert error.reason == reason
    assert error.field, "the field is named"
    assert error.field in error.message
    assert "the limit is" in error.message
    for word in words:
        assert word in error.message


@given(st.floats(width=32), st.sampled_from(SAMPLING))
def test_a_sampling_value_passes_exactly_within_its_range(value: float, rule: object) -> None:
    rule = next(known for known in SAMPLING if known is rule)
    inside = (
        not math.isnan(value)
        and rule.low <= value <= rule.high
        and not (rule.above_low and value == rule.low)
    )
    request = pb.GenerateRequest()
    setattr(request.sampling, rule.name, value)
    if inside:
        assert getattr(check_params(request, LIMITS, GROUP, 1).sampling, rule.name) == getattr(
            request.sampling, rule.name
        )
    else:
        with pytest.raises(TwinpoolError, match=f"sampling.{rule.name}"):
            check_params(request, LIMITS, GROUP, 1)


def test_an_unknown_field_is_refused_wherever_it_is() -> None:
    field_99 = bytes([0x9A, 0x06, 0x01, 0x41])  # number 99, one byte long
    for build, where in (
        (lambda: pb.GenerateRequest.FromString(field_99), "the request"),
        (lambda: pb.GenerateRequest(sampling=pb.SamplingParams.FromString(field_99)), "sampling"),
        (lambda: pb.GenerateRequest(stop=pb.StopConditions.FromString(field_99)), "stop"),
    ):
        with pytest.raises(TwinpoolError) as caught:
            check_params(build(), LIMITS, GROUP, 1)
        assert caught.value.reason == "INVALID_ARGUMENT"
        assert f"{where} has field number 99" in caught.value.message


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "reason"),
    [
        (0, 1, "EMPTY_PROMPT"),
        (128, 0, "PROMPT_TOO_LONG"),
        (127, 2, "CONTEXT_LIMIT_EXCEEDED"),
        (1, 128, "CONTEXT_LIMIT_EXCEEDED"),
    ],
)
def test_lengths_over_the_limit(tokens: int, max_tokens: int, reason: str) -> None:
    given_params = params(
        lambda r: setattr(r.stop, "max_tokens", max_tokens) if 0 < max_tokens <= 100 else None
    )
    if max_tokens > 100:
        object.__setattr__(given_params, "max_tokens", max_tokens)
    with pytest.raises(TwinpoolError) as caught:
        check_length(tokens, given_params, "text", LIMITS, GROUP)
    assert caught.value.reason == reason
    assert "the limit is" in caught.value.message


def test_lengths_at_the_limit() -> None:
    assert check_length(127, params(), "text", LIMITS, GROUP) == 1
    assert check_length(28, params(), "text", LIMITS, GROUP) == 100
    assert check_length(27, params(), "text", LIMITS, GROUP) == 100, (
        "the router's own limit of tokens holds too"
    )
    with pytest.raises(TwinpoolError, match=r"stop\.min_tokens is 6; the limit is stop\.max_tokens, 5"):
        check_length(
            10,
            params(lambda r: r.stop.MergeFrom(pb.StopConditions(max_tokens=5, min_tokens=6))),
            "",
            LIMITS,
            GROUP,
        )


def test_a_scored_prompt_has_a_limit_of_its_own() -> None:
    limits = LIMITS.model_copy(update={"max_scored_prompt_tokens": 20})
    scored = params(lambda r: setattr(r, "prompt_logprobs", 0))
    assert scored.prompt_logprobs == 0
    assert check_length(20, scored, "text", limits, GROUP) == 100
    assert check_length(21, params(), "text", limits, GROUP) == 100
    with pytest.raises(TwinpoolError, match="a prompt of 21 tokens; the limit is 20") as caught:
        check_length(21, scored, "text", limits, GROUP)
    assert (caught.value.reason, caught.value.metadata["limit"]) == ("PROMPT_TOO_LONG", "20")
    assert "prompt_logprobs" in caught.value.message


def test_what_no_pool_holds_is_refused_at_once() -> None:
    small = dataclasses.replace(GROUP, num_blocks=4)
    assert check_length(48, params(), "text", LIMITS, small) == 16, "the default is what the pool leaves"
    for tokens, max_tokens in ((49, 0), (40, 25)):
        wanted = params(lambda r, most=max_tokens: setattr(r.stop, "max_tokens", most) if most else None)
        with pytest.raises(TwinpoolError, match="need 5 KV blocks of 16; the limit is 4") as caught:
            check_length(tokens, wanted, "text", LIMITS, small)
        assert caught.value.reason == "REQUEST_EXCEEDS_CAPACITY"


def test_token_ids_outside_the_vocabulary() -> None:
    with pytest.raises(TwinpoolError) as caught:
        check_token_ids(np.array([1, 2, 2**32 - 1], np.uint32), GROUP)
    assert caught.value.reason == "TOKEN_OUT_OF_VOCABULARY"
    assert "token_ids.ids[2] is 4294967295; the limit is 257" in caught.value.message
    assert check_token_ids(np.array([0, 257], np.uint32), GROUP).tolist() == [0, 257]


def test_text_and_chat() -> None:
    for check, reason in (
        (lambda: check_text("", "text", LIMITS), "EMPTY_PROMPT"),
        (lambda: check_text("x" * 1001, "text", LIMITS), "PROMPT_TOO_LONG"),
        (lambda: check_conversation(pb.ChatMessages(), LIMITS), "EMPTY_PROMPT"),
        (lambda: check_conversation(chat("robot", "x"), LIMITS), "INVALID_CHAT"),
        (lambda: check_conversation(chat("user", "x" * 1001), LIMITS), "PROMPT_TOO_LONG"),
        (
            lambda: check_conversation(
                pb.ChatMessages(messages=[pb.ChatMessage(role="user")] * 4097), LIMITS
            ),
            "INVALID_CHAT",
        ),
    ):
        with pytest.raises(TwinpoolError, match="the limit is") as caught:
            check()
        assert caught.value.reason == reason
    check_conversation(chat("user", "x"), LIMITS)


def chat(role: str, content: str) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=content)])


def test_invalid_utf8_names_the_field() -> None:
    for build, field in (
        (lambda: pb.GenerateRequest(text="QQQ"), "text"),
        (lambda: pb.GenerateRequest(tenant="QQQ"), "tenant"),
        (
            lambda: pb.GenerateRequest(stop=pb.StopConditions(stop_strings=["a", "QQQ"])),
            "stop.stop_strings[1]",
        ),
        (lambda: pb.GenerateRequest(chat=chat("user", "QQQ")), "chat.messages[0].content"),
    ):
        raw = build().SerializeToString().replace(b"QQQ", b"\xff\xfe\xc3")
        parsed = lenient(pb.GenerateRequest)(raw)
        assert isinstance(parsed, Unparsed)
        error = parsed.error()
        assert (error.reason, error.field) == ("INVALID_TEXT", field)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_an_error(raw: bytes) -> None:
    parsed = lenient(pb.GenerateRequest)(raw)
    if isinstance(parsed, Unparsed):
        assert parsed.error().reason in ("INVALID_ARGUMENT", "INVALID_TEXT")
