# SPDX-License-Identifier: Apache-2.0
"""Every fuzz target for a moment: its seeds, its stored corpus, and the same few hundred inputs made of them each time."""

import pytest

from tests.fuzz.target import CORPUS, drive
from tests.fuzz.targets import MODULES, target

INPUTS = {"safetensors": 40, "tokenizer": 15}
"""Of targets that take long for an input; the others run more."""


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.timeout(600)
def test_no_input_does_any_harm(name: str) -> None:
    found = target(name)
    try:
        drive(found, seed=20, count=INPUTS.get(name, 150))
    finally:
        found.close()


def test_every_stored_corpus_has_a_target() -> None:
    assert {path.stem for path in CORPUS.glob("*.hex")} <= MODULES.keys()
