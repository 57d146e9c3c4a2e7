# SPDX-License-Identifier: Apache-2.0
"""Fuzzes targets: ``python -m tests.fuzz --seconds 60 [TARGET...]``, all of them by default.

With atheris installed (``pip install atheris``) inputs are chosen by what new code they reach, and what reaches some joins the
stored corpus, of the smallest inputs that reach it all. Without it they are made at random from seeds and corpus, and the seed
that repeats a run is printed. The input of a finding lies in build/fuzz/findings.
"""

import argparse
import importlib.util
import random
import subprocess
import sys
import time
from pathlib import Path

from tests.fuzz.target import INPUT_BYTES_MAX, Target, check, mutate_bytes
from tests.fuzz.targets import MODULES, target

BUILD = Path(__file__).parents[2] / "build" / "fuzz" / "python"
FINDINGS = BUILD.parent / "findings"
SECONDS_AN_INPUT = 20
CORPUS_MAX = 40
"""Most inputs of a stored corpus: the first ones, which reach the most."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzzes what reads input from outside.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(MODULES)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=None, help="of a run without atheris")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    guided = importlib.util.find_spec("atheris") is not None
    FINDINGS.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in arguments.targets or MODULES:
        if arguments.here:
            run_guided(target(name), arguments.seconds)  # ends the process
        print(f"{name}: {arguments.seconds} s, {'by coverage' if guided else 'at random'}", flush=True)
        good = guided_process(name, arguments.seconds) if guided else run_random(target(name), arguments)
        failed += [] if good else [name]
    if failed:
        print(f"findings in {', '.join(failed)}; see {FINDINGS}", file=sys.stderr)
    return len(failed)


def run_random(found: Target, arguments: argparse.Namespace) -> bool:
    """Until the time is over or something is found."""
    seed = arguments.seed if arguments.seed is not None else random.randrange(1 << 32)
    source, pool = random.Random(seed), [*found.seeds(), *found.corpus()]
    end, count = time.monotonic() + arguments.seconds, 0
    while time.monotonic() < end:
        data = source.choice(pool)
        for _ in range(source.randrange(1, 4)):
            data = (found.mutate if source.random() < 0.8 else mutate_bytes)(data, source)
        try:
            check(found, data)
        except BaseException:
            (FINDINGS / f"{found.name}.bin").write_bytes(data)
            print(f"{found.name}: seed {seed}, input {count}", file=sys.stderr)
            raise
        count += 1
    print(f"{found.name}: {count} inputs from seed {seed}", flush=True)
    return True


def guided_process(name: str, seconds: int) -> bool:
    """A process a target: libFuzzer ends its own."""
    command = [sys.executable, "-m", "tests.fuzz", "--here", "--seconds", str(seconds), name]
    log = BUILD / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    text = log.read_text(errors="replace")
    done = [line for line in text.splitlines() if line.startswith("Done ")]
    print(f"{name}: {done[-1] if done else text[-2000:]}", flush=True)
    if code == 0:
        store(target(name), BUILD / name)
    return code == 0


def run_guided(found: Target, seconds: int) -> None:
    """Never returns."""
    import atheris

    corpus = BUILD / found.name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate([*found.seeds(), *found.corpus()]):
        (corpus / f"start-{number:04}").write_bytes(data)
    for data in found.seeds():
        found.run(data)  # imports all that it needs
    for name, module in list(sys.modules.items()):
        if name.startswith("twinpool.") and not name.startswith("twinpool.v1"):
            instrument(atheris, module)

    def mutate(data: bytes, size: int, seed: int) -> bytes:
        return found.mutate(data, random.Random(seed))[:size]

    options = ["fuzz", f"-max_total_time={seconds}", f"-max_len={max(INPUT_BYTES_MAX, 1 << 16)}"]
    options += [f"-timeout={SECONDS_AN_INPUT}", f"-artifact_prefix={FINDINGS}/{found.name}-", str(corpus)]
    atheris.Setup(options, found.run, custom_mutator=mutate)
    atheris.Fuzz()


def instrument(atheris, module) -> None:  # type: ignore[no-untyped-def]
    """Counts the branches of a module's functions."""
    for value in list(vars(module).values()):
        for function in [value, *vars(value).values()] if isinstance(value, type) else [value]:
            if getattr(function, "__module__", None) == module.__name__ and hasattr(function, "__code__"):
                atheris.instrument_func(function)


def store(found: Target, corpus: Path) -> None:
    """Keeps the smallest inputs that reached new code."""
    reached = sorted(
        (path.read_bytes() for path in corpus.iterdir() if not path.name.startswith("start-")),
        key=lambda data: (len(data), data),
    )
    kept = [data.hex() for data in reached if 0 < len(data) <= 512][:CORPUS_MAX]
    if kept:
        found.corpus_file.write_text("".join(f"{line}\n" for line in sorted(kept)))


if __name__ == "__main__":
    sys.exit(main())
