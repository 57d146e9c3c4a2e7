# SPDX-License-Identifier: Apache-2.0
"""A prompt's own log-probabilities as workers tell them: whole, in order, before the first token, and from no cache."""

import numpy as np
import pytest
import torch
from worker_pair import (
    BLOCK,
    ROOT,
    Answer,
    Pair,
    Worker,
    decode_command,
    prefix_source,
    random_prompt,
    reference,
    stack,
    tiny_model,
)

from twinpool._core import hash_blocks
from twinpool.engine.sampling import DrawParams, PromptLogprobs, PromptScoring, SequenceDraw
from twinpool.transfer.base import AttemptKey
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.commands import CommandError, parse_command
from twinpool.worker.tokens import POSITIONS_A_MESSAGE, scored_messages

PROMPT = random_prompt(5 * BLOCK + 3)


def expected(prompt: list[int]) -> torch.Tensor:
    """Log-probabilities at every position, of one engine that computes the prompt at once."""
    engine = stack(64)
    tokens = np.array(prompt, np.int32)
    scoring = PromptScoring(tokens, tiny_model().config.vocab_size)
    engine.scheduler.add(tokens, hash_blocks(ROOT, tokens, BLOCK), ROOT, max_new_tokens=1)
    rows = torch.zeros(len(prompt), scoring.count)
    while scoring.next < len(prompt):
        plan = engine.scheduler.plan(0.0)
        result = engine.runner.step(plan, [SequenceDraw(DrawParams(temperature=0.0), scoring=scoring)])
        part = result.prompts[0]
        for at, (ids, values) in enumerate(zip(part.top_ids, part.top_logprobs, strict=True), part.first):
            rows[at, ids.astype(np.int64)] = torch.from_numpy(values)
        engine.scheduler.advance(plan, result.tokens)
    return rows


def check(worker: Worker, prompt: list[int], alternatives: int = 2) -> None:
    """What it said of the prompt; takes it out."""
    kinds = [message.WhichOneof("message") for _, message in worker.sent]
    if "prompt_scored" in kinds and "prefill_done" in kinds:
        assert kinds[::-1].index("prefill_done") < kinds[::-1].index("prompt_scored")
    known = expected(prompt)
    due = 1
    for message in worker.take("prompt_scored"):
        part = message.prompt_scored.logprobs
        assert part.offset == due
        assert 1 <= len(part.positions) <= POSITIONS_A_MESSAGE
        assert not part.HasField("first_token_id")
        for position in part.positions:
            assert position.chosen.token_id == prompt[due]
            assert position.chosen.logprob == pytest.approx(float(known[due, prompt[due]]), abs=1e-4)
            best = known[due].topk(alternatives)
            assert [token.token_id for token in position.top] == best.indices.tolist()
            assert [token.logprob for token in position.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            due += 1
    assert due == len(prompt)


@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
@pytest.mark.parametrize("local", [False, True])
def test_every_position_is_told_and_the_tokens_are_the_same(length: int, local: bool) -> None:
    pair = Pair()
    prompt = random_prompt(length)
    spec: dict[str, object] = {"max_tokens": 5, "prompt_logprobs": 2}
    if local:
        pair.decode.do(decode_command(pair, prompt, local=True, **spec))  # type: ignore[arg-type]
    else:
        pair.start(prompt, **spec)
    teller, other = (pair.decode, pair.prefill) if local else (pair.prefill, pair.decode)
    pair.run(lambda: bool(Pair._kinds(teller, "prefill_done")))
    check(teller, prompt)
    answer = Answer(1)
    pair.run(lambda: answer.take(pair))
    assert answer.tokens == [reference(prompt, 5)]
    assert other.take("prompt_scored") == []
    pair.assert_quiet()


@pytest.mark.parametrize("local", [False, True])
def test_no_cached_block_is_used_and_all_are_cached(local: bool) -> None:
    pair = Pair()
    pair.generate(PROMPT, "first", max_tokens=2)
    teller = pair.decode if local else pair.prefill
    spec: dict[str, object] = {"max_tokens": 2, "n": 2, "prompt_logprobs": 2}
    if local:
        pair.decode.do(decode_command(pair, PROMPT, local=True, **spec))  # type: ignore[arg-type]
    else:
        pair.start(PROMPT, **spec)
    pair.run(lambda: bool(Pair._kinds(teller, "prefill_done")))
    (said,) = [message for _, message in teller.sent if message.HasField("prefill_done")]
    assert said.prefill_done.cached_tokens == 0
    reserved = [message for _, message in pair.decode.sent if message.HasField("reserved")]
    assert [message.reserved.cached_blocks for message in reserved] == ([0] if local else [])
    check(teller, PROMPT)
    pair.assert_quiet()
    pair.decode.sent.clear()
    pair.prefill.sent.clear()
    pair.start(PROMPT, "last", max_tokens=1)
    pair.run(lambda: bool(Pair._kinds(pair.prefill, "prefill_done")))
    (done,) = pair.prefill.take("prefill_done")
    assert done.prefill_done.cached_tokens == 5 * BLOCK


def test_no_prefix_is_pulled_for_it() -> None:
    pair = Pair()
    pair.generate(PROMPT, "first", max_tokens=2)
    pair.assert_quiet()
    pair.prefill.stack.blocks.reset_cache()
    pair.start(PROMPT, prefix=prefix_source(pair.decode, 5), max_tokens=1, prompt_logprobs=2)
    pair.run(lambda: bool(Pair._kinds(pair.prefill, "prefill_done")))
    (done,) = pair.prefill.take("prefill_done")
    assert not done.prefill_done.HasField("fetched")
    check(pair.prefill, PROMPT)
    pair.assert_quiet()


def test_prompts_of_two_requests_are_not_mixed_up() -> None:
    pair = Pair(max_num_seqs=4)
    prompts = {name: random_prompt(3 * BLOCK + at, seed=at) for at, name in enumerate(("a", "b"))}
    for name, prompt in prompts.items():
        pair.decode.do(decode_command(pair, prompt, name, local=True, max_tokens=1, prompt_logprobs=1))
    pair.run(lambda: len(Pair._kinds(pair.decode, "prefill_done")) == 2)
    told = pair.decode.take("prompt_scored")
    for name, prompt in prompts.items():
        own = [one.prompt_scored.logprobs for one in told if one.prompt_scored.id.request_id == name]
        assert [p.chosen.token_id for part in own for p in part.positions] == prompt[1:]
    pair.assert_quiet()


def test_a_message_holds_so_many_positions() -> None:
    count = 2 * POSITIONS_A_MESSAGE + 7
    part = PromptLogprobs(
        first=5,
        token_ids=np.arange(count, dtype=np.int32) + (1 << 30),
        logprobs=np.full(count, -1.5, np.float32),
        top_ids=np.full((count, 20), 1 << 30, np.int32),
        top_logprobs=np.full((count, 20), -2.5, np.float32),
    )
    made = list(scored_messages(AttemptKey("r", 3), part))
    assert [one.prompt_scored.logprobs.offset for one in made] == [
        5,
        5 + POSITIONS_A_MESSAGE,
        5 + 2 * POSITIONS_A_MESSAGE,
    ]
    assert [len(one.prompt_scored.logprobs.positions) for one in made] == [POSITIONS_A_MESSAGE] * 2 + [7]
    assert max(one.ByteSize() for one in made) < 1 << 17, "far below the smallest limit of a message"
    assert {(one.prompt_scored.id.request_id, one.prompt_scored.id.attempt) for one in made} == {("r", 3)}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs 21 is out of range: from 0 to 20"),
        ({"prompt_logprobs": 1, "drawn": 2}, "prompt_logprobs is set with draw.drawn 2"),
    ],
)
def test_what_is_refused(spec: dict[str, object], said: str) -> None:
    pair = Pair()
    command = decode_command(pair, PROMPT, local=True, **spec)  # type: ignore[arg-type]
    with pytest.raises(CommandError, match=said) as caught:
        parse_command(command, pair.decode.stack.limits)
    assert caught.value.reason == pb.FAILURE_REASON_INVALID
