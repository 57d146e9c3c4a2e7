# SPDX-License-Identifier: Apache-2.0
"""KV that is stored, and so moved, in packed form: the pair of workers draws what one engine over the same form draws."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet import BLOCK, Fleet, running_fleet
from tests.support.steps import legs, prompt
from twinpool.engine.local import LocalEngine
from twinpool.engine.sampling import DrawParams

pytestmark = pytest.mark.integration

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 7 * BLOCK + 5)


@pytest.fixture(scope="module")
def packed(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    workers = {"prefill-0": "prefill", "decode-0": "decode"}
    settings = {"kv.dtype": "fp8_latent"}
    directory = tmp_path_factory.mktemp("packed")
    with running_fleet(directory, checkpoints["deepseek_v3"], workers, settings) as fleet:
        yield fleet


async def test_tokens_are_those_of_one_engine_over_the_same_form(packed: Fleet) -> None:
    engine = LocalEngine.from_config(packed.workers["decode-0"].config)
    record = packed.workers["prefill-0"].record
    # Three layers of 32 latent values with one scale, and 8 rotary ones.
    assert record.kv_bytes_per_token == 3 * (32 + 4 + 8 * 2)
    async with legs(packed) as walk:
        for length in LENGTHS:
            tokens = prompt(length, 5)
            params = DrawParams(
                temperature=0.0, max_tokens=12, stop_token_ids=frozenset(record.eos_token_ids)
            )
            expected = engine.generate([tokens], params)[0][0].tokens
            for turn in ("first", "cached"):
                request = packed.request(tokens, f"packed-{length}-{turn}", max_tokens=12)
                answer = await walk.generate(request)
                assert answer.tokens == [expected], f"length {length}, {turn}"
            assert answer.bytes == (length % BLOCK != 0) * BLOCK * record.kv_bytes_per_token
            await packed.assert_quiet()
