# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention, latent attention over packed rows, products with and experts of float8 weights on one GPU.

``python -m bench.gpu.others --out DIR``. Each is compared with its torch twin in float32 on ragged batches over a pool
of NaN, then timed at one or two shapes: Llama-3-8B's heads (32 over 8, of 128), DeepSeek's packed rows, a 7168 x 2048
weight, 64 experts of DeepSeek-V3's size. A time is the median over replays of a CUDA graph of three calls.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.gpu.mla_cases import LATENT, PAGE, READ_BYTES_PER_SECOND, SCALE, WIDTH, error_of, make_poisoned
from bench.gpu.variants import median_us
from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kernels import (
    torch_backend,
    torch_fp8,
    torch_fp8_moe,
    torch_fused,
    triton_fp8_launch,
    triton_fp8_linear,
    triton_fp8_moe,
    triton_gqa_launch,
)
from twinpool.engine.kernels.operations import Fp8ExpertWeights, Fp8Weight, Routing
from twinpool.engine.kv.formats import Fp8LatentRows

HEADS, KV_HEADS, DIM = 32, 8, 128
Row = dict[str, object]
CASES = {
    "decodes": ([(1, n) for n in (1, 63, 64, 65, 700, 0, 2000)], 7),
    "speculation": ([(1, 200), (4, 300), (2, 65), (3, 64), (4, 2)], 1),
    "chunks": ([(1, 30), (300, 301), (65, 1000), (5, 3), (129, 129)], 1),
}


def make_batch(shapes: list[tuple[int, int]], decodes: int, blocks: int) -> AttentionBatch:
    counts = [-(-context // PAGE) for _, context in shapes]
    order = np.random.default_rng(1).permutation(blocks)
    table = np.full((len(shapes), max(counts) + 1), -1, np.int32)
    used = 0
    for index, count in enumerate(counts):
        table[index, :count] = order[used : used + count]
        used += count
    q_start = np.cumsum([0] + [count for count, _ in shapes]).astype(np.int32)
    return AttentionBatch.build(
        q_start=q_start, context=np.array([context for _, context in shapes], np.int32), block_table=table,
        slots=np.zeros(int(q_start[-1]), np.int64), block_tokens=PAGE, num_decodes=decodes, device="cuda",
    )  # fmt: skip


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def gqa() -> Iterator[Row]:
    width = 2 * KV_HEADS * DIM
    for name, (shapes, decodes) in CASES.items():
        blocks = sum(-(-context // PAGE) for _, context in shapes) + 3
        batch, pages = (
            make_batch(shapes, decodes, blocks),
            torch.full((blocks, 2, PAGE, width), float("nan"), device="cuda"),
        )
        for index, (_, context) in enumerate(shapes):
            for part in range(-(-context // PAGE)):
                size = min(PAGE, context - part * PAGE)
                pages[int(batch.host_block_table[index, part]), 1, :size] = torch.randn(
                    size, width, device="cuda"
                )
        narrow, query = pages.to(torch.bfloat16)[:, 1], normal(batch.num_tokens, HEADS, DIM)
        torch.full((20_000_000,), float("nan"), device="cuda")
        found = triton_gqa_launch.gqa_paged_attention(
            query, narrow, batch, kv_heads=KV_HEADS, scale=0.09, with_lse=True
        )
        expected = torch_backend.gqa_paged_attention(
            query.float(), narrow.float(), batch, kv_heads=KV_HEADS, scale=0.09, with_lse=True
        )
        error = error_of(found.output, expected.output)
        yield {
            "check": f"gqa {name}",
            "error": error,
            "ok": error <= 6e-3 and lse_near(found.lse, expected.lse),
        }
    for shapes, decodes in (([(1, 8192)] * 16, 16), ([(1, 8192)] * 64, 64), ([(8192, 8192)], 0)):
        blocks = sum(context // PAGE for _, context in shapes)
        batch, pages = make_batch(shapes, decodes, blocks), normal(blocks, PAGE, width)
        query = normal(batch.num_tokens, HEADS, DIM)
        spent = median_us(
            lambda: triton_gqa_launch.gqa_paged_attention(query, pages, batch, kv_heads=KV_HEADS, scale=0.09)  # noqa: B023
        )
        row: Row = {"time": f"gqa {len(shapes)} x {shapes[0]}", "us": round(spent, 1)}
        if decodes:
            row["over_floor"] = round(spent / (pages.numel() * 2 / READ_BYTES_PER_SECOND * 1e6), 2)
        else:
            row["tflop_s"] = round(4 * HEADS * DIM * 8192 * 8193 / 2 / spent / 1e6, 1)
        yield row


def lse_near(found: Tensor | None, expected: Tensor | None) -> bool:
    assert found is not None
    assert expected is not None
    return bool(torch.allclose(found, expected, rtol=1e-2, atol=1e-2))


def packed() -> Iterator[Row]:
    form = Fp8LatentRows(LATENT, WIDTH - LATENT)
    for heads in (16, 128):
        for name, (shapes, decodes) in CASES.items():
            problem = make_poisoned(shapes, heads, torch.bfloat16, decodes=decodes, seed=4)
            blocks = len(problem.pages)
            pages = form.pack(problem.pages.reshape(-1, WIDTH)).view(blocks, PAGE, form.row_bytes)
            torch.full((50_000_000,), float("nan"), device="cuda")
            found = triton_fp8_launch.mla_paged_attention(
                problem.query, pages, problem.batch, latent_dim=LATENT, scale=SCALE, with_lse=True
            )
            expected = torch_fp8.mla_paged_attention(
                problem.query.float(), pages, problem.batch, latent_dim=LATENT, scale=SCALE, with_lse=True
            )
            error = error_of(found.output, expected.output)
            ok = error <= 6e-3 and lse_near(found.lse, expected.lse)
            yield {"check": f"packed {heads} {name}", "error": error, "ok": ok}
        shapes = [(1, 8192)] * 64
        batch = make_batch(shapes, 64, 64 * 128)
        pages = torch.cat([form.pack(normal(PAGE * 512, WIDTH)) for _ in range(16)]).view(
            -1, PAGE, form.row_bytes
        )
        query = normal(64, heads, WIDTH)
        spent = median_us(
            lambda: triton_fp8_launch.mla_paged_attention(query, pages, batch, latent_dim=LATENT, scale=SCALE)  # noqa: B023
        )
        floor = pages.numel() / READ_BYTES_PER_SECOND * 1e6
        yield {
            "time": f"packed {heads} 64 x 8k",
            "us": round(spent, 1),
            "over_floor": round(spent / floor, 2),
        }


def linear() -> Iterator[Row]:
    outputs, size = 2048, 7168
    codes = (torch.randn(outputs, size, device="cuda") * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(outputs // 128, size // 128, device="cuda") * 1e-3
    for rows, limit in ((1, 6e-3), (16, 6e-3), (63, 6e-3), (64, 6e-2), (1000, 6e-2)):
        hidden = normal(rows, size)
        torch.full((20_000_000,), float("nan"), device="cuda")
        found = triton_fp8_linear.fp8_linear(hidden, codes, scales)
        error = error_of(found, torch_fused.fp8_linear(hidden.float(), codes, scales))
        spent = median_us(lambda: triton_fp8_linear.fp8_linear(hidden, codes, scales))  # noqa: B023
        yield {
            "check": f"float8 weights, {rows} rows", "error": error, "ok": error <= limit, "us": round(spent, 1),
            "gb_s": round(codes.numel() / spent / 1e3), "tflop_s": round(2 * rows * codes.numel() / spent / 1e6, 1),
        }  # fmt: skip


def random_weight(*lead: int, parts: int, rows: int, columns: int) -> Fp8Weight:
    bits = torch.randint(0, 127, (*lead, parts * rows, columns), dtype=torch.uint8, device="cuda")
    bits |= torch.randint(0, 2, bits.shape, dtype=torch.uint8, device="cuda") << 7
    blocks = (*lead, parts * (rows // 128), columns // 128)
    return Fp8Weight(bits.view(torch.float8_e4m3fn), torch.rand(blocks, device="cuda") * 1e-4)


def experts() -> Iterator[Row]:
    """64 routed experts of which each token has 8, and a shared one: few rows an expert, then many."""
    number, chosen, size, width = 64, 8, 7168, 2048
    weights = Fp8ExpertWeights(
        random_weight(number, parts=2, rows=width, columns=size),
        random_weight(number, parts=1, rows=size, columns=width),
        random_weight(parts=2, rows=width, columns=size),
        random_weight(parts=1, rows=size, columns=width),
    )
    for tokens, limit in ((1, 6e-3), (16, 6e-3), (128, 6e-3), (500, 6e-3), (512, 8e-2), (4096, 8e-2)):
        hidden = normal(tokens, size)
        shares, picked = torch.rand(tokens, number, device="cuda").topk(chosen)
        routing = Routing(shares, picked.to(torch.int32))
        torch.full((200_000_000,), float("nan"), device="cuda")
        found = triton_fp8_moe.fp8_moe(hidden, routing, weights).float().sum(1)
        expected = torch_fp8_moe.fp8_moe(hidden.float(), Routing(shares, picked), weights)
        error = error_of(found, expected)
        spent = median_us(lambda: triton_fp8_moe.fp8_moe(hidden, routing, weights))  # noqa: B023
        hit = len(picked.unique()) + 1
        yield {
            "check": f"float8 experts, {tokens} tokens", "error": error, "ok": error <= limit, "us": round(spent, 1),
            "gb_s": round(hit * 3 * size * width / spent / 1e3),
            "tflop_s": round(6 * tokens * (chosen + 1) * size * width / spent / 1e6, 1),
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT", ""))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    parts: list[Callable[[], Iterator[Row]]] = [gqa, packed, linear, experts]
    rows: list[Row] = []
    for part in parts:
        try:
            for row in part():
                rows.append(row)
                print(row, flush=True)
        except (RuntimeError, ValueError, TypeError):
            rows.append({"check": part.__name__, "ok": False, "fault": traceback.format_exc()[-800:]})
            print(rows[-1], flush=True)
        report = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        if arguments.out:
            Path(arguments.out, "others.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row.get("ok", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
