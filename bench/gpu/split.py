# SPDX-License-Identifier: Apache-2.0
"""Claim: on one GPU, splitting prefill from decode costs the hand-off and little else, and changes no token.

A prefill and a decode worker share the card; two routers place on them: *split* hands every prompt off, *whole* lets the
decode worker compute it too. A model of DeepSeek-V2-Lite's shape with random weights (bfloat16), written to memory first.
Time to first token of prompts that nobody has seen, in turn; the rate of the pulls; and the tokens of equal prompts,
which both compute for themselves.

``python -m bench.gpu.split --json`` takes some 150 s. ``--device cpu --layers 3 --lengths 64,512`` checks the script itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file

from bench._common import Figures, arguments, percentile, report
from bench.gpu.v2_lite_shape import CONFIG
from twinpool.client import Client, request
from twinpool.config import load_config, to_env
from twinpool.engine.checkpoint import INDEX_FILE
from twinpool.engine.config import ModelConfig
from twinpool.engine.kernels import REGISTRY, Capability, Kernels
from twinpool.engine.models.decoder import PagedDecoder
from twinpool.engine.tiny import tiny_config
from twinpool.engine.tiny_tokenizer import write_tokenizer
from twinpool.store import Keys, Store, connect_store, start_store
from twinpool.v1.control_pb2 import WORKER_STATE_READY, RouterRecord, WorkerRecord

Record = TypeVar("Record", WorkerRecord, RouterRecord)

SHARD_BYTES = 2 << 30
OUTPUT_TOKENS = 32
START_SECONDS = 150.0
CLUSTER = "bench"
ENTRY = """
import sys
from twinpool.config import load_config
from twinpool.launch import run_process
sys.exit(run_process(sys.argv[1], load_config()))
"""
ROUTERS: dict[str, dict[str, object]] = {
    "split": {"router.local_prefill": False},
    "whole": {"router.local_prefill": True, "router.prior_transfer_seconds": 60.0, "router.harm_weight": 0.0},
}


def write_model(path: Path, layers: int, device: str) -> int:
    """Norms 1, the rest N(0, 0.02), a seed for each tensor. Returns its bytes."""
    path.mkdir(parents=True)
    shape = CONFIG if device != "cpu" else tiny_config("deepseek_v3", max_context=8192)
    raw = shape | {"num_hidden_layers": layers, "bos_token_id": 0, "eos_token_id": 1}
    (path / "config.json").write_text(json.dumps(raw))
    write_tokenizer(path, int(raw["vocab_size"]), int(raw["max_position_embeddings"]))
    kernels = Kernels.select(REGISTRY, Capability("cpu"), torch.float32)
    model = PagedDecoder(ModelConfig.from_dict(raw), kernels, device="meta")
    where: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush() -> None:
        file = f"model-{len(set(where.values())):05d}.safetensors"
        save_file(shard, path / file)
        where.update(dict.fromkeys(shard, file))
        shard.clear()

    for slot in model.slots():
        tensor = torch.empty(slot.shape, dtype=torch.bfloat16, device=device)
        if "norm" in slot.name:
            tensor.fill_(1.0)
        else:
            generator = torch.Generator(device).manual_seed(zlib.crc32(slot.name.encode()))
            tensor.normal_(std=0.02, generator=generator)
        shard[slot.name] = tensor.cpu()
        size += tensor.nbytes
        if size >= SHARD_BYTES:
            flush()
            total, size = total + size, 0
    flush()
    (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    if device != "cpu":
        torch.cuda.empty_cache()
    return total + size


class Processes:
    """The store's clients and the processes of a cluster; ``stop`` ends them all."""

    def __init__(self, directory: Path, settings: Mapping[str, object]) -> None:
        self.directory = directory
        self.server = start_store(directory / "store")
        self.settings = {
            "cluster.name": CLUSTER,
            "cluster.etcd_endpoints": self.server.endpoint,
            "log.level": "info",
            **settings,
        }
        config = load_config(None, self.settings, env={})
        self.store: Store = connect_store(config.cluster)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, kind: str, name: str, settings: Mapping[str, object]) -> None:
        """One process; it logs to ``<name>.log``."""
        config = load_config(None, self.settings | dict(settings), env={})
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TWINPOOL_")}
        with (self.directory / f"{name}.log").open("ab") as out:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-c", ENTRY, kind],
                env=environment | to_env(config),
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    async def record(self, name: str) -> WorkerRecord:
        """Waits for a ready worker."""
        return await self._wait(name, Keys(CLUSTER).worker("default", name), WorkerRecord)

    async def router(self, name: str) -> RouterRecord:
        """Waits for a router."""
        return await self._wait(name, Keys(CLUSTER).router(name), RouterRecord)

    async def _wait(self, name: str, key: str, kind: type[Record]) -> Record:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._processes[name].poll() is not None:
                break
            item = await asyncio.to_thread(self.store.get, key)
            if item is not None:
                record = kind.FromString(item.value)
                if not isinstance(record, WorkerRecord) or record.state == WORKER_STATE_READY:
                    return record
            await asyncio.sleep(0.1)
        raise RuntimeError(f"{name} is not ready: {self.log(name)}")

    def log(self, name: str) -> str:
        """The end of a process's log."""
        return (self.directory / f"{name}.log").read_text(errors="replace")[-3000:]

    def tell(self) -> None:
        """Prints the ends of all logs."""
        for name in self._processes:
            print(name, self.log(name), file=sys.stderr)

    def stop(self) -> None:
        """Ends all of it."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        self.store.close()
        self.server.stop()


class Answer:
    """One request as its client sees it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.began = time.perf_counter()
        self.bytes = 0
        self.read_seconds = 0.0

    @property
    def ttft_ms(self) -> float:
        return (self.times[0] - self.began) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        return [(after - before) * 1e3 for before, after in zip(self.times, self.times[1:], strict=False)]


async def ask(
    client: Client, tokens: list[int], count: int = OUTPUT_TOKENS, *, scored: bool = False
) -> Answer:
    """Greedy tokens; ``scored``: with the log-probabilities of the prompt."""
    answer = Answer()
    message = request(
        tokens, max_tokens=count, temperature=0.0, ignore_eos=True, prompt_logprobs=0 if scored else None
    )
    async for event in client.stream(message):
        if event.HasField("tokens"):
            answer.tokens.extend(event.tokens.token_ids)
            answer.times.append(time.perf_counter())
        elif event.HasField("finished"):
            answer.bytes = event.finished.handoff.bytes
            answer.read_seconds = event.finished.handoff.read_time.ToTimedelta().total_seconds()
    return answer


class Prompts:
    """Prompts that were not seen before."""

    def __init__(self, vocabulary: int) -> None:
        self._draw, self._vocabulary = random.Random(1), vocabulary

    def __call__(self, length: int) -> list[int]:
        return [self._draw.randrange(8, self._vocabulary) for _ in range(length)]


async def compare(
    clients: dict[str, Client], prompts: Prompts, length: int, rounds: int
) -> dict[str, object]:
    """Both ways in turn, each with prompts of its own; the first round is not counted."""
    found: dict[str, list[Answer]] = {name: [] for name in clients}
    for turn in range(rounds + 1):
        for name, client in clients.items():
            answer = await ask(client, prompts(length))
            if turn:
                found[name].append(answer)
    figures: dict[str, object] = {}
    for name, answers in found.items():
        figures[f"{length} tokens ttft {name} ms"] = statistics.median(answer.ttft_ms for answer in answers)
        figures[f"{length} tokens between tokens {name} ms"] = statistics.median(
            gap for answer in answers for gap in answer.gaps_ms
        )
    added = [one.ttft_ms - other.ttft_ms for one, other in zip(*found.values(), strict=True)]
    figures[f"{length} tokens ttft added ms"] = statistics.median(added)
    pulls = found["split"]
    assert all(answer.bytes for answer in pulls), "a prompt was not handed off"
    assert not any(answer.bytes for answer in found["whole"]), "a prompt was handed off"
    seconds = statistics.median(answer.read_seconds for answer in pulls)
    figures[f"{length} tokens reads ms"] = seconds * 1e3
    figures[f"{length} tokens GB_per_s"] = pulls[0].bytes / seconds / 1e9
    return figures


async def equal_tokens(clients: dict[str, Client], prompts: Prompts, length: int) -> dict[str, object]:
    """The same prompts both ways: handed off first, then computed anew by the decode worker, which takes nothing of a prompt from
    its cache whose log-probabilities are wanted."""
    same = total = 0
    for _ in range(8):
        prompt = prompts(length)
        one = await ask(clients["split"], prompt)
        two = await ask(clients["whole"], prompt, scored=True)
        same += sum(a == b for a, b in zip(one.tokens, two.tokens, strict=True))
        total += len(one.tokens)
    return {"tokens equal": same, "tokens compared": total}


async def interference(clients: dict[str, Client], prompts: Prompts, length: int) -> dict[str, object]:
    """Gaps between the tokens of eight running answers while prompts arrive, both ways."""
    figures: dict[str, object] = {}
    for name, client in clients.items():
        running = [asyncio.ensure_future(ask(client, prompts(512), 256)) for _ in range(8)]
        await asyncio.sleep(0)
        arrivals = []
        for _ in range(4):
            arrivals.append(await ask(client, prompts(length), 2))
        gaps = [gap for answer in await asyncio.gather(*running) for gap in answer.gaps_ms]
        figures[f"between tokens beside {length} tokens {name} p50 ms"] = percentile(gaps, 0.5)
        figures[f"between tokens beside {length} tokens {name} p99 ms"] = percentile(gaps, 0.99)
    return figures


async def measure(options: object, model: Path, directory: Path) -> dict[str, object]:
    """Starts everything, measures, stops everything."""
    device, lengths = options.device, [int(length) for length in options.lengths.split(",")]  # type: ignore[attr-defined]
    gpu = device.startswith("cuda")
    settings = {
        "model.path": str(model),
        "model.dtype": "bfloat16" if gpu else "float32",
        "model.max_context_tokens": max(lengths) + 512,
        "kv.block_tokens": 64,
        "kv.num_blocks": 4 * (max(lengths) // 64 + 16),
        "scheduler.max_chunk_tokens": 2048,
        "scheduler.max_batched_tokens": 2304,
        "scheduler.max_num_seqs": 64,
        "worker.device": device,
        "transfer.ucx_tls": "tcp,sm,self,cuda_copy,cuda_ipc" if gpu else "tcp,sm,self",
        "transfer.poll_microseconds": 20 if gpu else 150,
    }
    processes = Processes(directory, settings)
    figures: dict[str, object] = {}
    try:
        began = time.perf_counter()
        for role in ("prefill", "decode"):
            processes.start(role, role, {"worker.name": role})
        for role in ("prefill", "decode"):
            await processes.record(role)
        figures["workers ready s"] = time.perf_counter() - began
        clients: dict[str, Client] = {}
        for name, own in ROUTERS.items():
            processes.start("router", name, {"router.name": name, **own})
            clients[name] = Client((await processes.router(name)).endpoint)
        vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
        prompts = Prompts(vocabulary)
        for client in clients.values():
            while not any(found.ready for found in await client.models()):  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.1)
        for length in lengths:
            figures |= await compare(clients, prompts, length, options.rounds)  # type: ignore[attr-defined]
            print(json.dumps(figures), file=sys.stderr, flush=True)
        figures |= await equal_tokens(clients, prompts, lengths[0])
        figures |= await interference(clients, prompts, lengths[-1])
        for client in clients.values():
            await client.close()
        return figures
    except BaseException:
        processes.tell()
        raise
    finally:
        processes.stop()


def main() -> None:
    options = arguments(
        __doc__ or "",
        ("--layers", {"type": int, "default": 27}),
        ("--device", {"default": "cuda:0"}),
        ("--lengths", {"default": "1024,8192,32768", "help": "tokens of a prompt, several by comma"}),
        ("--rounds", {"type": int, "default": 7}),
        ("--memory", {"default": "/dev/shm", "help": "where the checkpoint is written, and removed"}),
    )
    if options.quick:
        options.rounds = 3
    directory = Path(tempfile.mkdtemp(prefix="twinpool-split-", dir=options.memory))
    try:
        began = time.perf_counter()
        size = write_model(directory / "model", options.layers, options.device)
        figures: dict[str, object] = {"model GB": size / 1e9, "model written s": time.perf_counter() - began}
        figures |= asyncio.run(measure(options, directory / "model", directory))
        figures["run_seconds"] = time.perf_counter() - began
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    ratios: Figures = {}
    report("splitting on one GPU costs the hand-off and little else", figures, ratios, as_json=options.json)


if __name__ == "__main__":
    main()
