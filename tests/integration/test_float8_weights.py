# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with float8 weights through a pair of workers: the tokens of transformers on what the codes stand for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet import BLOCK, Fleet, running_fleet
from tests.support.float8 import write_widened
from tests.support.oracle import oracle
from tests.support.steps import legs, prompt
from twinpool.engine.tiny import write_tiny

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LENGTHS = (1, BLOCK, 3 * BLOCK + 5)
WORKERS = {"prefill-0": "prefill", "decode-0": "decode"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), "deepseek_v3", seed=7, shards=2, float8=True)


@pytest.fixture(scope="module")
def fleet(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("float8"), checkpoint, WORKERS, {}) as running:
        yield running


async def test_tokens_are_those_of_transformers(fleet: Fleet, checkpoint: Path, tmp_path: Path) -> None:
    expected = oracle(write_widened(checkpoint, tmp_path / "widened"))
    async with legs(fleet) as walk:
        for length in LENGTHS:
            tokens = prompt(length, 5)
            for turn in ("first", "cached"):
                request = fleet.request(tokens, f"float8-{length}-{turn}", max_tokens=12)
                answer = await walk.generate(request)
                assert answer.tokens == [expected.greedy(tokens, 12)], f"length {length}, {turn}"
            await fleet.assert_quiet()
