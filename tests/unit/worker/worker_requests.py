# SPDX-License-Identifier: Apache-2.0
"""Commands to the workers of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tests.support.worker_commands import draw_spec, prompt_spec, set_deadline
from twinpool._core import root_hash
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.commands import worker_id

if TYPE_CHECKING:
    from worker_pair import Pair

BLOCK = 16
ROOT = root_hash(b"unit", b"", b"")


def decode_command(
    pair: Pair,
    prompt: Sequence[int],
    request_id: str = "r",
    deadline: float | None = None,
    *,
    prefix: pb.PrefixSource | None = None,
    preemptible: bool | None = None,
    session: bytes = b"",
    local: bool = False,
    **spec: object,
) -> pb.SessionRequest:
    """``local``: the decode worker computes the prompt itself."""
    command = pb.DecodeCommand(
        id=pb.AttemptId(request_id=request_id, attempt=1),
        prompt=prompt_spec(prompt, ROOT, BLOCK),
        draw=draw_spec(**spec),  # type: ignore[arg-type]
        owner=None if local else worker_id(pair.prefill.key),
        owner_endpoint="" if local else "127.0.0.1:1",
        prefix=prefix,
        preemptible=preemptible,
        session=session,
    )
    set_deadline(command, deadline)
    return pb.SessionRequest(decode=command)


def prefill_command(
    pair: Pair,
    prompt: Sequence[int],
    request_id: str = "r",
    cached: int = 0,
    deadline: float | None = None,
    *,
    prefix: pb.PrefixSource | None = None,
    preemptible: bool | None = None,
    session: bytes = b"",
    **spec: object,
) -> pb.SessionRequest:
    command = pb.PrefillCommand(
        id=pb.AttemptId(request_id=request_id, attempt=1),
        prompt=prompt_spec(prompt, ROOT, BLOCK),
        draw=draw_spec(**spec),  # type: ignore[arg-type]
        reader=worker_id(pair.decode.key),
        reader_cached_blocks=cached,
        prefix=prefix,
        preemptible=preemptible,
        session=session,
    )
    set_deadline(command, deadline)
    return pb.SessionRequest(prefill=command)


def cancel_command(request_id: str = "r", attempt: int = 1) -> pb.SessionRequest:
    return pb.SessionRequest(cancel=pb.CancelCommand(id=pb.AttemptId(request_id=request_id, attempt=attempt)))


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(8, 250, length).tolist()
