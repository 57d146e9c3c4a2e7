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
import shutil
import sys
import tempfile
import time
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench._common import Figures, arguments, percentile, report
from bench._split import Processes, Prompts, ask, compare, start_clients
from bench.gpu.v2_lite_shape import CONFIG
from twinpool.client import Client
from twinpool.engine.checkpoint import INDEX_FILE
from twinpool.engine.config import ModelConfig
from twinpool.engine.kernels import REGISTRY, Capability, Kernels
from twinpool.engine.models.decoder import PagedDecoder
from twinpool.engine.tiny import tiny_config
from twinpool.engine.tiny_tokenizer import write_tokenizer

SHARD_BYTES = 2 << 30

LEARNED_IDS = 384
"""Of the tokenizer's ids, those that it makes itself."""


def write_large_tokenizer(path: Path, vocabulary: int, longest: int) -> None:
    """A tokenizer of so many ids, most of which no text has. As plain words: preparing grammars takes time that grows with the square
    of the special tokens, 90 s for 102,400."""
    small = min(LEARNED_IDS, vocabulary)
    write_tokenizer(path, small, longest)
    file = path / "tokenizer.json"
    whole = json.loads(file.read_text())
    whole["model"]["vocab"] |= {f"word{number}": number for number in range(small, vocabulary)}
    file.write_text(json.dumps(whole))


def write_model(path: Path, layers: int, device: str) -> int:
    """Norms 1, the rest N(0, 0.02), a seed for each tensor. Returns its bytes."""
    path.mkdir(parents=True)
    shape = CONFIG if device != "cpu" else tiny_config("deepseek_v3", max_context=8192)
    raw = shape | {"num_hidden_layers": layers, "bos_token_id": 0, "eos_token_id": 1}
    (path / "config.json").write_text(json.dumps(raw))
    write_large_tokenizer(path, int(raw["vocab_size"]), int(raw["max_position_embeddings"]))
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
        clients = await start_clients(processes)
        figures["ready s"] = time.perf_counter() - began
        prompts = Prompts(int(json.loads((model / "config.json").read_text())["vocab_size"]))
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
