# SPDX-License-Identifier: Apache-2.0
"""One step on a model whose logits are known: siblings, failed rows, atomicity; and the plan's check."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from twinpool.engine.kv.pool import KVPool
from twinpool.engine.runner import ModelRunner, PlanError, SequenceDraw
from twinpool.engine.sampling import DrawParams, PromptScoring
from twinpool.engine.step import PlanArrays, PlanLimits, check_plan

VOCAB, BLOCK, BLOCKS = 40, 16, 8
LIMITS = PlanLimits(num_blocks=BLOCKS, block_tokens=BLOCK, vocab_size=VOCAB, max_positions=64)


class KnownLogits(torch.nn.Module):
    """Logits that depend on a row's token and position alone; ``poisoned`` tokens give NaN."""

    config = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=64)

    def __init__(self) -> None:
        super().__init__()
        self.poisoned: set[int] = set()
        self.fails = False
        self.rows: list[list[int]] = []

    def forward(self, token_ids: Tensor, positions: Tensor, pool: Tensor, batch: Any) -> Tensor:
        wanted = batch.last_rows
        self.rows.append(wanted.tolist())
        return torch.stack([token_ids, positions], dim=1)[wanted]

    def logits(self, hidden: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("the device is gone")
        rows = [self.row(int(token), int(position)) for token, position in hidden]
        return torch.stack(rows)

    def row(self, token: int, position: int) -> Tensor:
        generator = torch.Generator().manual_seed(token * 1000 + position)
        logits = torch.randn(VOCAB, generator=generator) * 2
        return logits * float("nan") if token in self.poisoned else logits


def plan_of(
    *lengths: tuple[int, int], decodes: int = 0, sample: list[int] | None = None, copies: Any = ()
) -> PlanArrays:
    """Sequences of (query tokens, context), two blocks each from block 0 on."""
    queries = np.array([query for query, _ in lengths], np.int32)
    context = np.array([total for _, total in lengths], np.int32)
    table = np.arange(2 * len(lengths), dtype=np.int32).reshape(-1, 2)
    table[-(-context // BLOCK) == 1, 1] = -1
    positions = np.concatenate([np.arange(c - q, c, dtype=np.int32) for q, c in lengths])
    rows = np.repeat(np.arange(len(lengths)), queries)
    return PlanArrays(
        seq=np.arange(len(lengths), dtype=np.int64) + 100,
        token_ids=(np.arange(len(positions), dtype=np.int32) * 7) % VOCAB,
        positions=positions,
        q_start=np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
        context=context,
        block_table=table,
        slots=table[rows, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK,
        sample=np.array(sample if sample is not None else [1] * len(lengths), np.uint8),
        num_decodes=decodes,
        copies=np.array(copies, np.int32).reshape(-1, 2),
    )


@pytest.fixture
def model() -> KnownLogits:
    return KnownLogits()


@pytest.fixture
def pool() -> KVPool:
    return KVPool(BLOCKS, 2, BLOCK, 4)


@pytest.fixture
def runner(model: Any, pool: KVPool) -> ModelRunner:
    return ModelRunner(model, pool, validate=True)


def greedy(**changes: Any) -> SequenceDraw:
    return SequenceDraw(DrawParams(temperature=0.0, max_tokens=99, **changes))


def test_only_sampled_rows_have_logits(runner: ModelRunner, model: KnownLogits) -> None:
    plan = plan_of((1, 9), (4, 20), (3, 3), decodes=1, sample=[1, 0, 1])
    draws = [greedy(), greedy(), greedy(logprobs=2)]
    result = runner.step(plan, draws)
    assert model.rows == [[0, 7]]
    expected = [model.row(0, 8), model.row(int(plan.token_ids[7]), 2)]
    assert result.tokens.tolist() == [int(expected[0].argmax()), 0, int(expected[1].argmax())]
    assert result.tokens.dtype == np.int32
    assert [draw.position for draw in draws] == [1, 0, 1]
    assert result.logprobs is not None
    assert [entry is None for entry in result.logprobs] == [True, True, False]
    assert result.failed == ()
    assert not result.siblings


def test_a_step_that_samples_nothing(runner: ModelRunner) -> None:
    draws = [greedy()]
    result = runner.step(plan_of((4, 4), sample=[0]), draws)
    assert result.tokens.tolist() == [0]
    assert result.logprobs is None
    assert draws[0].position == 0


def test_siblings_draw_from_the_same_logits(runner: ModelRunner, model: KnownLogits) -> None:
    params = DrawParams(temperature=2.0, seed=5, max_tokens=9, logprobs=0)
    others = tuple(SequenceDraw(params, choice=i) for i in (1, 2, 3))
    first = SequenceDraw(params, siblings=others)
    plain = greedy()
    plan = plan_of((1, 5), (3, 3), decodes=1)
    result = runner.step(plan, [plain, first])
    logits = model.row(int(plan.token_ids[3]), 2)
    tokens = [int(result.tokens[1]), *(drawn.token for drawn in result.siblings[1])]
    assert [draw.outputs for draw in (first, *others)] == [[token] for token in tokens]
    assert len(set(tokens)) > 1
    assert list(result.siblings) == [1]
    for token, drawn in zip(tokens[1:], result.siblings[1], strict=True):
        assert drawn.logprobs is not None
        assert drawn.logprobs.token_id == token
        assert drawn.logprobs.logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-5)
    # Each draws what it would draw alone.
    for choice, token in enumerate(tokens):
        lone = SequenceDraw(params, choice=choice)
        runner.step(plan, [greedy(), lone])
        assert lone.outputs == [token]


def test_logits_that_are_not_finite_fail_their_sequence_alone(
    runner: ModelRunner, model: KnownLogits
) -> None:
    plan = plan_of((1, 5), (1, 6), (1, 7), decodes=3)
    model.poisoned = {int(plan.token_ids[1])}
    draws = [greedy(logprobs=1), SequenceDraw(DrawParams(logprobs=1), siblings=(greedy(),)), greedy()]
    result = runner.step(plan, draws)
    assert result.failed == (1,)
    assert result.tokens[1] == 0
    assert [draw.position for draw in draws] == [1, 0, 1]
    assert draws[1].siblings[0].position == 0
    assert result.logprobs is not None
    assert result.logprobs[1] is None
    assert 1 not in result.siblings


def scoring(tokens: int, count: int = 2) -> SequenceDraw:
    """A draw whose prompt of so many tokens is to be scored."""
    prompt = np.arange(tokens, dtype=np.int32) % VOCAB
    own = PromptScoring(prompt, count)
    return SequenceDraw(DrawParams(temperature=0.0, max_tokens=99, prompt_logprobs=count), scoring=own)


def test_a_prompt_is_scored_chunk_by_chunk_beside_others(runner: ModelRunner, model: KnownLogits) -> None:
    draws = [greedy(), scoring(12)]
    first = runner.step(plan_of((1, 9), (4, 4), decodes=1, sample=[1, 0]), draws)
    assert model.rows == [[0, 1, 2, 3, 4]], "the sampled row and the chunk's"
    assert list(first.prompts) == [1]
    part = first.prompts[1]
    assert (part.first, part.token_ids.tolist()) == (1, [1, 2, 3, 4])
    expected = torch.stack([model.row(7 * (row + 1) % VOCAB, row) for row in range(4)]).log_softmax(-1)
    np.testing.assert_allclose(part.logprobs, expected[range(4), [1, 2, 3, 4]], atol=1e-5)
    np.testing.assert_allclose(part.top_logprobs, expected.topk(2, dim=-1).values, atol=1e-5)
    assert first.tokens[1] == 0
    # It has lost its blocks: what was told is computed again and not told again.
    again = runner.step(plan_of((1, 10), (6, 6), decodes=1, sample=[1, 0]), draws)
    assert (again.prompts[1].first, again.prompts[1].token_ids.tolist()) == (5, [5, 6])
    last = runner.step(plan_of((1, 11), (6, 12), decodes=1), draws)
    assert (last.prompts[1].first, last.prompts[1].token_ids.tolist()) == (7, [7, 8, 9, 10, 11])
    assert draws[1].position == 1
    after = runner.step(plan_of((1, 12), (1, 13), decodes=2), draws)
    assert not after.prompts


def test_a_prompt_whose_logits_are_not_finite_fails_alone(runner: ModelRunner, model: KnownLogits) -> None:
    plan = plan_of((3, 3), (3, 3), sample=[1, 0])
    for row, sampled in ((1, True), (4, False)):
        model.poisoned = {int(plan.token_ids[row])}
        draws = [scoring(3), scoring(9)]
        result = runner.step(plan, draws)
        bad, good = (0, 1) if sampled else (1, 0)
        assert result.failed == (bad,)
        assert list(result.prompts) == [good]
        assert [draw.position for draw in draws] == [0 if sampled else 1, 0]
        assert draws[bad].scoring is not None
        assert draws[bad].scoring.next == 1


def test_a_position_that_was_not_scored_may_not_be_passed(runner: ModelRunner) -> None:
    with pytest.raises(PlanError, match="position 1 of a prompt was to be scored"):
        runner.step(plan_of((4, 8), sample=[0]), [scoring(20)])


def test_a_step_that_raises_changes_no_draw(runner: ModelRunner, model: KnownLogits) -> None:
    draws = [greedy(), greedy()]
    model.fails = True
    with pytest.raises(RuntimeError, match="device is gone"):
        runner.step(plan_of((1, 5), (1, 6), decodes=2), draws)
    assert [draw.position for draw in draws] == [0, 0]
    with pytest.raises(PlanError, match="1 draws for 2 sequences"):
        runner.step(plan_of((1, 5), (1, 6), decodes=2), draws[:1])


def test_copies_come_first(runner: ModelRunner, pool: KVPool) -> None:
    pool.tensor[6] = 3.5
    runner.step(plan_of((1, 5), decodes=1, copies=[[6, 7]]), [greedy()])
    assert torch.equal(pool.tensor[7], pool.tensor[6])


GOOD = plan_of((1, 20), (1, 3), (5, 20), decodes=2, copies=[[6, 7]])


def edit(name: str, index: Any, value: int) -> PlanArrays:
    array = getattr(GOOD, name).copy()
    array[index] = value
    return replace(GOOD, **{name: array})


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (edit("q_start", 0, 1), "span"),
        (edit("q_start", -1, 6), "span"),
        (edit("q_start", 1, 0), "no query token"),
        (replace(GOOD, q_start=GOOD.q_start[:-1]), "q_start has 3"),
        (replace(GOOD, num_decodes=3), "more than one query"),
        (replace(GOOD, slots=GOOD.slots[:-1]), "slots has 6"),
        (edit("token_ids", 2, VOCAB), "vocabulary"),
        (edit("token_ids", 2, -1), "vocabulary"),
        (edit("context", 2, 4), "shorter"),
        (edit("context", 2, 65), "64 positions"),
        (edit("context", 2, 21), "last ones"),
        (edit("positions", 1, 1), "last ones"),
        (edit("block_table", (0, 1), -1), "outside the pool"),
        (edit("block_table", (0, 1), BLOCKS), "outside the pool"),
        (edit("block_table", (0, 1), 2), "slots do not follow"),
        (edit("slots", 0, 3), "slots do not follow"),
        (replace(GOOD, block_table=GOOD.block_table[:, :1]), "too narrow"),
        (edit("sample", 0, 2), "neither"),
        (edit("copies", (0, 0), 7), "reads what"),
        (edit("copies", (0, 1), BLOCKS), "copies name"),
        (replace(GOOD, copies=np.array([[5, 7], [6, 7]], np.int32)), "one destination"),
    ],
)
def test_plans_that_contradict_themselves(plan: PlanArrays, message: str) -> None:
    check_plan(GOOD, LIMITS)
    with pytest.raises(PlanError, match=message):
        check_plan(plan, LIMITS)


def test_two_sequences_may_not_write_one_slot() -> None:
    plan = plan_of((1, 3), (1, 3), decodes=2)
    table = plan.block_table.copy()
    table[1] = table[0]
    shared = replace(plan, block_table=table, slots=np.array([plan.slots[0]] * 2))
    with pytest.raises(PlanError, match="one slot"):
        check_plan(shared, LIMITS)
