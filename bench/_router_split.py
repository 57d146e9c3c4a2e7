# SPDX-License-Identifier: Apache-2.0
"""Where a router's CPU goes: samples of its stacks under load, sorted by what the innermost known frame belongs to.

``python -m bench._router_split --py-spy PATH --tokenizer DIR`` needs py-spy, which reads native frames, too.
"""

import argparse
import json
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from bench._router_fronts import Ours
from bench._router_load import cpu_seconds, drive
from bench._router_prompts import Prompts
from twinpool.rpc import run

SECONDS = 10
PARTS = (
    ("tokenizer", ("tokenizers", "fastokens", "twinpool/text", "router/tokenize.py")),
    ("protobuf", ("_message.abi3", "_pb2.py", "google/protobuf")),
    ("gRPC", ("cygrpc", "grpc/aio", "libgrpc", "_transport.cpython", "sendmsg", "recvmsg")),
    ("adapter", ("twinpool/rpc/native",)),
    ("core", ("_core.cpython",)),
    ("relay", ("twinpool/",)),
    ("event loop", ("uvloop", "loop.c", "asyncio", "uv_", "core.c")),
)
"""Parts and the frames that tell them; a sample belongs to the first that its innermost known frame names."""
_IDLE = (
    "epoll_wait",
    "epoll_pwait",
    "pthread_cond",
    "sem_",
    "lock_timed",
    "futex",
    "clock_nanosleep",
    "select (",
)


def part_of(stack: list[str]) -> str:
    """The part that a sample counts for; empty: its thread waits."""
    if any(word in frame for frame in stack[-3:] for word in _IDLE):
        return ""
    for frame in reversed(stack):
        for name, words in PARTS:
            if any(word in frame for word in words):
                return name
    return "other"


async def split(args: argparse.Namespace, size: int, kind: str) -> dict[str, float]:
    """Microseconds of CPU a request, by part."""
    prompts = Prompts(Path(args.tokenizer), seed=size)
    async with Ours("", args.tokenizer, 0.0) as front:
        texts = [prompts.first(size) for _ in range(max(32, 2_000_000 // size))]
        bodies = [front.body(text if kind == "text" else prompts.ids(text), False) for text in texts]
        await drive(front.send, bodies[:32], 16, front.pid)
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "stacks"
            command = [
                args.py_spy,
                "record",
                "-p",
                str(front.pid),
                "-d",
                str(SECONDS),
                "-r",
                "200",
                "--native",
                "-t",
            ]
            sampler = subprocess.Popen(  # noqa: ASYNC220
                [*command, "-f", "raw", "-o", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            requests, before = 0, cpu_seconds(front.pid)
            while sampler.poll() is None:
                requests += (await drive(front.send, bodies, 16, front.pid)).requests
            spent = cpu_seconds(front.pid) - before
            counts: Counter[str] = Counter()
            for line in out.read_text().splitlines():
                stack, _, count = line.rpartition(" ")
                counts[part_of(stack.split(";"))] += int(count)
    del counts[""]
    total = sum(counts.values())
    return {"total": spent / requests * 1e6} | {
        name: count / total * spent / requests * 1e6 for name, count in counts.most_common()
    }


async def _main(args: argparse.Namespace) -> int:
    for size, kind in ((1024, "ids"), (8192, "ids"), (8192, "text"), (32768, "text")):
        found = await split(args, size, kind)
        print(
            json.dumps({"prompt_tokens": size, "input": kind} | {k: round(v) for k, v in found.items()}),
            flush=True,
        )
    return 0


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--py-spy", required=True)
    parser.add_argument("--tokenizer", required=True)
    run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
