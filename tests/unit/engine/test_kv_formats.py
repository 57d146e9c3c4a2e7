# SPDX-License-Identifier: Apache-2.0
"""The packed form of cache rows: its size, its error, its edges, and attention over it against float64."""

from pathlib import Path

import numpy as np
import pytest
import torch
from attention_cases import Case, make_case, relative_error, solve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinpool.engine.config import ModelConfig
from twinpool.engine.fingerprint import fingerprint
from twinpool.engine.kernels import FP8_LATENT, REGISTRY, Capability, Kernels
from twinpool.engine.kv.formats import FP8_MAX, GROUP, Fp8LatentRows, PlainRows
from twinpool.engine.kv.pool import KVPool
from twinpool.engine.loader import load_model
from twinpool.engine.local import LocalEngine
from twinpool.engine.models.base import KVLayout
from twinpool.engine.sampling import DrawParams
from twinpool.engine.tiny import write_tiny

V3 = Fp8LatentRows(512, 64)
# float8 e4m3 has 3 bits of mantissa: a value is off by at most 1/16 of itself, and below the normal range by 1/2 of its
# last place, 2**-10 of the scale.
HALF_STEP = 1 / 16
SMALLEST_STEP = 2.0**-10


def error_bound(rows: Tensor, form: Fp8LatentRows) -> Tensor:
    """The largest error that rounding may make, value by value."""
    bound = torch.empty_like(rows)
    for first in range(0, form.latent_dim, GROUP):
        part = rows[:, first : min(first + GROUP, form.latent_dim)].abs()
        scale = part.amax(-1, keepdim=True) / FP8_MAX
        bound[:, first : first + part.shape[1]] = torch.maximum(part * HALF_STEP, scale * SMALLEST_STEP)
    bound[:, form.latent_dim :] = rows[:, form.latent_dim :].abs() * 2.0**-8
    return bound * 1.001


def test_a_row_of_deepseek_v3_takes_656_bytes() -> None:
    layout = KVLayout.of(ModelConfig.from_dict({"model_type": "deepseek_v3"}))
    rows = layout.rows(torch.bfloat16, "fp8_latent")
    assert rows == V3
    assert (rows.row_bytes, rows.columns, rows.dtype) == (656, 656, torch.uint8)
    assert layout.bytes_per_token(torch.bfloat16, "fp8_latent") == 61 * 656
    assert layout.rows(torch.bfloat16) == PlainRows(576, torch.bfloat16)
    assert layout.bytes_per_token(torch.bfloat16) == 70_272
    assert Fp8LatentRows.of_bytes(656, 512) == V3


@pytest.mark.parametrize(("row_bytes", "latent"), [(655, 512), (527, 512)])
def test_bytes_that_are_no_row_are_refused(row_bytes: int, latent: int) -> None:
    with pytest.raises(ValueError, match=f"{row_bytes} bytes has a latent of {latent}"):
        Fp8LatentRows.of_bytes(row_bytes, latent)


@settings(deadline=None, max_examples=60)
@given(
    latent=st.sampled_from([1, 32, 127, 128, 129, 300, 512]),
    rope=st.sampled_from([1, 2, 64]),
    size=st.sampled_from([1e-30, 1e-4, 1.0, 500.0, 1e30]),
    seed=st.integers(0, 1000),
)
def test_every_value_comes_back_within_its_rounding(latent: int, rope: int, size: float, seed: int) -> None:
    form = Fp8LatentRows(latent, rope)
    rows = torch.randn(9, latent + rope, generator=torch.Generator().manual_seed(seed)) * size
    rows[3] = 0.0
    packed = form.pack(rows)
    assert packed.shape == (9, form.row_bytes)
    assert packed.dtype == torch.uint8
    found = form.unpack(packed, torch.float32)
    assert ((found - rows).abs() <= error_bound(rows, form)).all()
    assert found[3].eq(0).all()
    # What was rounded once stays as it is: a moved, evicted or copied row does not drift.
    assert torch.equal(form.unpack(form.pack(found), torch.float32), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rows_of_every_type_are_packed_and_unpacked(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 576).to(dtype)
    found = V3.unpack(V3.pack(rows), dtype)
    assert found.dtype == dtype
    assert float((found - rows).norm() / rows.norm()) < 0.03


def test_poison_and_what_is_not_finite_stay_visible() -> None:
    pool = KVPool(2, 1, 4, V3.columns, V3.dtype)
    pool.poison([1])
    assert V3.unpack(pool.layer(0)[1], torch.float32).isnan().all()
    rows = torch.zeros(2, 576)
    rows[0, 5], rows[1, 200] = float("nan"), float("inf")
    found = V3.unpack(V3.pack(rows), torch.float32)
    assert found[0, :GROUP].isnan().any()
    assert not found[1, GROUP : 2 * GROUP].isfinite().all()
    assert found[:, 2 * GROUP :].eq(0).all(), "a group does not harm the next one"


def test_a_pool_of_packed_rows_is_block_major_bytes() -> None:
    pool = KVPool(3, 61, 64, V3.columns, V3.dtype)
    assert pool.block_bytes == 61 * 64 * 656
    assert pool.kv_bytes_per_token == 61 * 656


# --- attention

KERNELS = Kernels.select(REGISTRY, Capability("cpu"), torch.float32, layout=FP8_LATENT)
SHAPES = [(1, 1), (1, 63), (1, 64), (1, 65), (1, 700), (9, 9), (33, 130), (5, 3), (4, 0)]
DECODES = 5


def packed_pages(case: Case, form: Fp8LatentRows) -> Tensor:
    """The case's pages in packed form, poisoned where they are."""
    blocks, tokens, width = case.pages.shape
    return form.pack(case.pages.reshape(-1, width)).view(blocks, tokens, form.row_bytes)


def v3_case(dtype: torch.dtype = torch.float32) -> Case:
    return make_case(
        SHAPES, heads=16, query_dim=576, width=576, block_tokens=64, decodes=DECODES, dtype=dtype
    )


def test_attention_equals_attention_over_the_rounded_rows() -> None:
    """Nothing but the rounding of rows stands between the two: masks, poison and empty contexts are as ever."""
    case = v3_case()
    found = KERNELS.mla_paged_attention(
        case.query, packed_pages(case, V3), case.batch, latent_dim=512, scale=0.04, with_lse=True
    )
    rounded = [V3.unpack(V3.pack(rows), torch.float32) for rows in case.rows]
    keys = [rows[:, None, :].expand(-1, 16, -1) for rows in rounded]
    output, lse = solve(case, keys, [key[..., :512] for key in keys], 0.04)
    assert relative_error(found.output, output) < 1e-4
    torch.testing.assert_close(found.lse.double(), lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 0.05), (torch.bfloat16, 0.06)])
def test_attention_is_near_that_over_exact_rows(dtype: torch.dtype, bound: float) -> None:
    """DeepSeek-V3's dimensions, a normed latent, against float64 over what was there before rounding."""
    case = v3_case(dtype)
    found = KERNELS.mla_paged_attention(
        case.query, packed_pages(case, V3), case.batch, latent_dim=512, scale=0.04
    )
    keys = [rows[:, None, :].expand(-1, 16, -1) for rows in case.rows]
    output, _ = solve(case, keys, [key[..., :512] for key in keys], 0.04)
    difference = found.output.double() - output
    assert float(difference.norm() / output.norm()) < bound


def test_expanded_and_plain_forms_read_the_same_rows() -> None:
    form = Fp8LatentRows(24, 24)
    case = make_case([(7, 7), (5, 21)], heads=4, query_dim=12, width=48, decodes=0)
    pages = packed_pages(case, form)
    plain = KERNELS.gqa_paged_attention(case.query, pages, case.batch, kv_heads=2, scale=0.3)
    rounded = [form.unpack(form.pack(rows), torch.float32) for rows in case.rows]
    keys = [rows[:, 24:].view(-1, 2, 12).repeat_interleave(2, 1) for rows in rounded]
    values = [rows[:, :24].view(-1, 2, 12).repeat_interleave(2, 1) for rows in rounded]
    assert relative_error(plain.output, solve(case, keys, values, 0.3)[0]) < 1e-5
    up_keys, up_values = torch.randn(4, 8, 24), torch.randn(4, 6, 24)
    query = torch.randn(len(case.query), 4, 8 + 24)
    case.query = query
    found = KERNELS.mla_expanded_attention(
        query, pages, case.batch, expand_keys=up_keys, expand_values=up_values, scale=0.1
    )
    wide = [
        torch.cat(
            (torch.einsum("kl,hnl->khn", rows[:, :24], up_keys), rows[:, None, 24:].expand(-1, 4, -1)), -1
        )
        for rows in rounded
    ]
    tall = [torch.einsum("kl,hvl->khv", rows[:, :24], up_values) for rows in rounded]
    assert relative_error(found.output, solve(case, wide, tall, 0.1)[0]) < 1e-4


# --- a model


def engine(path: Path, kv_dtype: str) -> LocalEngine:
    model = load_model(path, kv_dtype=kv_dtype)  # type: ignore[arg-type]
    return LocalEngine(model, num_blocks=32, block_tokens=16, poison_freed=True, validate=True)


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_a_model_over_packed_rows_stays_near_itself(family: str, tmp_path: Path) -> None:
    """The likeliest token's log-probability after a long prompt, with the prompt in chunks and all at once."""
    path = write_tiny(tmp_path / family, family, seed=3)  # type: ignore[arg-type]
    prompt = np.random.default_rng(5).integers(8, 500, 120).tolist()
    params = DrawParams(temperature=0.0, max_tokens=1, logprobs=20)
    (exact,), (packed,) = (
        engine(path, kind).generate([prompt], params)[0] for kind in ("auto", "fp8_latent")
    )
    before, after = exact.logprobs[0], packed.logprobs[0]
    there = dict(zip(after.top_ids.tolist(), after.top_logprobs.tolist(), strict=True))
    known = [
        (value, there[token])
        for token, value in zip(before.top_ids.tolist(), before.top_logprobs.tolist(), strict=True)
        if token in there
    ]
    assert len(known) >= 10, "other tokens than the exact model's came first"
    assert max(abs(a - b) for a, b in known) < 1.0


def test_the_form_of_rows_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "deepseek_v3", layers=1)
    plain, packed = (
        fingerprint(path, dtype=torch.float32, block_tokens=16, kv_dtype=kind)  # type: ignore[arg-type]
        for kind in ("auto", "fp8_latent")
    )
    assert str(plain) != str(packed)
    assert [line.split(":")[0] for line in plain.differences(packed)] == ["layout"]
