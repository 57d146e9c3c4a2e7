# SPDX-License-Identifier: Apache-2.0
"""Layers of a decode step of one to four tokens, DeepSeek-V2-Lite's shape, on one GPU: launches and tiles compared.

``python -m bench.gpu.small --out DIR``. ``present`` runs the layers as the model does; the other variants are
``small[:NAME=VALUE:...]`` with fields of ``SmallTiles``, and ``hybrid[:TILES]``, attention so and experts as at present, with
other tiles. Every layer has weights of its own, contexts are 4,096 tokens
in random pages, and a time is that of a CUDA graph of eight layers, divided by them.
"""

import sys
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

from bench.gpu.v2_lite_step import BLOCK, build, make_pool
from bench.gpu.variants import main, median_us
from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kernels import triton_moe, triton_small_launch
from twinpool.engine.kernels.operations import ExpertWeights
from twinpool.engine.kernels.triton_small_launch import SmallAttention, SmallTiles
from twinpool.engine.kv.pool import KVPool
from twinpool.engine.models.decoder import DecoderLayer, PagedDecoder
from twinpool.engine.models.mla import MlaAttention
from twinpool.engine.models.moe import MoeMlp

LAYERS, CONTEXT, READ = 8, 4096, 4597e9
VARIANTS = ",".join([
    "present", "small", "small:up_stages=4:down_stages=4", "small:up_columns=16:up_stages=4",
    "small:up_columns=32:up_step=256", "small:up_columns=64:up_stages=2", "small:down_columns=32", "small:down_columns=32:down_step=256",
    "small:down_columns=128:down_stages=2", "small:up_warps=8:down_warps=8", "small:splits=64:tile=64:rows=8:warps=4",
    "hybrid", "hybrid:32.128.4.4.64.128.4.4", "hybrid:32.256.3.4.64.128.4.4", "hybrid:16.256.4.4.32.128.5.4",
])  # fmt: skip


class Stack:
    """The layers of a model but for its first, dense one; a pool; and a batch of ``tokens`` sequences."""

    def __init__(self, tokens: int) -> None:
        model, self.pool = _model()
        self.model = model
        self.layers: list[DecoderLayer] = [layer for layer in model.layers if isinstance(layer.mlp, MoeMlp)]  # type: ignore[misc]
        width = CONTEXT // BLOCK + 1
        table = np.random.default_rng(tokens).permutation(self.pool.num_blocks)[: tokens * width]
        table = table.reshape(tokens, width).astype(np.int32)
        context = np.full(tokens, CONTEXT + 1, np.int32)
        context[1:] -= 17 * np.arange(tokens - 1, dtype=np.int32)
        slots = (
            table[np.arange(tokens), (context - 1) // BLOCK].astype(np.int64) * BLOCK + (context - 1) % BLOCK
        )
        self.batch = AttentionBatch.build(
            q_start=np.arange(tokens + 1, dtype=np.int32), context=context, block_table=table, slots=slots,
            block_tokens=BLOCK, num_decodes=tokens, device="cuda",
        )  # fmt: skip
        self.rotary = model.rotary.tables(self.batch.context.long() - 1, torch.bfloat16)
        self.hidden = torch.randn(tokens, 2048, device="cuda").to(torch.bfloat16)
        self.delta = torch.randn(tokens, 8, 2048, device="cuda").to(torch.bfloat16)

    def run(self, name: str, index: int, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        layer, pages = self.layers[index], self.pool.tensor[:, index + 1]
        if name == "present":
            return layer(hidden, delta, self.rotary, pages, self.batch, None)  # type: ignore[no-any-return]
        kind, _, fields = name.partition(":")
        tiles = tiles_of(fields) if kind == "small" else SmallTiles()
        own, mixture = layer.attention, layer.mlp
        assert isinstance(own, MlaAttention)
        assert isinstance(mixture, MoeMlp)
        assert mixture.shared is not None
        operands = SmallAttention(
            layer.input_norm.weight, layer.input_norm.eps, own.down.weight, own.kv_norm.weight, own.kv_norm.eps,
            own.kv_up, own.output.weight, own.config.qk_nope_head_dim, own.config.qk_rope_head_dim, own.scale,
        )  # fmt: skip
        hidden, attended = triton_small_launch.attention(
            hidden, delta, operands, self.rotary.cos, self.rotary.sin, pages, self.batch, tiles
        )
        if kind == "hybrid":
            hidden, normed = layer.kernels.add_norm(
                hidden, attended, layer.mlp_norm.weight, layer.mlp_norm.eps
            )
            return hidden, mixture(normed)
        weights = ExpertWeights(
            mixture.experts.gate_up, mixture.experts.down, mixture.shared.gate_up.weight, mixture.shared.down.weight
        )  # fmt: skip
        return triton_small_launch.experts(
            hidden, attended, layer.mlp_norm.weight, layer.mlp_norm.eps, mixture.router.weight, mixture.router.spec,
            weights, tiles,
        )  # fmt: skip

    @torch.inference_mode()
    def whole(self, name: str) -> Tensor:
        hidden, delta = self.hidden, self.delta
        for index in range(len(self.layers)):
            hidden, delta = self.run(name, index, hidden, delta)
        return hidden


def tiles_of(text: str) -> SmallTiles:
    fields = (field.split("=") for field in text.split(":") if field)
    return SmallTiles(**{key: int(value) for key, value in fields})


DEFAULT = dict(triton_moe.TILES)


def tokens_of(name: str) -> tuple[int, ...]:
    return (1,) if name.startswith("small") else (1, 2, 4)


def set_tiles(name: str) -> None:
    """The tiles of the present grouped products that a variant ``hybrid:A.B.C.D.E.F.G.H`` asks for."""
    kind, _, text = name.partition(":")
    if kind == "hybrid" and text:
        sizes = [int(size) for size in text.split(".")]
        triton_moe.TILES[16] = triton_moe.Tile(*sizes[:4]), triton_moe.Tile(*sizes[4:])


@cache
def _model() -> tuple[PagedDecoder, KVPool]:
    model = build(LAYERS + 1, None)
    return model, make_pool(model, 4 * (CONTEXT // BLOCK + 1))


def _error(found: Tensor, expected: Tensor) -> float:
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@torch.inference_mode()
def check(name: str) -> Iterator[dict[str, object]]:
    """Each layer from the same state as the present one; near-ties of the router may fall either way in one of them."""
    for tokens in tokens_of(name):
        stack = Stack(tokens)
        triton_moe.TILES = dict(DEFAULT)
        hidden, delta = stack.hidden, stack.delta
        errors, stored = [], []
        for index in range(LAYERS):
            pages = stack.pool.tensor[:, index + 1]
            place = stack.batch.slots // BLOCK, stack.batch.slots % BLOCK
            total, parts = stack.run("present", index, hidden, delta)
            expected, kept = total.float() + parts.float().sum(1), pages[place].clone()
            pages[place] = float("nan")
            # What is not written must show.
            torch.full((50_000_000,), float("nan"), device="cuda")
            set_tiles(name)
            sums, adds = stack.run(name, index, hidden, delta)
            errors.append(_error(sums.float() + adds.float().sum(1), expected))
            stored.append(_error(pages[place], kept))
            hidden, delta = total, parts
        wrong = sum(error > 3e-2 for error in errors)
        ok = sorted(errors)[LAYERS // 2] <= 1e-2 and wrong <= 1 and max(stored) <= 1e-2
        yield {
            "tokens": tokens,
            "error": max(errors),
            "median": sorted(errors)[LAYERS // 2],
            "stored": max(stored),
            "ok": ok,
        }


def times(name: str) -> Iterator[dict[str, object]]:
    set_tiles(name)
    for tokens in tokens_of(name):
        stack = Stack(tokens)
        spent = median_us(lambda: stack.whole(name), calls=1) / LAYERS  # noqa: B023
        experts = 64 * (1 - (58 / 64) ** tokens) + 2
        floor = (experts * 17.3e6 + 23.3e6 + 0.5e6 + tokens * CONTEXT * 1152) / READ * 1e6
        row: dict[str, object] = {
            "tokens": tokens,
            "us_per_layer": round(spent, 2),
            "floor_us": round(floor, 1),
        }
        if tokens == 1:
            row["kernels"] = kernels_of(stack, name)
        yield row


def kernels_of(stack: Stack, name: str) -> dict[str, float]:
    """Microseconds a layer of each kernel, waits for the one before included."""
    from torch.profiler import ProfilerActivity, profile

    stack.whole(name)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as taken:
        for _ in range(3):
            stack.whole(name)
        torch.cuda.synchronize()
    rows = {event.key[:40]: event.self_device_time_total / 3 / LAYERS for event in taken.key_averages()}
    return {key: round(value, 2) for key, value in sorted(rows.items(), key=lambda row: -row[1])[:14]}


if __name__ == "__main__":
    sys.exit(main("bench.gpu.small", VARIANTS, check, times))
