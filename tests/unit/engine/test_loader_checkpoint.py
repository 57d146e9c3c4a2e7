# SPDX-License-Identifier: Apache-2.0
"""A checkpoint loads whole, or the error names file, tensor, expected and found."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from twinpool.engine.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from twinpool.engine.config import FAMILIES, Family
from twinpool.engine.loader import load_model
from twinpool.engine.models.decoder import PagedDecoder
from twinpool.engine.tiny import write_tiny
from twinpool.errors import CheckpointError

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("single"), "llama", layers=2)


@pytest.fixture(scope="module")
def pristine_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("shards"), "llama", layers=2, shards=3)


@pytest.fixture
def single(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "model")


@pytest.fixture
def sharded(pristine_shards: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine_shards, tmp_path / "model")


def edit(path: Path, change: Callable[[dict[str, Tensor]], object], file: str = SINGLE_FILE) -> None:
    tensors = load_file(path / file)
    change(tensors)
    save_file(tensors, path / file)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def shard_of(path: Path, tensor: str) -> str:
    return str(json.loads((path / INDEX_FILE).read_text())["weight_map"][tensor])


def weights(path: Path, **kwargs: Any) -> dict[str, Tensor]:
    model = load_model(path, **kwargs)
    assert isinstance(model, PagedDecoder)
    return dict(model.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_the_checkpoint_is_in_the_model(family: Family, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, family)
    stored = load_file(path / SINGLE_FILE)
    model = load_model(path)
    assert isinstance(model, PagedDecoder)
    seen = set()
    for slot in model.slots():
        tensor = stored[slot.name]
        expected = tensor if slot.rows is None else tensor[slot.rows]
        assert torch.equal(slot.target, expected.expand_as(slot.target)), slot.name
        seen.add(slot.name)
    assert seen == set(stored)
    assert model.training is False
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_shards_load_like_a_single_file(pristine: Path, pristine_shards: Path) -> None:
    assert len(list(pristine_shards.glob("*.safetensors"))) == 3
    one, many = weights(pristine), weights(pristine_shards)
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_converted_and_routing_is_not(dtype: torch.dtype, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "deepseek_v3")
    exact, narrow = weights(path), weights(path, dtype=dtype)
    for name, value in narrow.items():
        routing = ".router." in name
        assert value.dtype == (torch.float32 if routing else dtype), name
        assert torch.equal(value, exact[name].to(value.dtype)), name


def test_progress_ends_at_the_total(pristine: Path) -> None:
    calls: list[tuple[int, int]] = []
    model = load_model(pristine, progress=lambda done, total: calls.append((done, total)))
    total = sum(parameter.numel() for parameter in model.parameters())
    assert calls[-1] == (total, total)
    assert all(before[0] < after[0] for before, after in pairwise(calls))


def test_tied_embeddings_need_no_head_and_ignore_one(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "llama", layers=1, overrides={"tie_word_embeddings": True})
    assert "lm_head.weight" not in load_file(path / SINGLE_FILE)
    model = load_model(path)
    assert isinstance(model, PagedDecoder)
    assert model.head is model.embedding
    edit(path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(512, 96)}))
    load_model(path)


def test_what_old_and_draft_layers_leave_behind_is_ignored(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "deepseek_v3", layers=2, overrides={"num_nextn_predict_layers": 1})
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.2.eh_proj.weight": torch.ones(4, 4),
    }
    edit(path, lambda tensors: tensors.update(extra))
    load_model(path)
    edit(path, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.ones(4)}))
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.3\.eh_proj\.weight: not part of a deepseek_v3"
    ):
        load_model(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), rf"tensor {NORM}: missing"),
        (lambda t: [t.pop(name) for name in list(t) if "q_proj" in name or "up_proj" in name], r"and 1 more: missing"),
        (lambda t: t.update({NORM: torch.ones(95)}), rf"{SINGLE_FILE}: tensor {NORM} has shape \[95\], expected \[96\]"),
        (lambda t: t.update({NORM: torch.ones(1, 96)}), r"has shape \[1, 96\], expected \[96\]"),
        (
            lambda t: t.update({NORM: torch.ones(96, dtype=torch.int32)}),
            rf"tensor {NORM} has dtype I32, expected one of BF16, F16, F32",
        ),
        (lambda t: t.update({NORM: torch.full((96,), float("nan"))}), rf"tensor {NORM} holds values that are not finite"),
        (lambda t: t.update({"model.extra": torch.ones(1)}), r"tensor model\.extra: not part of a llama model"),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_named(
    single: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    edit(single, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(single)
    assert caught.value.reason == "CHECKPOINT_INVALID"
    assert caught.value.metadata["tensor"]


def test_a_dtype_too_narrow_for_the_weights_is_an_error(single: Path) -> None:
    edit(single, lambda tensors: tensors[NORM].fill_(1e6))
    load_model(single, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"not finite in torch\.float16"):
        load_model(single, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"dtype torch\.int8 is not one of"):
        load_model(single, dtype=torch.int8)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(single: Path, keep: int) -> None:
    content = (single / SINGLE_FILE).read_bytes()
    (single / SINGLE_FILE).write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match=rf"{SINGLE_FILE}: truncated or corrupt") as caught:
        load_model(single)
    assert caught.value.metadata["file"] == SINGLE_FILE


def test_a_corrupt_header_is_named(sharded: Path) -> None:
    file = shard_of(sharded, NORM)
    content = bytearray((sharded / file).read_bytes())
    content[8:16] = b"\xff" * 8
    (sharded / file).write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=rf"{file}: truncated or corrupt"):
        load_model(sharded)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    file = shard_of(sharded, NORM)
    (sharded / file).unlink()
    with pytest.raises(CheckpointError, match=rf"{file}: missing, although {INDEX_FILE} names it"):
        load_model(sharded)


def test_an_index_that_disagrees_with_its_shards_is_an_error(sharded: Path) -> None:
    file = shard_of(sharded, NORM)
    edit(sharded, lambda tensors: tensors.pop(NORM), file)
    with pytest.raises(
        CheckpointError, match=rf"{file}: tensor {NORM} is missing, although {INDEX_FILE} says"
    ):
        load_model(sharded)


def test_a_tensor_in_two_shards_is_an_error(sharded: Path) -> None:
    first, last = sorted(path.name for path in sharded.glob("*.safetensors"))[:2]
    twin = next(iter(load_file(sharded / first)))
    edit(sharded, lambda tensors: tensors.update({twin: torch.ones(1)}), last)
    with pytest.raises(CheckpointError, match=rf"{last}: tensor {twin} is also in {first}"):
        load_model(sharded)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "weights.bin", 7])
def test_an_index_cannot_point_outside_its_directory(sharded: Path, name: object) -> None:
    edit_json(sharded / INDEX_FILE, lambda index: index["weight_map"].update({NORM: name}))
    with pytest.raises(CheckpointError, match="is not the name of a safetensors file"):
        Checkpoint(sharded)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', "[", "null"])
def test_an_unusable_index_is_named(sharded: Path, content: str) -> None:
    (sharded / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=INDEX_FILE):
        load_model(sharded)


def test_a_directory_without_weights_says_what_it_looked_for(single: Path) -> None:
    (single / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"holds neither {INDEX_FILE} nor {SINGLE_FILE}"):
        load_model(single)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 1 << 30}, "num_hidden_layers"),
        ({"vocab_size": 1 << 30}, "vocab_size"),
        ({"hidden_size": 1 << 30}, "hidden_size"),
        ({"intermediate_size": 1 << 31}, "intermediate_size"),
        ({"head_dim": 1 << 28}, "num_attention_heads"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 1,
                    "low_freq_factor": 0,
                    "high_freq_factor": 0,
                }
            },
            "ZeroDivision",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "rope_theta": 1.0}}, "ZeroDivision"),
    ],
)
def test_sizes_that_the_tensors_do_not_have(tmp_path: Path, change: dict[str, object], named: str) -> None:
    """A config.json that claims a gigantic model must not make the loader build one."""
    path = write_tiny(tmp_path, "llama", layers=2, hidden=32, vocab=300)
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(CheckpointError, match=named):
        load_model(path)


def test_a_config_nested_deeper_than_python_follows(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "llama", layers=2, hidden=32, vocab=300)
    (path / "config.json").write_text('{"a":' + "[" * 200_000)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model(path)


@contextlib.contextmanager
def somebody() -> Iterator[int]:
    """A user who is not root and owns nothing."""
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        yield os.geteuid()
    finally:
        if os.getuid() == 0:
            os.seteuid(0)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """One that everybody may enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_weights_may_be_read_by_whom_the_umask_lets(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        for shards in (1, 2):
            path = write_tiny(tmp_path / str(shards), "llama", layers=1, shards=shards)
            files = list(path.iterdir())
            assert {file.name: oct(file.stat().st_mode & 0o777) for file in files} == {
                file.name: oct(mode) for file in files
            }
    finally:
        os.umask(before)


@pytest.mark.parametrize("file", [SINGLE_FILE, INDEX_FILE, "config.json", "."])
def test_a_file_that_may_not_be_read_is_not_called_corrupt(open_directory: Path, file: str) -> None:
    path = write_tiny(open_directory / "model", "llama", layers=1, shards=2 if file == INDEX_FILE else 1)
    (path / file).chmod(0 if os.geteuid() else 0o600)
    with somebody() as user, pytest.raises(CheckpointError, match=f"user {user} may not read it") as caught:
        load_model(path)
    assert caught.value.reason == "CHECKPOINT_UNREADABLE"
    assert file == "." or caught.value.metadata["file"] == file
    (path / file).chmod(0o755)


def test_what_is_not_there_is_not_called_unreadable(open_directory: Path) -> None:
    with somebody(), pytest.raises(CheckpointError) as caught:
        Checkpoint(open_directory / "model")
    assert caught.value.reason == "CHECKPOINT_INVALID"
