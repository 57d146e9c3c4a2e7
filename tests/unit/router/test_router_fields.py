# SPDX-License-Identifier: Apache-2.0
"""The table of fields is complete, and the commands are what it says."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from twinpool._core import hash_blocks, root_hash
from twinpool.ids import WorkerKey
from twinpool.router.fields import CHAT, FIELDS, decode_command, prefill_command
from twinpool.router.prefix import Source
from twinpool.router.request import Group, Prepared
from twinpool.rpc import Deadline
from twinpool.v1 import inference_pb2 as inference
from twinpool.v1 import worker_pb2 as worker
from twinpool.v1.control_pb2 import WorkerRecord
from twinpool.v1.resume_pb2 import PortableRequest

GROUP = Group("default", "fake", "fp", "llama", 258, 16, 4096, 256, (257,), "/models/fake")


def leaves(descriptor: Any, path: str = "") -> list[str]:
    """Dotted paths of all fields that hold no message."""
    found = []
    for field in descriptor.fields:
        if field.message_type is None:
            found.append(path + field.name)
        else:
            found += leaves(field.message_type, f"{path}{field.name}.")
    return found


def get(message: Message, path: str) -> Any:
    for name in path.split("."):
        message = getattr(message, name)
        if name == "logit_bias":
            return list(message)
    return message


def test_every_field_of_a_request_has_a_row() -> None:
    assert sorted(rule.field for rule in FIELDS) == sorted(leaves(inference.GenerateRequest.DESCRIPTOR))


def test_every_path_exists_in_its_command() -> None:
    prefill = {*leaves(worker.PrefillCommand.DESCRIPTOR)}
    decode = {*leaves(worker.DecodeCommand.DESCRIPTOR)}
    for rule in FIELDS:
        assert rule.prefill in prefill | {""}, rule
        assert rule.decode in decode | {""}, rule


@st.composite
def requests(draw: st.DrawFn) -> Prepared:
    tokens = np.array(draw(st.lists(st.integers(0, 257), min_size=1, max_size=70)), np.int32)
    tenant = draw(st.sampled_from(["", "a", "b"]))
    root = root_hash(b"fp", tenant.encode(), b"")
    ratio = st.floats(0.125, 1.0, width=16)
    max_tokens = draw(st.integers(1, 100))
    own = draw(st.lists(st.integers(0, 257), max_size=4))
    ignore_eos = draw(st.booleans())
    return Prepared(
        request_id="minted",
        client_id=draw(st.sampled_from(["minted", "mine"])),
        group=GROUP,
        tokens=tokens,
        hashes=hash_blocks(root, tokens, 16),
        root=root,
        sampling=inference.SamplingParams(
            logit_bias=[inference.LogitBias(token_id=7, bias=draw(st.sampled_from([-1.5, 100.0])))],
            temperature=draw(ratio),
            top_k=draw(st.integers(0, 258)),
            top_p=draw(ratio),
            min_p=draw(ratio),
            presence_penalty=draw(ratio),
            frequency_penalty=draw(ratio),
            repetition_penalty=draw(ratio),
            seed=draw(st.integers(0, 2**64 - 1)),
        ),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_strings=tuple(draw(st.lists(st.text(min_size=1), max_size=2))),
        stop_token_ids=tuple(sorted({*own, *(() if ignore_eos else (257,))})),
        ignore_eos=ignore_eos,
        n=draw(st.integers(1, 16)),
        logprobs=draw(st.none() | st.integers(0, 20)),
        prompt_logprobs=draw(st.none() | st.integers(0, 20)),
        priority=draw(st.integers(-100, 100)),
        preemptible=draw(st.booleans()),
        tenant=tenant,
        size_bytes=0,
        arrival=0.0,
        tokenized=0.0,
        deadline=Deadline.after(draw(st.none() | st.floats(1, 100))),
        grammar=draw(st.sampled_from(["", "start: /a/"])),
        session_id=draw(st.sampled_from(["", "s"])),
    )


EXPECTED: dict[str, Any] = (
    {
        "token_ids.ids": lambda p: p.tokens.astype("<i4").tobytes(),
        "stop.max_tokens": lambda p: p.max_tokens,
        "stop.min_tokens": lambda p: p.min_tokens,
        "stop.stop_token_ids": lambda p: list(p.stop_token_ids),
        "stop.ignore_eos": lambda p: p.ignore_eos,
        "n": lambda p: p.n,
        "logprobs": lambda p: p.logprobs or 0,
        "prompt_logprobs": lambda p: p.prompt_logprobs or 0,
        "priority": lambda p: p.priority,
        "preemptible": lambda p: p.preemptible,
        "tenant": lambda p: p.root,
        "adapter": lambda p: p.root,
        # Of a request that cannot be resumed, nothing is kept.
        "resume_grace.seconds": lambda p: 0,
        "resume_grace.nanos": lambda p: 0,
        "idempotency_key": lambda p: b"",
        "session_id": lambda p: p.session,
    }
    | {
        f"sampling.{field.name}": (lambda p, name=field.name: getattr(p.sampling, name))
        for field in inference.SamplingParams.DESCRIPTOR.fields
    }
    | {
        f"sampling.logit_bias.{name}": (lambda p: list(p.sampling.logit_bias))
        for name in ("token_id", "bias")
    }
)
for _form in ("json_schema", "regex", "lark", "choices.texts"):
    EXPECTED[f"structured.{_form}"] = lambda p: p.grammar
for _same in ("text", *(f"chat.{name}" for name in CHAT)):
    EXPECTED[_same] = EXPECTED["token_ids.ids"]

OTHER = worker.WorkerId(name="other", incarnation=7)
OWNER = WorkerRecord(worker=OTHER, endpoint="host:1")
SOURCE = Source(
    WorkerKey("third", 9),
    worker.PrefixSource(owner=worker.WorkerId(name="third", incarnation=9), endpoint="third:1", blocks=2),
)
ATTEMPT = worker.AttemptId(request_id="minted", attempt=3)


@given(requests())
def test_each_leg_gets_exactly_its_rows(prepared: Prepared) -> None:
    prefill = prefill_command(prepared, ATTEMPT, OTHER, 2, SOURCE)
    decode = decode_command(prepared, ATTEMPT, OWNER, SOURCE)
    told: dict[int, set[str]] = {id(prefill): set(), id(decode): set()}
    for rule in FIELDS:
        for command, path in ((prefill, rule.prefill), (decode, rule.decode)):
            if path:
                value = get(command, path)
                found = list(value) if path.endswith("stop_token_ids") else value
                assert found == EXPECTED[rule.field](prepared), rule
                told[id(command)].add(path)
    own = {"id.request_id", "id.attempt", "prompt.block_hashes", "deadline.seconds", "deadline.nanos"}
    mine = {
        id(prefill): own
        | {"reader.name", "reader.incarnation", "reader_cached_blocks"}
        | {"prefix.owner.name", "prefix.owner.incarnation", "prefix.endpoint", "prefix.blocks"},
        id(decode): own | {"owner.name", "owner.incarnation", "owner_endpoint"},
    }
    for command in (prefill, decode):
        for path in leaves(command.DESCRIPTOR):
            if path not in told[id(command)] | mine[id(command)]:
                assert not get(command, path), f"{path} is set, but no row says so"
    assert (prefill.reader, prefill.reader_cached_blocks) == (OTHER, 2)
    assert (decode.owner, decode.owner_endpoint) == (OTHER, "host:1")
    assert prefill.prefix == SOURCE.message
    assert prefill.id == decode.id == ATTEMPT
    assert prefill.draw == decode.draw, "the first token is drawn by the rule of all others"
    assert prefill.prompt == decode.prompt
    assert prefill.draw.HasField("logprobs") == (prepared.logprobs is not None)
    assert prefill.draw.HasField("prompt_logprobs") == (prepared.prompt_logprobs is not None)
    for field in inference.SamplingParams.DESCRIPTOR.fields:
        if field.message_type is None:
            assert prefill.draw.sampling.HasField(field.name)
    assert prefill.HasField("deadline") == (prepared.deadline.at is not None)


@given(requests())
def test_a_decode_leg_that_computes_the_prompt_gets_all_that_prefill_gets(prepared: Prepared) -> None:
    local = decode_command(prepared, ATTEMPT, None, SOURCE)
    prefill = prefill_command(prepared, ATTEMPT, OTHER, 0, SOURCE)
    assert not local.HasField("owner")
    assert not local.owner_endpoint
    for name in ("id", "prompt", "draw", "priority", "preemptible", "prefix"):
        assert getattr(local, name) == getattr(prefill, name)


@given(requests())
def test_what_another_router_needs_goes_to_the_decode_leg_alone(prepared: Prepared) -> None:
    portable = PortableRequest(stream_id="s", key=b"k", digest=b"d", moves=2)
    portable.grace.FromMilliseconds(1500)
    kept = replace(prepared, portable=portable)
    assert decode_command(kept, ATTEMPT, OWNER).portable == portable
    assert not decode_command(prepared, ATTEMPT, OWNER).HasField("portable")
    assert prefill_command(kept, ATTEMPT, OTHER, 0) == prefill_command(prepared, ATTEMPT, OTHER, 0) or (
        prepared.deadline.at is not None
    )


def test_tenants_share_no_prefix() -> None:
    tokens = np.array(random.Random(1).choices(range(256), k=64), np.int32)
    roots = {root_hash(b"fp", salt, adapter) for salt in (b"", b"x") for adapter in (b"", b"x")}
    assert len(roots) == 4
    assert len({hash_blocks(root, tokens, 16).tobytes() for root in roots}) == 4


@pytest.mark.parametrize("left", [0.0, 5.0])
def test_a_deadline_travels_as_what_is_left(left: float) -> None:
    prepared = Prepared(
        "r", "r", GROUP, np.array([1], np.int32), np.zeros((0, 16), np.uint8), b"\0" * 16,
        inference.SamplingParams(), 1, 0, (), (), False, 1, None, 0, True, "", 0, 0.0, 0.0, Deadline.after(left),
    )  # fmt: skip
    sent = decode_command(prepared, ATTEMPT, OWNER).deadline.ToNanoseconds() / 1e9
    assert left - 0.5 <= sent <= left
