# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with float8 weights loads whole, or the error names file, tensor, expected and found."""

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.engine.test_loader_checkpoint import edit
from twinpool.engine.checkpoint import INDEX_FILE, SINGLE_FILE
from twinpool.engine.config import ModelConfig
from twinpool.engine.float8_config import FLOAT8
from twinpool.engine.loader import load_model
from twinpool.engine.models.decoder import PagedDecoder
from twinpool.engine.tiny import tiny_config, write_tiny
from twinpool.errors import CheckpointError

WEIGHT = "model.layers.1.mlp.experts.2.up_proj.weight"
SCALE = f"{WEIGHT}_scale_inv"
WIDENED = "model.layers.0.self_attn.kv_b_proj.weight"
SHAPE = (48, 160)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("single"), "deepseek_v3", layers=2, hidden=160, float8=True)


@pytest.fixture
def single(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "model")


def configure(path: Path, value: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": value}))


def weights(path: Path, **kwargs: Any) -> dict[str, Tensor]:
    model = load_model(path, **kwargs)
    assert isinstance(model, PagedDecoder)
    return dict(model.named_parameters())


def code(value: int) -> Callable[[dict[str, Tensor]], object]:
    """Makes the last code of WEIGHT these bits."""
    return lambda tensors: tensors[WEIGHT].view(torch.uint8)[-1, -1].fill_(value)


def scale(value: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors[SCALE][-1, -1].fill_(value)


@pytest.mark.parametrize(
    ("change", "tensor", "message"),
    [
        (lambda t: t.pop(SCALE), SCALE, "missing"),
        (lambda t: t.pop(f"{WIDENED}_scale_inv"), f"{WIDENED}_scale_inv", "missing"),
        (lambda t: t.pop(WEIGHT), WEIGHT, "missing"),
        (lambda t: t.update({SCALE: torch.ones(1, 1)}), SCALE, r"has shape \[1, 1\], expected \[1, 2\]"),
        (lambda t: t.update({SCALE: torch.ones(2)}), SCALE, r"has shape \[2\], expected \[1, 2\]"),
        (lambda t: t.update({f"{WIDENED}_scale_inv": torch.ones(2, 1)}), f"{WIDENED}_scale_inv",
         r"has shape \[2, 1\], expected \[1, 1\]"),
        (lambda t: t.update({SCALE: torch.ones(1, 2, dtype=torch.float64)}), SCALE, "has dtype F64, expected one of BF16, F32"),
        (lambda t: t.update({SCALE: torch.ones(1, 2, dtype=torch.uint8)}), SCALE, "has dtype U8, expected one of BF16, F32"),
        (lambda t: t.update({WEIGHT: torch.ones(SHAPE, dtype=torch.bfloat16)}), WEIGHT,
         "has dtype BF16, expected F8_E4M3 by config.json's quantization_config"),
        (lambda t: t.update({WIDENED: t[WIDENED].float()}), WIDENED, "has dtype F32, expected F8_E4M3 by"),
        (lambda t: t.update({WEIGHT: torch.ones(SHAPE).to(torch.float8_e5m2)}), WEIGHT, "has dtype F8_E5M2, expected F8_E4M3"),
        (lambda t: t.update({WEIGHT: torch.ones(48, 150).to(torch.float8_e4m3fn)}), WEIGHT,
         r"has shape \[48, 150\], expected \[48, 160\]"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}), "lm_head.weight",
         "has dtype F8_E4M3, expected one of BF16, F16, F32"),
        (lambda t: t.update({"lm_head.weight_scale_inv": torch.ones(4, 2)}), "lm_head.weight_scale_inv", "not part of a"),
        (code(0x7F), WEIGHT, "holds codes that are not numbers"),
        (code(0xFF), WEIGHT, "holds codes that are not numbers"),
        (scale(float("nan")), SCALE, "holds scales that are not between 0 and"),
        (scale(float("inf")), SCALE, "holds scales that are not between 0 and"),
        (scale(-1e-3), SCALE, "holds scales that are not between 0 and"),
        (scale(1e36), SCALE, r"holds scales that are not between 0 and 7.6e\+35, as torch.float32 needs"),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_named(
    single: Path, change: Callable[[dict[str, Tensor]], object], tensor: str, message: str
) -> None:
    edit(single, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(single)
    assert caught.value.reason == "CHECKPOINT_INVALID"
    assert caught.value.metadata["tensor"] == tensor
    assert f"tensor {tensor}" in str(caught.value)


def test_headers_are_checked_before_any_value_is_read(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(single, lambda tensors: tensors.pop(SCALE))
    monkeypatch.setattr("twinpool.engine.checkpoint.Checkpoint.read", lambda _: pytest.fail("reads tensors"))
    with pytest.raises(CheckpointError, match="missing"):
        load_model(single)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"quant_method": "awq"}, r"quantization_config\.quant_method = 'awq': is not supported \(supported: fp8\)"),
        ({"quant_method": None}, r"quant_method = None: is required"),
        ({"fmt": "e5m2"}, r"fmt = 'e5m2': is not supported \(supported: e4m3\)"),
        ({"weight_block_size": [64, 128]}, r"weight_block_size = \[64, 128\]: is not supported \(supported: \[128, 128\]\)"),
        ({"weight_block_size": None}, "weight_block_size = None: is not supported"),
        ({"weight_block_size": "128"}, "weight_block_size = '128': is not supported"),
        ({"activation_scheme": "static"}, "activation_scheme = 'static': is not supported"),
        ({"activation_scheme": None}, "activation_scheme = None: is required"),
        ({"scale_fmt": "e4m3"}, r"scale_fmt = 'e4m3': is not supported \(supported: ue8m0\)"),
        ({"kv_cache_scheme": {"num_bits": 8}}, r"kv_cache_scheme = .*: is not supported"),
    ],
)  # fmt: skip
def test_other_forms_are_refused_by_config_json_alone(value: dict[str, object], message: str) -> None:
    raw = tiny_config("deepseek_v3", overrides={"quantization_config": FLOAT8 | value})
    with pytest.raises(CheckpointError, match=message) as caught:
        ModelConfig.from_dict(raw)
    assert caught.value.metadata["file"] == "config.json"


def test_what_later_models_and_transformers_add_changes_nothing(single: Path) -> None:
    more = {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"], "dequantize": False, "fmt": None}
    before = weights(single)
    configure(single, FLOAT8 | more)
    after = weights(single)
    assert all(torch.equal(after[name].float(), before[name].float()) for name in before)


def test_float8_tensors_without_a_word_in_config_json(single: Path) -> None:
    configure(single, None)
    with pytest.raises(CheckpointError, match=r"has dtype F8_E4M3 and config\.json no quantization_config"):
        load_model(single)


def test_codes_and_scales_may_lie_in_different_shards(pristine: Path, tmp_path: Path) -> None:
    """All scales in one file, which is read before the codes or after them."""
    one = weights(pristine)
    for number, name in enumerate(("a.safetensors", "z.safetensors")):
        path = shutil.copytree(pristine, tmp_path / str(number))
        tensors = load_file(path / SINGLE_FILE)
        (path / SINGLE_FILE).unlink()
        scales = {key: value for key, value in tensors.items() if key.endswith("_scale_inv")}
        rest = {key: value for key, value in tensors.items() if key not in scales}
        weight_map = dict.fromkeys(scales, name) | dict.fromkeys(rest, "m.safetensors")
        save_file(scales, path / name)
        save_file(rest, path / "m.safetensors")
        (path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
        many = weights(path)
        assert all(torch.equal(many[key].float(), one[key].float()) for key in one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_what_is_plain_or_widened_takes_the_models_dtype(dtype: torch.dtype, pristine: Path) -> None:
    found = weights(pristine, dtype=dtype)
    exact = weights(pristine)
    for name, value in found.items():
        if value.dtype == torch.float8_e4m3fn or "scales" in name or ".router." in name:
            assert value.dtype == exact[name].dtype
        else:
            assert value.dtype == dtype, name
        assert torch.equal(value.float(), exact[name].to(value.dtype).float()), name
    assert {value.dtype for value in found.values()} == {torch.float8_e4m3fn, torch.float32, dtype}


def test_scales_beyond_a_narrow_dtype(single: Path) -> None:
    edit(single, scale(200.0))
    load_model(single, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"not between 0 and 146, as torch\.float16 needs"):
        load_model(single, dtype=torch.float16)


def test_scales_in_bfloat16_are_widened(single: Path) -> None:
    ones = {f"{WIDENED}_scale_inv": torch.ones(1, 1, dtype=torch.bfloat16)}
    edit(single, lambda tensors: tensors.update(ones | {SCALE: tensors[SCALE].bfloat16()}))
    found = weights(single)
    stored = load_file(single / SINGLE_FILE)
    assert torch.equal(found["layers.1.mlp.experts.gate_up_scales"][2, 1:], stored[SCALE].float())
    assert torch.equal(found["layers.0.attention.kv_up"].flatten(0, 1), stored[WIDENED].float())


def test_progress_ends_at_the_total(pristine: Path) -> None:
    calls: list[tuple[int, int]] = []
    model = load_model(pristine, progress=lambda done, total: calls.append((done, total)))
    total = sum(parameter.numel() for parameter in model.parameters())
    assert calls[-1] == (total, total)
    assert all(before[0] < after[0] for before, after in pairwise(calls))


def test_draft_layers_are_ignored_with_their_scales(tmp_path: Path) -> None:
    path = write_tiny(
        tmp_path, "deepseek_v3", layers=2, float8=True, overrides={"num_nextn_predict_layers": 1}
    )
    name = "model.layers.2.eh_proj.weight"
    extra = {name: torch.ones(4, 4).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    edit(path, lambda tensors: tensors.update(extra))
    load_model(path)
