# SPDX-License-Identifier: Apache-2.0
"""Commands to workers, as a router fills them in."""

from collections.abc import Sequence

import numpy as np

from twinpool._core import hash_blocks
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.inference_pb2 import SamplingParams, StopConditions


def prompt_spec(prompt: Sequence[int], root: bytes, block_tokens: int) -> pb.PromptSpec:
    """A prompt with the hashes of its full blocks under ``root``."""
    tokens = np.array(prompt, np.int32)
    return pb.PromptSpec(
        token_ids=tokens.astype("<i4").tobytes(),
        block_hashes=hash_blocks(root, tokens, block_tokens).tobytes(),
        root_hash=root,
    )


def draw_spec(
    *,
    max_tokens: int = 6,
    n: int = 1,
    stop: Sequence[int] = (),
    temperature: float = 0.0,
    min_tokens: int = 0,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    seed: int = 11,
    drawn: int = 0,
) -> pb.DrawSpec:
    """Every default filled in; greedy unless a temperature is given."""
    sampling = SamplingParams(
        temperature=temperature,
        top_k=0,
        top_p=1,
        min_p=0,
        presence_penalty=0,
        frequency_penalty=0,
        repetition_penalty=1,
        seed=seed,
    )
    conditions = StopConditions(max_tokens=max_tokens, min_tokens=min_tokens)
    return pb.DrawSpec(
        sampling=sampling,
        stop=conditions,
        stop_token_ids=list(stop),
        n=n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        drawn=drawn,
    )


def set_deadline(command: pb.DecodeCommand | pb.PrefillCommand, seconds: float | None) -> None:
    """``seconds`` are left; None leaves the command without a deadline."""
    if seconds is not None:
        command.deadline.FromNanoseconds(int(seconds * 1e9))
