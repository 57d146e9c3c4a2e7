# SPDX-License-Identifier: Apache-2.0
"""Whole draws: greedy, penalties, masks, log-probabilities, portability, and independence of the batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.engine.sampling import DrawParams, DrawParamsError, Finish, SequenceDraw, sample

VOCAB = 50


def logits_of(seed: int, rows: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_is_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [-1.0, -1.0, -2.0, -1.0]])
    assert sample(logits, [SequenceDraw(DrawParams(temperature=0))] * 2).tokens.tolist() == [1, 0]
    narrow = sample(logits.bfloat16(), [SequenceDraw(DrawParams(temperature=0))] * 2)
    assert narrow.tokens.tolist() == [1, 0]
    assert narrow.tokens.dtype == np.int32


@pytest.mark.parametrize("vocab", [1, 31, 4099])
def test_greedy_equals_argmax(vocab: int) -> None:
    logits = logits_of(3, 9, vocab)
    drawn = sample(logits, [SequenceDraw(DrawParams(temperature=0))] * 9)
    assert drawn.tokens.tolist() == logits.argmax(-1).tolist()
    assert drawn.logprobs is None


def test_a_known_greedy_choice_is_taken_by_plain_draws_alone() -> None:
    logits = logits_of(5, 2)
    best = torch.tensor([[7, 9], [1, 0]], dtype=torch.int32)
    plain = SequenceDraw(DrawParams(temperature=0, logprobs=0))
    drawn = sample(logits, [plain, plain], best=best)
    assert drawn.tokens.tolist() == [7, 0]
    assert drawn.failed.tolist() == [False, True]
    assert drawn.logprobs is not None
    assert drawn.logprobs[1] is None
    biased = SequenceDraw(DrawParams(temperature=0, logit_bias=((3, 99.0),)))
    assert sample(logits, [plain, biased], best=best).tokens.tolist() == [int(logits[0].argmax()), 3]


any_params = st.builds(
    DrawParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 60]),
    top_p=st.sampled_from([0.3, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((3, 2.5), (7, -100.0))]),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.just(100),
    min_tokens=st.sampled_from([0, 4]),
    stop_token_ids=st.just(frozenset({1, 2, 3})),
    logprobs=st.sampled_from([None, 0, 3]),
)
history = st.lists(st.integers(0, VOCAB - 1), max_size=8)
states = st.builds(
    lambda params, prompt, outputs, choice: SequenceDraw(
        params, np.array(prompt, np.int32), outputs=outputs, choice=choice
    ),
    any_params,
    history,
    history,
    st.integers(0, 3),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(states, min_size=1, max_size=6), st.integers(0, 1000))
def test_a_row_does_not_depend_on_the_batch(draws: list[SequenceDraw], seed: int) -> None:
    logits = logits_of(seed, len(draws))
    before = logits.clone()
    together = sample(logits, draws)
    assert torch.equal(logits, before)
    backwards = sample(logits.flip(0), draws[::-1])
    assert together.tokens.tolist() == backwards.tokens.tolist()[::-1]
    for i, draw in enumerate(draws):
        alone = sample(logits[i : i + 1], [draw])
        assert alone.tokens[0] == together.tokens[i]
        mine = None if together.logprobs is None else together.logprobs[i]
        assert (mine is None) == (draw.params.logprobs is None)
        if mine is not None and alone.logprobs is not None and alone.logprobs[0] is not None:
            assert mine.logprob == alone.logprobs[0].logprob
            assert mine.top_ids.tolist() == alone.logprobs[0].top_ids.tolist()


@settings(max_examples=40, deadline=None)
@given(any_params, history, st.integers(1, 11))
def test_a_moved_stream_goes_on_as_it_would_have(params: DrawParams, prompt: list[int], cut: int) -> None:
    tokens = np.array(prompt, np.int32)
    stay = SequenceDraw(params, tokens, choice=2)
    for step in range(12):
        stay.append(int(sample(logits_of(step, 1), [stay]).tokens[0]))
    moved = SequenceDraw(params, tokens, choice=2, outputs=stay.outputs[:cut])
    for step in range(cut, 12):
        moved.append(int(sample(logits_of(step, 1), [moved]).tokens[0]))
    assert moved.outputs == stay.outputs


@settings(deadline=None)
@given(
    history,
    history,
    st.floats(0.125, 3, width=32),
    st.floats(-2, 2, width=32),
    st.floats(-2, 2, width=32),
)
def test_penalties_equal_their_definition(
    prompt: list[int], outputs: list[int], repetition: float, frequency: float, presence: float
) -> None:
    logits = logits_of(11, 1)
    expected = logits[0].double().clone()
    for token in set(prompt) | set(outputs):
        expected[token] = (
            expected[token] * repetition if expected[token] < 0 else expected[token] / repetition
        )
    for token in set(outputs):
        expected[token] -= frequency * outputs.count(token) + presence
    params = DrawParams(
        temperature=0,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    token = int(sample(logits, [SequenceDraw(params, np.array(prompt, np.int32), outputs=outputs)]).tokens[0])
    assert float(expected[token]) == pytest.approx(float(expected.max()), abs=1e-5)


def test_bias_is_added_to_the_logits_of_its_own_row() -> None:
    logits = logits_of(11, 3)
    params = DrawParams(temperature=1.0, seed=5, logit_bias=((4, 1.5), (9, -100.0), (2, 50.0)))
    biased = logits.clone()
    biased[1, 4] += 1.5
    biased[1, 9] -= 100.0
    biased[1, 2] += 50.0
    plain = DrawParams(temperature=1.0, seed=5)
    draws = [SequenceDraw(plain), SequenceDraw(params), SequenceDraw(plain)]
    expected = sample(biased, [SequenceDraw(plain)] * 3)
    assert sample(logits, draws).tokens.tolist() == expected.tokens.tolist()
    assert expected.tokens[1] == 2
    greedy = DrawParams(temperature=0, logit_bias=((17, 100.0),), logprobs=0)
    drawn = sample(logits, [SequenceDraw(greedy)] * 3)
    assert drawn.tokens.tolist() == [17] * 3
    assert drawn.logprobs is not None
    assert drawn.logprobs[0] is not None
    assert drawn.logprobs[0].logprob == pytest.approx(float(logits.double().log_softmax(-1)[0, 17]))


@pytest.mark.parametrize("bias", [((1, 101.0),), ((1, float("nan")),), ((1, 1.0), (1, 2.0))])
def test_a_wrong_bias_is_refused(bias: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(DrawParamsError, match="logit_bias"):
        DrawParams(logit_bias=bias)
    with pytest.raises(DrawParamsError, match="logit_bias"):
        DrawParams(logit_bias=((VOCAB, 1.0),)).check_vocabulary(VOCAB)


def test_repetition_penalty_equals_transformers() -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    prompt, outputs = [4, 4, 9, 30], [7, 9, 2]
    logits = logits_of(2, 1)
    expected = process.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + outputs]), logits.clone())
    draw = SequenceDraw(
        DrawParams(temperature=0, repetition_penalty=1.7), np.array(prompt, np.int32), outputs=outputs
    )
    from twinpool.engine.sampling.penalties import apply_penalties

    apply_penalties(logits, [draw])
    assert torch.equal(logits, expected)


def test_penalty_state_grows_past_its_first_room() -> None:
    params = DrawParams(temperature=0, frequency_penalty=1.0, max_tokens=1000)
    draw = SequenceDraw(params)
    for token in range(300):
        draw.append(token)
        draw.append(299)
    ids, counts = draw.seen()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {
        **dict.fromkeys(range(299), 1.0),
        299: 301.0,
    }


def test_stop_ids_cannot_be_drawn_before_min_tokens() -> None:
    logits = torch.full((1, 4), -5.0)
    logits[0, 2] = 10.0
    for temperature in (0.0, 1.0):
        params = DrawParams(
            temperature=temperature, max_tokens=5, min_tokens=2, stop_token_ids=frozenset({2}), logprobs=1
        )
        draw = SequenceDraw(params)
        drawn = []
        for _ in range(3):
            result = sample(logits, [draw])
            drawn.append(int(result.tokens[0]))
            draw.append(drawn[-1])
            # Log-probabilities are of the raw logits: the masked token still is the likeliest.
            assert result.logprobs is not None
            assert result.logprobs[0] is not None
            assert result.logprobs[0].top_ids.tolist() == [2]
        assert 2 not in drawn[:2]
        assert drawn[2] == 2
        assert draw.finish() is Finish.STOP


def test_finish() -> None:
    params = DrawParams(max_tokens=3, min_tokens=2, stop_token_ids=frozenset({9}))
    assert SequenceDraw(params).finish() is None
    assert SequenceDraw(params, outputs=[9]).finish() is None  # below min_tokens
    assert SequenceDraw(params, outputs=[9, 9]).finish() is Finish.STOP
    assert SequenceDraw(params, outputs=[9, 1]).finish() is None
    assert SequenceDraw(params, outputs=[1, 1, 1]).finish() is Finish.LENGTH
    assert SequenceDraw(params, outputs=[1, 1, 9]).finish() is Finish.STOP
    assert SequenceDraw(DrawParams(max_tokens=1), outputs=[4]).finish() is Finish.LENGTH


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = logits_of(4, 3)
    rows = [
        DrawParams(temperature=0.3, top_k=2, logprobs=20),
        DrawParams(temperature=0, logprobs=0),
        DrawParams(temperature=1.0),
    ]
    result = sample(logits, [SequenceDraw(row) for row in rows])
    expected = logits.log_softmax(-1)
    assert result.logprobs is not None
    first, second, third = result.logprobs
    assert third is None
    assert second is not None
    assert len(second.top_ids) == 0
    assert second.logprob == pytest.approx(float(expected[1].max()), abs=1e-5)
    assert first is not None
    assert first.token_id == result.tokens[0]
    assert first.logprob == pytest.approx(float(expected[0, first.token_id]), abs=1e-5)
    best = expected[0].sort(descending=True, stable=True)
    assert first.top_ids.tolist() == best.indices[:20].tolist()
    assert first.top_logprobs.tolist() == pytest.approx(best.values[:20].tolist(), abs=1e-5)


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=30), st.integers(0, 20))
def test_top_logprobs_order_equals_by_id(values: list[float], count: int) -> None:
    draw = SequenceDraw(DrawParams(temperature=0, logprobs=count))
    result = sample(torch.tensor([values]), [draw]).logprobs
    assert result is not None
    assert result[0] is not None
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert result[0].top_ids.tolist() == order[:count]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sick_row_fails_alone(value: float, temperature: float) -> None:
    logits = logits_of(6, 3)
    healthy = sample(logits, [SequenceDraw(DrawParams(temperature=temperature, logprobs=1))] * 3)
    logits[1, 17] = value
    result = sample(logits, [SequenceDraw(DrawParams(temperature=temperature, logprobs=1))] * 3)
    assert result.failed.tolist() == [False, True, False]
    assert result.tokens[[0, 2]].tolist() == healthy.tokens[[0, 2]].tolist()
    assert result.tokens[1] == 0
    assert result.logprobs is not None
    assert result.logprobs[1] is None
    nothing = sample(torch.full((1, 5), -torch.inf), [SequenceDraw(DrawParams(temperature=temperature))])
    assert nothing.failed.tolist() == [True]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", 101.0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("min_tokens", 2),
        ("logprobs", 21),
    ],
)
def test_values_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(DrawParamsError, match=field):
        DrawParams(**{field: value})  # type: ignore[arg-type]


def test_stop_ids_outside_the_vocabulary_are_named() -> None:
    DrawParams(stop_token_ids=frozenset({0, 9})).check_vocabulary(10)
    with pytest.raises(DrawParamsError, match="stop_token_ids 10"):
        DrawParams(stop_token_ids=frozenset({10})).check_vocabulary(10)
    with pytest.raises(DrawParamsError, match="nothing to draw"):
        DrawParams(min_tokens=1, stop_token_ids=frozenset({0, 1})).check_vocabulary(2)
