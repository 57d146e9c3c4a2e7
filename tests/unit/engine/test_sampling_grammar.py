# SPDX-License-Identifier: Apache-2.0
"""Answers that must follow a grammar, drawn from logits that know nothing of it."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from tests.support.byte_tokenizer import EOS, VOCAB_SIZE, write_byte_tokenizer
from twinpool.engine.sampling import DrawParams, GrammarError, Grammars, SequenceDraw, sample
from twinpool.engine.sampling.grammar import MAX_COMPILED

PADDED = VOCAB_SIZE + 38
"""Models have more rows of logits than their tokenizer has tokens."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "town": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "tags": {"type": "array", "items": {"enum": ["wet", "dry"]}, "maxItems": 3},
    },
    "required": ["town", "days", "tags"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
LETTERS = LLMatcher.grammar_from_regex("[a-c]{3}(x|yz)*")


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    root = write_byte_tokenizer(tmp_path_factory.mktemp("model"))
    return Grammars((root / "tokenizer.json").read_text, vocab_size=PADDED, end_ids=[EOS])


def logits_at(seed: int, position: int) -> torch.Tensor:
    """What a model that knows no grammar would say."""
    made = torch.Generator().manual_seed(1000 * seed + position)
    return torch.randn(PADDED, generator=made) * 3


def answer(
    grammars: Grammars, draws: Sequence[SequenceDraw], logits: Callable[[int, int], torch.Tensor] = logits_at
) -> None:
    """Draws until all of them have ended, each from its own logits."""
    while running := [draw for draw in draws if draw.finish() is None]:
        rows = torch.stack([logits(draw.params.seed, draw.position) for draw in running])
        before = rows.clone()
        masks = grammars.masks([draw.grammar for draw in running])
        drawn = sample(rows, running, masks)
        assert torch.equal(rows, before), "the logits are not changed"
        assert not drawn.failed.any()
        for draw, token in zip(running, drawn.tokens.tolist(), strict=True):
            draw.append(token)


def begin(grammars: Grammars, grammar: str = GRAMMAR, seed: int = 1, **fields: Any) -> SequenceDraw:
    options: dict[str, Any] = {"max_tokens": 400, "stop_token_ids": frozenset([EOS])} | fields
    params = DrawParams(seed=seed, grammar=grammar, **options)
    return SequenceDraw(params, grammar=grammars.state(grammar) if grammar else None)


def text(draw: SequenceDraw) -> str:
    assert draw.outputs[-1] == EOS
    return bytes(draw.outputs[:-1]).decode()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_is_valid(grammars: Grammars, temperature: float) -> None:
    draws = [begin(grammars, seed=seed, temperature=temperature) for seed in range(12)]
    answer(grammars, draws)
    validator = Draft202012Validator(SCHEMA)
    found = [json.loads(text(draw)) for draw in draws]
    for value in found:
        validator.validate(value)
    assert len({json.dumps(value) for value in found}) == len(found), "the logits still decide"


def test_a_batch_with_and_without_grammars(grammars: Grammars) -> None:
    free = begin(grammars, "", seed=3, max_tokens=30, stop_token_ids=frozenset())
    draws = [begin(grammars, LETTERS, seed=5), free, begin(grammars, seed=6)]
    answer(grammars, draws)
    assert re.fullmatch("[a-c]{3}(x|yz)*", text(draws[0]))
    Draft202012Validator(SCHEMA).validate(json.loads(text(draws[2])))
    alone = begin(grammars, "", seed=3, max_tokens=30, stop_token_ids=frozenset())
    answer(grammars, [alone])
    assert free.outputs == alone.outputs, "a neighbour's grammar changes nothing"


def test_an_answer_goes_on_elsewhere_as_it_would_have_here(grammars: Grammars) -> None:
    whole = begin(grammars, seed=8)
    answer(grammars, [whole])
    for cut in range(len(whole.outputs)):
        rest = SequenceDraw(whole.params, outputs=whole.outputs[:cut], grammar=grammars.state(GRAMMAR))
        answer(grammars, [rest])
        assert rest.outputs == whole.outputs


def test_choices_have_states_of_their_own(grammars: Grammars) -> None:
    params = DrawParams(seed=4, grammar=GRAMMAR, max_tokens=400, stop_token_ids=frozenset([EOS]))
    choices = [SequenceDraw(params, choice=n, grammar=grammars.state(GRAMMAR)) for n in range(3)]
    answer(grammars, choices)
    assert len({text(choice) for choice in choices}) == 3
    for choice in choices:
        Draft202012Validator(SCHEMA).validate(json.loads(text(choice)))


def test_log_probabilities_are_those_of_the_model(grammars: Grammars) -> None:
    draw = begin(grammars, seed=2, logprobs=2, temperature=0.0)
    rows = logits_at(2, 0)[None]
    drawn = sample(rows, [draw], grammars.masks([draw.grammar]))
    assert drawn.logprobs is not None
    assert drawn.logprobs[0] is not None
    assert drawn.tokens[0] == ord("{")
    expected = float(rows.double().log_softmax(-1)[0, ord("{")])
    assert drawn.logprobs[0].logprob == pytest.approx(expected)


def test_what_no_grammar_allows_fails_alone(grammars: Grammars) -> None:
    draws = [begin(grammars, LETTERS), begin(grammars, LETTERS)]
    draws[0].append(ord("!"))
    rows = torch.stack([logits_at(1, 0), logits_at(1, 0)])
    drawn = sample(rows, draws, grammars.masks([draw.grammar for draw in draws]))
    assert drawn.failed.tolist() == [True, False]
    resumed = SequenceDraw(draws[0].params, outputs=[ord("a"), ord("!")], grammar=grammars.state(LETTERS))
    drawn = sample(rows[:1], [resumed], grammars.masks([resumed.grammar]))
    assert drawn.failed.tolist() == [True]


def test_no_grammar_costs_nothing(grammars: Grammars) -> None:
    assert grammars.masks([None, None]) is None


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ("start: {", "expected"),
        (LLMatcher.grammar_from_regex("(a"), "unclosed"),
        (LLMatcher.grammar_from_json_schema('{"minLength": 3, "maxLength": 1, "type": "string"}'), "Unsatisfiable"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_says_why(grammars: Grammars, grammar: str, says: str) -> None:
    with pytest.raises(GrammarError, match=f"(?i){says}"):
        grammars.compile(grammar)


def test_the_tokenizer_is_read_for_the_first_grammar_only(tmp_path: Path) -> None:
    root = write_byte_tokenizer(tmp_path / "model")
    reads: list[int] = []

    def read() -> str:
        reads.append(1)
        return (root / "tokenizer.json").read_text()

    grammars = Grammars(read, vocab_size=PADDED, end_ids=[EOS])
    assert not reads
    for number in range(MAX_COMPILED + 10):
        grammars.compile(LLMatcher.grammar_from_regex(f"a{{{number + 1}}}"))
    assert len(reads) == 1
    assert len(grammars._compiled) == MAX_COMPILED
    grammars.close()


def test_masks_are_what_the_matcher_says(grammars: Grammars) -> None:
    state = grammars.state(LETTERS)
    masks = grammars.masks([None, state])
    assert masks is not None
    rows = torch.zeros(2, PADDED)
    masks.apply(rows)
    assert torch.isfinite(rows[0]).all()
    assert np.flatnonzero(torch.isfinite(rows[1]).numpy()).tolist() == [ord(letter) for letter in "abc"]
