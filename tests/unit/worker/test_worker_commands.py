# SPDX-License-Identifier: Apache-2.0
"""Every command is checked again on the worker; each refusal names field, value and limit."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.worker_commands import draw_spec, prompt_spec
from twinpool._core import root_hash
from twinpool.transfer.base import AttemptKey
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.commands import (
    CancelWork,
    CommandError,
    DecodeWork,
    Limits,
    PrefillWork,
    attempt_of,
    parse_command,
)

BLOCK = 16
LIMITS = Limits(block_tokens=BLOCK, num_blocks=9, max_context_tokens=128, max_num_seqs=4, vocab_size=100)
ROOT = root_hash(b"fingerprint", b"", b"")


def _prompt(length: int) -> pb.PromptSpec:
    return prompt_spec([number % 100 for number in range(length)], ROOT, BLOCK)


def _draw() -> pb.DrawSpec:
    return draw_spec(max_tokens=4, stop=[7])


def _prefill(length: int = 40) -> pb.PrefillCommand:
    return pb.PrefillCommand(
        id=pb.AttemptId(request_id="r", attempt=1),
        prompt=_prompt(length),
        draw=_draw(),
        reader=pb.WorkerId(name="d0", incarnation=5),
    )


def _decode(length: int = 40) -> pb.DecodeCommand:
    return pb.DecodeCommand(
        id=pb.AttemptId(request_id="r", attempt=2),
        prompt=_prompt(length),
        draw=_draw(),
        owner=pb.WorkerId(name="p0", incarnation=6),
        owner_endpoint="127.0.0.1:1",
    )


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_good_commands_of_edge_lengths(length: int) -> None:
    work = parse_command(pb.SessionRequest(prefill=_prefill(length)), LIMITS)
    assert isinstance(work, PrefillWork)
    assert len(work.prompt) == length
    assert work.prompt.hashes.shape == (length // BLOCK, 16)
    assert work.deadline_seconds is None
    other = parse_command(pb.SessionRequest(decode=_decode(length)), LIMITS)
    assert isinstance(other, DecodeWork)
    assert str(other.owner) == "p0@0000000000000006"


def test_cancel_needs_nothing_but_an_id() -> None:
    message = pb.SessionRequest(cancel=pb.CancelCommand(id=pb.AttemptId(request_id="x", attempt=3)))
    assert parse_command(message, LIMITS) == CancelWork(AttemptKey("x", 3))


def test_a_deadline_is_what_is_left() -> None:
    command = _prefill()
    command.deadline.FromMilliseconds(1500)
    work = parse_command(pb.SessionRequest(prefill=command), LIMITS)
    assert isinstance(work, PrefillWork)
    assert work.deadline_seconds == pytest.approx(1.5)


def _set(command: pb.PrefillCommand, change: Callable[[pb.PrefillCommand], object]) -> pb.SessionRequest:
    change(command)
    return pb.SessionRequest(prefill=command)


def _wrong_hash(command: pb.PrefillCommand) -> None:
    hashes = bytearray(command.prompt.block_hashes)
    hashes[3] ^= 1
    command.prompt.block_hashes = bytes(hashes)


def _token(value: int) -> Callable[[pb.PrefillCommand], object]:
    def change(command: pb.PrefillCommand) -> None:
        command.prompt.token_ids = np.array([1, value], "<i4").tobytes()
        command.prompt.block_hashes = b""

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.id.ClearField("request_id"), "request_id"),
        (lambda c: c.id.ClearField("attempt"), "attempt"),
        (lambda c: c.prompt.ClearField("token_ids"), "token_ids"),
        (lambda c: setattr(c.prompt, "token_ids", b"abc"), "token_ids"),
        (_token(100), "vocabulary of 100"),
        (_token(-1), "vocabulary of 100"),
        (lambda c: c.prompt.CopyFrom(_prompt(125)), "context limit 128"),
        (lambda c: setattr(c.prompt, "block_hashes", b"0" * 16), "block_hashes has 16 bytes, not 32"),
        (_wrong_hash, "are not the hashes"),
        (lambda c: setattr(c.prompt, "root_hash", b"0"), "root_hash has 1 bytes"),
        (lambda c: setattr(c.draw, "n", 0), "draw.n 0"),
        (lambda c: setattr(c.draw, "n", 17), "draw.n 17"),
        (lambda c: setattr(c.draw.stop, "max_tokens", 0), "max_tokens"),
        (lambda c: setattr(c.draw.stop, "min_tokens", 9), "min_tokens 9"),
        (lambda c: c.draw.sampling.ClearField("top_p"), "top_p is not set"),
        (lambda c: setattr(c.draw.sampling, "temperature", -1), "temperature"),
        (lambda c: setattr(c.draw.sampling, "top_p", float("nan")), "top_p"),
        (lambda c: c.draw.stop_token_ids.append(100), "stop_token_ids 100"),
        (lambda c: c.draw.stop_token_ids.extend(range(2000)), "stop_token_ids has 2001"),
        (lambda c: c.ClearField("reader"), "reader"),
        (lambda c: setattr(c.reader, "name", "No Name"), "reader"),
        (lambda c: setattr(c, "reader_cached_blocks", 3), "reader_cached_blocks 3 exceeds"),
        (lambda c: setattr(c, "session", b"short"), "session has 5 bytes"),
    ],
)
def test_refusals_name_what_is_wrong(change: Callable[[pb.PrefillCommand], object], named: str) -> None:
    with pytest.raises(CommandError) as caught:
        parse_command(_set(_prefill(), change), LIMITS)
    assert caught.value.reason == pb.FAILURE_REASON_INVALID
    assert named in caught.value.detail


def test_a_prompt_that_no_idle_pool_holds_is_refused() -> None:
    small = Limits(block_tokens=BLOCK, num_blocks=3, max_context_tokens=128, max_num_seqs=4, vocab_size=100)
    parse_command(pb.SessionRequest(prefill=_prefill(32)), small)
    with pytest.raises(CommandError, match="does not fit into 3 KV blocks"):
        parse_command(pb.SessionRequest(prefill=_prefill(33)), small)


def test_an_empty_message_and_a_second_hello_are_no_commands() -> None:
    for message in (pb.SessionRequest(), pb.SessionRequest(hello=pb.Hello(router="r"))):
        assert attempt_of(message) is None
        with pytest.raises(CommandError):
            parse_command(message, LIMITS)


def test_the_id_of_a_wrong_command_is_known() -> None:
    command = _decode()
    command.prompt.token_ids = b""
    assert attempt_of(pb.SessionRequest(decode=command)) == AttemptKey("r", 2)
