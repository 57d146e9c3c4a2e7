# SPDX-License-Identifier: Apache-2.0
"""Builds a model and fills it from a checkpoint, or says exactly what is wrong with the checkpoint."""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from twinpool.engine.checkpoint import Checkpoint, StoredTensor
from twinpool.engine.config import ModelConfig
from twinpool.engine.kernels import BLOCK_MAJOR, FP8_LATENT, REGISTRY, Capability, KernelRegistry, Kernels
from twinpool.engine.kernels.plugins import load_plugins
from twinpool.engine.kernels.torch_fused import unpack_weight
from twinpool.engine.kv.formats import KVDtype
from twinpool.engine.models.base import AttentionPath, DecoderModel
from twinpool.engine.models.decoder import PagedDecoder
from twinpool.engine.models.paths import PrefillPath
from twinpool.engine.models.weights import SCALES, Stored, WeightSlot
from twinpool.errors import CheckpointError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types that a model may run in, by the name that configuration uses."""

_LARGEST_CODE = 448.0
_NAN_CODE = 0x7F
_SHOWN = 3
"""Tensors named in an error; a count stands for the rest."""

Progress = Callable[[int, int], None]
"""Called with (values loaded, values in all)."""


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    attention: AttentionPath = "latent",
    device: torch.device | str = "cpu",
    prefill: PrefillPath = "auto",
    registry: KernelRegistry = REGISTRY,
    backend: str | None = None,
    progress: Progress | None = None,
    kv_dtype: KVDtype = "auto",
) -> DecoderModel:
    """Loads a checkpoint directory (config.json, safetensors).

    ``dtype`` converts the weights (router weights stay float32; float8 weights stay codes and float32 scales, but for
    those of ``kv_b_proj``, which are widened to ``dtype``). ``attention`` chooses how GQA families read their
    cache (MLA ones are latent always). ``backend`` prefers kernels of that backend. ``kv_dtype``: how the cache is
    stored. Raises CheckpointError naming file, tensor, expected and found; KernelNotFoundError if a kernel is missing.
    """
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype {dtype} is not one of {', '.join(DTYPES)}")
    config = ModelConfig.from_pretrained(path)
    checkpoint = Checkpoint(path)
    _check_sizes(checkpoint, config)
    load_plugins(registry)
    layout = FP8_LATENT if kv_dtype == "fp8_latent" else BLOCK_MAJOR
    kernels = Kernels.select(registry, Capability.of(device), dtype, layout=layout, backend=backend)
    try:
        model = PagedDecoder(
            config,
            kernels,
            attention=attention,
            prefill=prefill,
            dtype=dtype,
            device=device,
            kv_dtype=kv_dtype,
        )
    except (ArithmeticError, RuntimeError, ValueError, MemoryError) as error:
        # Values that are fine each by itself, and no model together.
        found = f"{checkpoint.path}: no model can be built by config.json: {type(error).__name__}: {str(error)[:300]}"
        raise CheckpointError(found, file="config.json") from error
    slots = list(model.slots())
    _check(checkpoint, slots, config)
    _fill(checkpoint, slots, dtype, progress)
    return model.eval()


def _ignored(name: str, config: ModelConfig) -> bool:
    """Tensors that checkpoints of these families hold and the decoder has no use for."""
    if name.endswith(".rotary_emb.inv_freq"):  # old files store what config.json determines
        return True
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and 0 <= int(layer[1]) - config.num_layers < config.ignored_layers


def _check_sizes(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """A config.json may claim any size. What is built by it is bounded here by the tensors that are there, before it is."""
    longest = max((size for stored in checkpoint.tensors.values() for size in stored.shape), default=0)
    width = config.mla.qk_head_dim if config.mla is not None else config.head_dim
    sizes = [
        ("num_hidden_layers", config.num_layers, len(checkpoint.tensors)),
        ("vocab_size", config.vocab_size, longest),
        ("hidden_size", config.hidden_size, longest),
        ("num_attention_heads times their width", config.num_heads * width, longest),
    ]
    if config.moe is not None:
        # Experts may be tensors of their own, or rows of one.
        sizes.append(("the number of experts", config.moe.num_experts, max(longest, len(checkpoint.tensors))))
        sizes.append(("moe_intermediate_size", config.moe.intermediate_size, longest))
    else:
        sizes.append(("intermediate_size", config.intermediate_size, longest))
    for name, claimed, most in sizes:
        if claimed > most:
            raise CheckpointError(
                f"{checkpoint.path}: {name} is {claimed} by config.json; its tensors allow {most} at most",
                file="config.json",
            )


def _check(checkpoint: Checkpoint, slots: list[WeightSlot], config: ModelConfig) -> None:
    """Compares all headers with what the model needs, before any memory is filled."""
    needed: dict[str, Stored] = {}
    for slot in slots:
        needed |= slot.stored()
    _check_forms(checkpoint, needed, config)
    missing = [name for name in needed if name not in checkpoint.tensors]
    if missing:
        _raise_many(checkpoint, "missing", missing, None)
    unexpected = [name for name in checkpoint.tensors if name not in needed and not _ignored(name, config)]
    if unexpected:
        file = checkpoint.tensors[unexpected[0]].file
        _raise_many(checkpoint, f"not part of a {config.family} model", unexpected, file)
    for name, expected in needed.items():
        stored = checkpoint.tensors[name]
        if stored.shape != expected.shape:
            found = f"has shape {list(stored.shape)}, expected {list(expected.shape)}"
            raise _wrong(checkpoint, stored, found)
        if stored.dtype not in expected.dtypes:
            allowed = ", ".join(expected.dtypes)
            more = "one of " if len(expected.dtypes) > 1 else ""
            raise _wrong(checkpoint, stored, f"has dtype {stored.dtype}, expected {more}{allowed}")


def _check_forms(checkpoint: Checkpoint, needed: dict[str, Stored], config: ModelConfig) -> None:
    """Where config.json and the tensors disagree on float8 weights, names that rather than what follows from it."""
    for name, expected in needed.items():
        stored = checkpoint.tensors.get(name)
        if stored is None or stored.dtype in expected.dtypes:
            continue
        if stored.dtype.startswith("F8") and not config.float8_weights:
            raise _wrong(
                checkpoint, stored, f"has dtype {stored.dtype} and config.json no quantization_config"
            )
        if name + SCALES in needed:
            rest = f"expected {expected.dtypes[0]} by config.json's quantization_config"
            raise _wrong(checkpoint, stored, f"has dtype {stored.dtype}, {rest}")


def _raise_many(checkpoint: Checkpoint, problem: str, names: list[str], file: str | None) -> None:
    shown = ", ".join(names[:_SHOWN])
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    where = checkpoint.path / file if file else checkpoint.path
    raise CheckpointError(
        f"{where}: tensor {shown}{rest}: {problem}", file=file or str(checkpoint.path), tensor=names[0]
    )


def _wrong(checkpoint: Checkpoint, stored: StoredTensor, problem: str) -> CheckpointError:
    where = checkpoint.path / stored.file
    return CheckpointError(f"{where}: tensor {stored.name} {problem}", file=stored.file, tensor=stored.name)


def _fill(
    checkpoint: Checkpoint, slots: list[WeightSlot], dtype: torch.dtype, progress: Progress | None
) -> None:
    total = sum(slot.target.numel() for slot in slots)
    owners = {name: slot for slot in slots for name in slot.stored()}
    halves: dict[str, Tensor] = {}
    done = 0
    for stored, tensor in checkpoint.read():
        slot = owners.get(stored.name)
        if slot is None:
            continue
        _check_float8(checkpoint, stored, slot, tensor, dtype)
        if slot.form == "widened":
            halves[stored.name] = tensor
            if not halves.keys() >= slot.stored().keys():
                continue
            tensor = unpack_weight(halves.pop(slot.name), halves.pop(slot.name + SCALES).float(), dtype)
        slot.fill(tensor)
        # Also catches a narrow dtype that cannot hold the checkpoint's values.
        if slot.form != "codes" and not bool(slot.target.isfinite().all()):
            raise _wrong(checkpoint, stored, f"holds values that are not finite in {slot.target.dtype}")
        done += slot.target.numel()
        if progress is not None:
            progress(done, total)


def _check_float8(
    checkpoint: Checkpoint, stored: StoredTensor, slot: WeightSlot, tensor: Tensor, dtype: torch.dtype
) -> None:
    """Codes must be numbers, and scales such that any code times its scale is one of ``dtype``."""
    if slot.form == "plain":
        return
    if stored.name == slot.name and slot.form != "scales":
        if bool((tensor.view(torch.uint8) & _NAN_CODE == _NAN_CODE).any()):
            raise _wrong(checkpoint, stored, "holds codes that are not numbers")
        return
    largest = torch.finfo(dtype).max / _LARGEST_CODE
    # Written so that a NaN is refused too.
    if not bool(((tensor >= 0) & (tensor.double() <= largest)).all()):
        raise _wrong(
            checkpoint, stored, f"holds scales that are not between 0 and {largest:.3g}, as {dtype} needs"
        )
