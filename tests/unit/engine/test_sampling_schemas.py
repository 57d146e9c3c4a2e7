# SPDX-License-Identifier: Apache-2.0
"""Answers drawn at random under the schemas of the JSON Schema Test Suite: each is valid, whatever the schema.

The suite (https://github.com/json-schema-org/JSON-Schema-Test-Suite, MIT) is not part of the project: TWINPOOL_JSON_SCHEMAS names its
directory of one draft, such as ``tests/draft2020-12``.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from referencing.exceptions import Unresolvable

from tests.support.byte_tokenizer import EOS, VOCAB_SIZE, write_byte_tokenizer
from twinpool.engine.sampling import DrawParams, GrammarError, Grammars, SequenceDraw, sample
from twinpool.errors import TwinpoolError
from twinpool.router.structured import json_grammar

SUITE = os.environ.get("TWINPOOL_JSON_SCHEMAS", "")
ANSWERS = 4
LONGEST = 600

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SUITE, reason="TWINPOOL_JSON_SCHEMAS names no directory of schemas"),
]


def schemas() -> list[tuple[str, Any]]:
    """Every schema of the suite that is an object, by its file and description."""
    return [
        (f"{path.stem}: {group['description']}", group["schema"])
        for path in sorted(Path(SUITE).glob("*.json"))
        for group in json.loads(path.read_text())
        if isinstance(group["schema"], dict)
    ]


def logits_at(seed: int, position: int) -> torch.Tensor:
    """A model that knows nothing, but likes to come to an end."""
    made = torch.Generator().manual_seed(1000 * seed + position)
    logits = torch.randn(VOCAB_SIZE, generator=made)
    for character in b'"]},0':
        logits[character] += 1.0 + position / 20
    logits[EOS] += 4.0
    return logits


def answers(grammars: Grammars, grammar: str) -> list[str]:
    """Some that came to their end."""
    draws = [
        SequenceDraw(
            DrawParams(seed=seed, grammar=grammar, max_tokens=LONGEST, stop_token_ids=frozenset([EOS])),
            grammar=grammars.state(grammar),
        )
        for seed in range(ANSWERS)
    ]
    while running := [draw for draw in draws if draw.finish() is None]:
        rows = torch.stack([logits_at(draw.params.seed, draw.position) for draw in running])
        drawn = sample(rows, running, grammars.masks([draw.grammar for draw in running]))
        assert not drawn.failed.any()
        for draw, token in zip(running, drawn.tokens.tolist(), strict=True):
            draw.append(token)
    return [bytes(draw.outputs[:-1]).decode() for draw in draws if draw.outputs[-1] == EOS]


def test_every_answer_is_valid(tmp_path: Path) -> None:
    root = write_byte_tokenizer(tmp_path / "model")
    grammars = Grammars((root / "tokenizer.json").read_text, vocab_size=VOCAB_SIZE, end_ids=[EOS])
    compiled, refused, checked, unknown, wrong = 0, 0, 0, 0, []
    for name, schema in schemas():
        try:
            grammar = json_grammar(json.dumps(schema), "schema")
            grammars.compile(grammar)
        except (GrammarError, TwinpoolError):
            refused += 1
            continue
        compiled += 1
        for text in answers(grammars, grammar):
            checked += 1
            try:
                Draft202012Validator(schema).validate(json.loads(text))
            except (re.error, Unresolvable):
                # The validator knows fewer patterns and no schemas of other places.
                unknown += 1
            except (ValidationError, ValueError) as error:
                wrong.append(f"{name}: {text!r}: {error}")
    grammars.close()
    print(
        f"{compiled} schemas compiled, {refused} refused; {checked} answers, {unknown} not checkable, {len(wrong)} wrong"
    )
    assert compiled >= 100
    assert not wrong, "\n".join(wrong[:20])
