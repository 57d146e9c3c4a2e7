# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts of DeepSeek-V2-Lite's shape for many tokens, on one GPU: tiles compared.

``python -m bench.gpu.moe --out DIR``. ``few`` is the operation as it serves decodes; ``large:ROWS:COLUMNS:STEP:STAGES:
WARPS:COLUMNS:STEP:STAGES:WARPS`` the products over tiles in order, with these tiles for gate and up, and for down, and
the shared experts by the library. Random tokens choose random experts. TFLOP/s count what the tokens' experts need.
"""

import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.variants import main, median_us
from twinpool.engine.kernels import torch_fused, triton_moe, triton_moe_large
from twinpool.engine.kernels.operations import ExpertWeights, Routing

SIZE, WIDTH, EXPERTS, CHOSEN, SHARED = 2048, 1408, 64, 6, 2
TOKENS = (8192, 2048, 512, 320, 128)
FIRST = ("128:64:64:4:8", "128:128:64:3:8", "128:128:64:4:8", "256:64:64:3:8")
SECOND = {"128": ("128:64:4:8", "256:64:3:8", "256:64:4:8"), "256": ("128:64:3:8",)}
VARIANTS = ",".join(
    ["few", "shared"]
    + [f"large:{first}:{second}" for first in FIRST for second in SECOND[first.split(":")[0]]]
    + ["large:64:128:64:4:4:128:64:4:4", "large:64:64:64:4:4:256:64:4:4"]
)


def make(tokens: int) -> tuple[Tensor, Routing, ExpertWeights]:
    generator = torch.Generator("cuda").manual_seed(tokens)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.empty(*shape, device="cuda", dtype=torch.bfloat16).normal_(std=std, generator=generator)

    experts = ExpertWeights(
        normal(EXPERTS, 2 * WIDTH, SIZE, std=0.02), normal(EXPERTS, SIZE, WIDTH, std=0.02),
        normal(2 * SHARED * WIDTH, SIZE, std=0.02), normal(SIZE, SHARED * WIDTH, std=0.02),
    )  # fmt: skip
    hidden = normal(tokens, SIZE, std=1.0)
    scores = torch.rand(tokens, EXPERTS, generator=generator, device="cuda")
    weights, chosen = scores.topk(CHOSEN, dim=-1, sorted=False)
    return hidden, Routing(weights / CHOSEN, chosen.to(torch.int32)), experts


def shared(hidden: Tensor, experts: ExpertWeights) -> Tensor:
    assert experts.shared_gate_up is not None
    assert experts.shared_down is not None
    both = F.linear(hidden, experts.shared_gate_up)
    gate, up = both.chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, experts.shared_down)


def run(name: str, hidden: Tensor, routing: Routing, experts: ExpertWeights) -> Tensor:
    """``[T, parts, size]``"""
    kind, *numbers = name.split(":")
    if kind == "few":
        return triton_moe.moe(hidden, routing, experts)
    if kind == "shared":
        return shared(hidden, experts)[:, None]
    rows, *sizes = map(int, numbers)
    tiles = triton_moe_large.LargeTile(*sizes[:4]), triton_moe_large.LargeTile(*sizes[4:])
    out = hidden.new_empty(len(hidden), CHOSEN + 1, SIZE)
    lists = triton_moe.lists_of(routing, EXPERTS)
    triton_moe_large.routed(
        hidden, experts.gate_up, experts.down, routing.weights, lists, out, tiles=tiles, rows=rows
    )
    out[:, CHOSEN] = shared(hidden, experts)
    return out


def check(name: str) -> Iterator[dict[str, object]]:
    for tokens in (1, 65, 320, 1000):
        hidden, routing, experts = make(tokens)
        expected = shared(hidden.float(), ExpertWeights(*(part.float() for part in _parts(experts))))
        if name != "shared":
            expected = torch_fused.moe(
                hidden.float(), routing, ExpertWeights(*(part.float() for part in _parts(experts)))
            )
        # What is not written must show.
        torch.full((200_000_000,), float("nan"), device="cuda")
        found = run(name, hidden, routing, experts).float().sum(1)
        error = float((found - expected).norm() / expected.norm())
        yield {"tokens": tokens, "error": error, "ok": error <= 1e-2}


def _parts(experts: ExpertWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert experts.shared_gate_up is not None
    assert experts.shared_down is not None
    return experts.gate_up, experts.down, experts.shared_gate_up, experts.shared_down


def times(name: str) -> Iterator[dict[str, object]]:
    for tokens in TOKENS:
        hidden, routing, experts = make(tokens)
        routing = Routing(routing.weights, routing.experts, triton_moe.lists_of(routing, EXPERTS))
        spent = median_us(lambda: run(name, hidden, routing, experts))  # noqa: B023
        number = SHARED if name == "shared" else CHOSEN + SHARED
        work = tokens * number * 6 * SIZE * WIDTH
        yield {"tokens": tokens, "us": round(spent, 1), "tflop_s": round(work / spent / 1e6, 1)}


if __name__ == "__main__":
    sys.exit(main("bench.gpu.moe", VARIANTS, check, times))
