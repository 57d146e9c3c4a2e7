# SPDX-License-Identifier: Apache-2.0
"""What a router does not take from a worker: another one's message, one too early, counts and times that cannot be."""

from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from tests.support.fake_cluster import fake_cluster, generate, prompt
from tests.support.fake_job import Job, Script
from tests.support.fake_worker import FakeWorker
from twinpool.errors import TwinpoolError
from twinpool.router.heard import SECONDS_MAX, Early, fault_in_order, fault_in_prefill, seconds_of
from twinpool.router.stream import Answer, AnswerSpec
from twinpool.text import TextStream, Tokenizer
from twinpool.v1 import worker_pb2 as pb


async def lies(model_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: dict[str, object]) -> str:
    """The error of a request whose decode worker says ``lines`` to its command, and whose prefill worker says nothing."""

    def say(self: FakeWorker, session, command, run) -> None:  # type: ignore[no-untyped-def]
        for line in lines if self.role == pb.ROLE_DECODE else ():
            for message in line.values():
                message.id.CopyFrom(command.id)  # type: ignore[attr-defined]
            session.send(**line)

    async with fake_cluster(model_path) as cluster:
        with monkeypatch.context() as patched:
            patched.setattr(FakeWorker, "_start", say)
            answer = await cluster.ask(generate(prompt(40)))
        await cluster.assert_quiescent()
        assert answer.error is not None
        assert (await cluster.ask(generate(prompt(40)))).error is None, "the next one is served"
        return answer.error.message


async def test_a_hand_off_before_the_reservation_is_refused(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = await lies(model_path, monkeypatch, {"handoff_done": pb.HandoffDone()})
    assert said == "the hand-off came before decode had reserved"


async def test_decode_does_not_speak_for_prefill(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = pb.PrefillDone(first_tokens=[pb.FirstToken()])
    said = await lies(model_path, monkeypatch, {"reserved": pb.Reserved()}, {"prefill_done": done})
    assert said == "prefill: the other worker of the attempt said so"


async def test_decode_does_not_speak_for_prefill_after_it_either(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_cluster(model_path) as cluster:
        say_handed_off = FakeWorker._received

        async def received(self: FakeWorker, session, job, command, script):  # type: ignore[no-untyped-def]
            await self.fabric.of(job.key)
            session.send(prefill_done=pb.PrefillDone(id=command.id, first_tokens=[pb.FirstToken()]))
            return await say_handed_off(self, session, job, command, script)

        monkeypatch.setattr(FakeWorker, "_received", received)
        answer = await cluster.ask(generate(prompt(40), max_tokens=50))
        assert answer.error is not None
        assert answer.error.message == "prefill: the other worker of the attempt said so"
        await cluster.assert_quiescent()


async def test_more_cached_tokens_than_the_prompt_has_are_refused(model_path: Path) -> None:
    async with fake_cluster(model_path, prefill_script=Script(prefill_cached_tokens=41)) as cluster:
        answer = await cluster.ask(generate(prompt(40)))
        assert answer.error is not None
        assert answer.error.message == "prefill found 41 tokens cached of a prompt of 40"
        await cluster.assert_quiescent()


@pytest.mark.parametrize("offset", [0, 1])
async def test_a_token_that_cannot_be_kept_is_refused(model_path: Path, offset: int) -> None:
    def token(job: Job, choice: int, at: int) -> int:
        return (1 << 31) if at == offset else 65

    script = Script(token=token)
    async with fake_cluster(model_path, prefill_script=script, decode_script=script) as cluster:
        answer = await cluster.ask(generate(prompt(40)))
        assert answer.error is not None
        assert "token 2147483648" in answer.error.message
        await cluster.assert_quiescent()


def test_a_reason_to_finish_that_nobody_knows_is_refused(model_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(model_path)
    answer = Answer(AnswerSpec(1, False, 10), lambda: TextStream(tokenizer))
    with pytest.raises(TwinpoolError, match="finish 77"):
        answer.push(0, 65, 0, 77, None)  # type: ignore[arg-type]


def test_rules() -> None:
    assert fault_in_order("prefill", True, True) == ""
    assert fault_in_order("a reservation", True, False) == ""
    tokens = [pb.FirstToken(index=0), pb.FirstToken(index=1)]
    assert fault_in_prefill(pb.PrefillDone(first_tokens=tokens, cached_tokens=5), 5, 2) == ""
    assert "one token for each choice" in fault_in_prefill(pb.PrefillDone(first_tokens=tokens), 5, 1)
    assert seconds_of(Duration(seconds=2, nanos=500_000_000)) == 2.5
    assert seconds_of(Duration(seconds=-9)) == 0.0
    assert seconds_of(Duration(seconds=1 << 62)) == SECONDS_MAX


def test_what_comes_early_is_kept_in_order_and_bounded() -> None:
    early, heard = Early(2), list[int]()
    for number in range(5):
        early.keep(lambda number=number: heard.append(number))  # type: ignore[misc]
    early.apply(lambda: False)
    early.apply(lambda: False)
    assert heard == [0, 1]
    early.keep(lambda: heard.append(9))
    early.apply(lambda: True)
    assert heard == [0, 1]
