# SPDX-License-Identifier: Apache-2.0
"""What a fuzz target is, and how its inputs are changed at random."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
INPUT_BYTES_MAX = 4096

Mutate = Callable[[bytes, random.Random], bytes]

_INTERESTING = (0, 1, 0x7F, 0x80, 0xFF)


def mutate_bytes(data: bytes, source: random.Random) -> bytes:
    """A few random changes: bits, bytes, pieces that go, come twice or are cut off."""
    raw = bytearray(data)
    for _ in range(source.randrange(1, 5)):
        at = source.randrange(len(raw) + 1)
        size = source.randrange(1, 9)
        kind = source.randrange(7)
        if kind == 0 and raw:
            raw[at % len(raw)] ^= 1 << source.randrange(8)
        elif kind == 1 and raw:
            raw[at % len(raw)] = source.choice(_INTERESTING)
        elif kind == 2:
            raw[at:at] = source.randbytes(size)
        elif kind == 3:
            del raw[at : at + size]
        elif kind == 4:
            raw[at:at] = raw[at : at + size]
        elif kind == 5:
            raw[at:at] = b"\xff" * size
        elif source.random() < 0.3:
            del raw[at:]
    return bytes(raw[:INPUT_BYTES_MAX])


@dataclass(frozen=True, slots=True)
class Target:
    """``run`` returns whatever the input is: an exception out of it is a finding, and so is one that never comes back.
    ``seeds``: good inputs to begin with. ``mutate`` knows the form of an input, so that changes get past its parser.
    ``close`` ends what the runs have started."""

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    mutate: Mutate = mutate_bytes
    close: Callable[[], None] = lambda: None

    @property
    def corpus_file(self) -> Path:
        """Stored inputs, one a line, in hexadecimal."""
        return CORPUS / f"{self.name}.hex"

    def corpus(self) -> list[bytes]:
        """Stored inputs; none for a target without."""
        if not self.corpus_file.is_file():
            return []
        return [bytes.fromhex(line) for line in self.corpus_file.read_text().split()]


def drive(target: Target, seed: int, count: int) -> None:
    """Runs seeds, corpus, and ``count`` inputs made of them by chance. ``seed`` repeats a run exactly."""
    source = random.Random(seed)
    pool = [*target.seeds(), *target.corpus()]
    for data in pool:
        check(target, data)
    for _ in range(count):
        data = source.choice(pool)
        for _ in range(source.randrange(1, 4)):
            data = (target.mutate if source.random() < 0.8 else mutate_bytes)(data, source)
        check(target, data)


def check(target: Target, data: bytes) -> None:
    """Runs one input; a failure names it."""
    try:
        target.run(data)
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            error.add_note(f"input of fuzz target {target.name}: {data.hex()}")
        raise
