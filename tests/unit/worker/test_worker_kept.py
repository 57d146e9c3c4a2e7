# SPDX-License-Identifier: Apache-2.0
"""What a decode worker keeps of an answer for another router: tokens, no blocks, for a while."""

from collections.abc import Callable

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from worker_pair import SESSION, Pair, random_prompt, reference
from worker_requests import BLOCK, cancel_command, decode_command, prefill_command

from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.resume_pb2 import PortableRequest, PortableState
from twinpool.worker.commands import CommandError
from twinpool.worker.kept import KeptAnswers

GRACE = 10.0


def portable(stream: str = "s", n: int = 1, grace: float = GRACE, **fields: object) -> PortableRequest:
    return PortableRequest(
        stream_id=stream,
        n=n,
        grace=Duration(seconds=int(grace)),
        **({"key": b"k", "digest": b"d"} | fields),  # type: ignore[arg-type]
    )


def begin(pair: Pair, prompt: list[int], *, local: bool = False, n: int = 1, **spec: object) -> None:
    """Asks both workers, as a router does for an answer that can be resumed."""
    command = decode_command(pair, prompt, local=local, n=n, **spec)  # type: ignore[arg-type]
    command.decode.portable.CopyFrom(portable(n=n))
    pair.decode.do(command)
    if not local:
        pair.run(lambda: pair.decode.take("reserved"))
        pair.prefill.do(prefill_command(pair, prompt, n=n, **spec))  # type: ignore[arg-type]


def drawn(pair: Pair, steps: int) -> Callable[[], bool]:
    """Whether so many steps have brought tokens."""
    seen: list[pb.SessionResponse] = []

    def check() -> bool:
        seen.extend(pair.decode.take("step"))
        return len(seen) >= steps

    return check


def take_over(
    pair: Pair, stream: str = "s", *, key: bytes = b"", digest: bytes = b"", forget: bool = False
) -> PortableState | None:
    role = pair.decode.assembly.loop.role
    return role.take_over(stream, key, digest, forget)


def rows(state: PortableState) -> list[list[int]]:
    return [np.frombuffer(choice.token_ids, "<i4").tolist() for choice in state.choices]


def lose_router(pair: Pair) -> None:
    pair.decode.assembly.loop.role.on_session_closed(SESSION)
    pair.prefill.assembly.loop.role.on_session_closed(SESSION)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_the_router_is_lost(local: bool, n: int) -> None:
    pair, prompt = Pair(), random_prompt(2 * BLOCK + 3)
    begin(pair, prompt, local=local, n=n, max_tokens=20)
    pair.run(drawn(pair, 5))
    lose_router(pair)
    pair.assert_quiet()
    state = take_over(pair)
    assert state is not None
    assert (state.request, state.worker) == (portable(n=n), "decode-0")
    assert np.frombuffer(state.prompt, "<i4").tolist() == prompt
    whole = reference(prompt, 20)
    for row in rows(state):
        assert 5 <= len(row) < 20
        assert row == whole[: len(row)], "greedy: all choices are the same"
    assert take_over(pair) == state, "who has asked may be lost as well"
    assert take_over(pair, "another") is None


@pytest.mark.parametrize("how", ["before the KV", "first token ends it", "ended", "ended at a stop id"])
def test_each_phase(how: str) -> None:
    pair, prompt = Pair(), random_prompt(2 * BLOCK + 3)
    whole = reference(prompt, 12)
    if how == "before the KV":
        command = decode_command(pair, prompt, max_tokens=12)
        command.decode.portable.CopyFrom(portable())
        pair.decode.do(command)
        pair.run(lambda: pair.decode.take("reserved"))
        expected: list[int] = []
    elif how == "first token ends it":
        begin(pair, prompt, max_tokens=1)
        pair.run(lambda: pair.decode.take("handoff_done"))
        expected = whole[:1]
    elif how == "ended":
        begin(pair, prompt, max_tokens=12)
        pair.run(drawn(pair, 11))
        expected = whole
    else:
        stop = whole[6]
        begin(pair, prompt, max_tokens=12, stop=[stop])
        expected = whole[: whole.index(stop) + 1]
        pair.run(drawn(pair, len(expected) - 1))
    lose_router(pair)
    pair.assert_quiet()
    state = take_over(pair)
    assert state is not None
    assert rows(state) == [expected]


def ended_apart(pair: Pair, count: list[int]) -> bool:
    """Runs two choices until one has ended and the other is ahead of it, or both have ended; counts their tokens."""
    ended: set[int] = set()

    def parted() -> bool:
        for message in pair.decode.take("step"):
            for token in message.step.tokens:
                count[token.index] = token.offset + 1
                ended.update([token.index] if token.finish else [])
        return len(ended) == 2 or (len(ended) == 1 and max(count) >= min(count) + 3)

    pair.run(parted)
    return len(ended) == 1


def test_choices_that_end_apart() -> None:
    """One has its last token before the other."""
    prompt = random_prompt(2 * BLOCK + 3)
    for seed in range(1, 60):
        pair, count = Pair(), [1, 1]  # the first tokens come with the hand-off
        spec = {"temperature": 1.0, "seed": seed, "max_tokens": 30, "stop": list(range(8, 40))}
        begin(pair, prompt, n=2, **spec)
        if ended_apart(pair, count):
            break
    lose_router(pair)
    state = take_over(pair)
    assert state is not None
    assert [len(row) for row in rows(state)] == count
    assert min(count) < max(count)


def test_what_goes_on_here_counts_what_was_drawn_before() -> None:
    pair, prompt = Pair(), random_prompt(2 * BLOCK + 3)
    whole = reference(prompt, 20)
    begin(pair, prompt + whole[:7], max_tokens=20, drawn=7)
    pair.run(drawn(pair, 4))
    lose_router(pair)
    state = take_over(pair)
    assert state is not None
    assert np.frombuffer(state.prompt, "<i4").tolist() == prompt
    (row,) = rows(state)
    assert len(row) >= 12
    assert row == whole[: len(row)]


def test_an_attempt_that_runs_ends_when_another_router_takes_over() -> None:
    pair, prompt = Pair(), random_prompt(2 * BLOCK + 3)
    begin(pair, prompt, max_tokens=60)
    pair.run(drawn(pair, 4))
    assert take_over(pair, "", key=b"k", digest=b"other") == PortableState(request=portable())
    pair.run(drawn(pair, 2))
    state = take_over(pair, "", key=b"k", digest=b"d")
    assert state is not None
    assert len(rows(state)[0]) >= 7
    failed: list[pb.SessionResponse] = []
    pair.run(lambda: failed.extend(pair.decode.take("failed")) or failed)
    assert [each.failed.reason for each in failed] == [pb.FAILURE_REASON_TAKEN_OVER]
    pair.assert_quiet()


@pytest.mark.parametrize("keep", [False, True])
def test_a_cancel_says_whether_it_is_over(keep: bool) -> None:
    pair, prompt = Pair(), random_prompt(2 * BLOCK + 3)
    begin(pair, prompt, max_tokens=60)
    pair.run(drawn(pair, 4))
    cancel = cancel_command()
    cancel.cancel.keep = keep
    pair.decode.do(cancel)
    pair.prefill.do(cancel)
    pair.run(lambda: pair.decode.take("cancelled"))
    assert (take_over(pair) is not None) == keep
    pair.assert_quiet()


def test_the_client_cancels_through_another_router() -> None:
    pair, prompt = Pair(), random_prompt(2 * BLOCK + 3)
    begin(pair, prompt, max_tokens=60)
    pair.run(drawn(pair, 4))
    assert take_over(pair, forget=True) is not None
    assert take_over(pair) is None
    lose_router(pair)
    assert take_over(pair) is None
    pair.assert_quiet()


def test_what_does_not_ask_for_it_is_not_kept() -> None:
    pair, prompt = Pair(), random_prompt(2 * BLOCK + 3)
    pair.start(prompt, max_tokens=20)
    pair.run(drawn(pair, 4))
    lose_router(pair)
    assert not len(pair.decode.assembly.parts.kept)


def test_it_is_forgotten_after_its_grace() -> None:
    pair, prompt = Pair(), random_prompt(2 * BLOCK + 3)
    begin(pair, prompt, max_tokens=20, deadline=25.0)
    pair.run(drawn(pair, 4))
    lose_router(pair)
    pair.clock.now += GRACE - 1
    state = take_over(pair)
    assert state is not None
    assert 0 < state.deadline.ToNanoseconds() / 1e9 <= 25.0 - GRACE + 1
    pair.clock.now += 2
    pair.decode.assembly.loop.turn()
    assert not len(pair.decode.assembly.parts.kept)
    assert take_over(pair) is None


def test_a_command_that_names_no_stream_is_refused() -> None:
    pair = Pair()
    for wrong in (PortableRequest(n=1), portable(n=2)):
        command = decode_command(pair, random_prompt(BLOCK), max_tokens=4)
        command.decode.portable.CopyFrom(wrong)
        with pytest.raises(CommandError, match="portable"):
            pair.decode.do(command)


# --- bounds ---------------------------------------------------------------------------------


def kept(answers: int = 100, size: int = 1 << 20) -> KeptAnswers:
    return KeptAnswers(answers, size, "w", lambda: 0.0)


def put(answers: KeptAnswers, stream: str, tokens: int = 10, row: int = 0, **fields: object) -> None:
    answers.keep(portable(stream, **fields), np.zeros(tokens, np.int32), [[1] * row], None)


def test_the_oldest_go_first() -> None:
    answers = kept(answers=3)
    for number in range(5):
        put(answers, f"s{number}", key=b"%d" % number)
    assert [answers.find(f"s{number}", b"") is not None for number in range(5)] == [False] * 2 + [True] * 3
    assert answers.find("", b"1") is None
    assert answers.find("", b"3") is not None


def test_memory_is_bounded() -> None:
    answers = kept(size=10_000)
    for number in range(100):
        put(answers, f"s{number}", tokens=100)
    assert 0 < len(answers) <= 7
    put(answers, "large", tokens=100_000)
    assert len(answers) == 0
    put(answers, "small")
    assert len(answers) == 1


@pytest.mark.parametrize(("moves", "row", "wins"), [(1, 0, True), (0, 3, True), (0, 1, False)])
def test_the_later_state_of_a_stream_stays(moves: int, row: int, wins: bool) -> None:
    answers = kept()
    put(answers, "s", row=2)
    put(answers, "s", row=row, moves=moves)
    state = answers.find("s", b"")
    assert state is not None
    assert len(rows(state)[0]) == (row if wins else 2)
    assert len(answers) == 1
