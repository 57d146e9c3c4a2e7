# SPDX-License-Identifier: Apache-2.0
"""Temperature, top-k, top-p and min-p against a plain reference, against transformers, and by distribution."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.engine.sampling import DrawParams, SequenceDraw, filters, sample

LOGITS = [2.0, 1.0, 0.5, 0.5, 0.0, -1.0, -2.0, -40.0]


def settings_of(*rows: DrawParams) -> filters.FilterSettings:
    return filters.FilterSettings(
        temperature=torch.tensor([row.temperature for row in rows], dtype=torch.float64),
        top_k=torch.tensor([row.top_k for row in rows]),
        top_p=torch.tensor([row.top_p for row in rows], dtype=torch.float64),
        min_p=torch.tensor([row.min_p for row in rows], dtype=torch.float64),
    )


def reference(logits: list[float], params: DrawParams) -> list[float]:
    """Probabilities, written as the definitions read: sort, cut, normalise."""
    highest = max(logits)
    scaled = [(value - highest) / params.temperature for value in logits]
    order = sorted(range(len(logits)), key=lambda i: (-scaled[i], i))
    if params.top_k:
        order = order[: params.top_k]
    weight = {i: math.exp(scaled[i]) for i in order}
    total, before, kept = math.fsum(weight.values()), 0.0, set()
    for i in order:
        if before < params.top_p * total or params.top_p == 1.0:
            kept.add(i)
        before += weight[i]
    kept = {i for i in kept if weight[i] >= params.min_p}
    mass = math.fsum(weight[i] for i in kept)
    return [weight[i] / mass if i in kept else 0.0 for i in range(len(logits))]


logit = st.floats(-8, 8, width=32).map(lambda x: round(x * 4) / 4)  # ties are frequent
params = st.builds(
    DrawParams,
    temperature=st.sampled_from([0.25, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.01, 1.0),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_filters_equal_the_reference(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 10))
    rows = data.draw(
        st.lists(st.tuples(st.lists(logit, min_size=vocab, max_size=vocab), params), min_size=1, max_size=4)
    )
    weights = filters.weights(torch.tensor([row for row, _ in rows]), settings_of(*(p for _, p in rows)))
    probabilities = (weights / weights.sum(-1, keepdim=True)).tolist()
    for (row, param), got in zip(rows, probabilities, strict=True):
        expected = reference(row, param)
        # At the edge of top_p rounding decides whether one more token is kept; elsewhere the sets are equal.
        if [p > 0 for p in got] != [p > 0 for p in expected]:
            wider = DrawParams(param.temperature, param.top_k, min(1.0, param.top_p + 1e-9), param.min_p)
            narrower = DrawParams(param.temperature, param.top_k, max(1e-12, param.top_p - 1e-9), param.min_p)
            assert reference(row, wider) != reference(row, narrower)
            continue
        assert got == pytest.approx(expected, abs=1e-12)


def test_top_p_beyond_the_first_guesses() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 12_000, generator=generator) * 0.01  # nearly flat: 0.9 needs about 10,800
    logits[1] *= 1000  # one peaked row settles at the first look
    rows = (DrawParams(top_p=0.9), DrawParams(top_p=0.9), DrawParams(top_k=7, top_p=0.5))
    together = filters.weights(logits, settings_of(*rows))
    assert int((together[0] > 0).sum()) > 10_000
    for i, row in enumerate(rows):
        assert torch.equal(filters.weights(logits[i : i + 1], settings_of(row))[0], together[i])
        expected = np.array(reference(logits[i].tolist(), row)) > 0
        assert np.array_equal((together[i] > 0).numpy(), expected)


def test_filters_keep_what_transformers_keeps() -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(16, 300, generator=torch.Generator().manual_seed(1)) * 3
    chain = [
        process.TemperatureLogitsWarper(0.8),
        process.TopKLogitsWarper(40),
        process.TopPLogitsWarper(0.85),
        process.MinPLogitsWarper(0.05),
    ]
    expected = logits.clone()
    for warper in chain:
        expected = warper(torch.zeros(16, 1, dtype=torch.long), expected)
    rows = [DrawParams(temperature=0.8, top_k=40, top_p=0.85, min_p=0.05)] * 16
    weights = filters.weights(logits, settings_of(*rows))
    assert torch.equal(weights > 0, expected > -torch.inf)
    probabilities = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(probabilities.float(), expected.softmax(-1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "param",
    [
        DrawParams(),
        DrawParams(temperature=0.5),
        DrawParams(temperature=2.0, top_k=4),
        DrawParams(top_p=0.8),
        DrawParams(min_p=0.2),
        DrawParams(temperature=1.5, top_k=6, top_p=0.9, min_p=0.1),
    ],
)
def test_drawn_tokens_follow_the_distribution(param: DrawParams) -> None:
    draws_per_seed, seeds = 100, 60
    observed = np.zeros(len(LOGITS))
    for seed in range(seeds):
        row = DrawParams(param.temperature, param.top_k, param.top_p, param.min_p, seed=seed * 977)
        states = [SequenceDraw(row, outputs=[0] * position) for position in range(draws_per_seed)]
        tokens = sample(torch.tensor([LOGITS] * draws_per_seed), states).tokens
        observed += np.bincount(tokens, minlength=len(LOGITS))
    expected = np.array(reference(LOGITS, param)) * draws_per_seed * seeds
    assert observed[expected == 0].sum() == 0
    likely = expected > 5
    chi_square = (((observed - expected) ** 2)[likely] / expected[likely]).sum()
    assert chi_square < 27  # at most 6 degrees of freedom: exceeded once in 7,000


def test_a_token_without_weight_is_never_drawn() -> None:
    weight = torch.tensor([[0.0, 3.0, 0.0, 1.0, 0.0]], dtype=torch.float64).repeat(5, 1)
    uniform = torch.tensor([0.0, 0.5, 0.75, 1 - 2**-53, np.nextafter(0.75, 0)], dtype=torch.float64)
    assert filters.draw(weight, uniform).tolist() == [1, 1, 3, 3, 1]


@settings(deadline=None)
@given(st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=6))
def test_the_last_uniform_draws_the_last_token(values: list[float]) -> None:
    weight = torch.tensor([[*values, 0.0]], dtype=torch.float64)
    token = int(filters.draw(weight, torch.tensor([1 - 2**-53], dtype=torch.float64))[0])
    assert token < len(values)
