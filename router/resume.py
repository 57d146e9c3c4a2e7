# SPDX-License-Identifier: Apache-2.0
"""How an answer goes on elsewhere when a worker of it is lost: what its client has becomes the end of the prompt.

The workers count those tokens as output (``DrawSpec.drawn``), so positions, penalties, limits and the random numbers of a
seed are those of the answer that was not interrupted. Several choices share one prompt and have parted since: they are drawn
again from its end, and what comes must equal what the client has.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from twinpool._core import hash_blocks
from twinpool.router.request import Prepared


def continuation(prepared: Prepared, outputs: Sequence[Sequence[int]]) -> Prepared:
    """The request as it goes on. ``prepared`` is as it arrived; ``outputs`` are the tokens that its client has, a row a choice."""
    if any(len(output) for output in outputs):
        # Who has tokens has these.
        prepared = replace(prepared, prompt_logprobs=None)
    if len(outputs) > 1:
        return prepared
    (output,) = outputs
    tokens = np.concatenate([prepared.tokens, np.array(output, np.int32)])
    hashes = hash_blocks(prepared.root, tokens, prepared.group.block_tokens)
    return replace(prepared, tokens=tokens, hashes=hashes, drawn=len(output))
