# SPDX-License-Identifier: Apache-2.0
"""What the line formats share: typed lines, errors that name the line, block ids cut to the full blocks."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from twinpool.control.replay.trace import Runs, TraceError, compress

T = TypeVar("T")


def decode_lines(path: Path, text: str, kind: type[T]) -> Iterator[tuple[int, T]]:
    """(line number, object) of each line that is not empty; TraceError names a bad one."""
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield number, decoder.decode(line)
        except msgspec.DecodeError as error:  # a ValidationError is one, too
            raise TraceError(f"{path}: line {number}: {error}") from error


def check_lengths(path: Path, number: int, input_length: int, output_length: int) -> None:
    """A prompt and an answer have at least one token each."""
    if input_length < 1 or output_length < 1:
        raise TraceError(f"{path}: line {number}: input_length={input_length}, output_length={output_length}")


def cut(path: Path, number: int, ids: list[int], input_length: int, block_tokens: int) -> tuple[Runs, int]:
    """The runs of the full blocks, and the id of the partial block after them or -1."""
    full = input_length // block_tokens
    if not full <= len(ids) <= full + 1:
        raise TraceError(
            f"{path}: line {number}: {len(ids)} block ids for {input_length} tokens in blocks of {block_tokens}"
        )
    return compress(ids[:full]), ids[full] if len(ids) > full else -1
