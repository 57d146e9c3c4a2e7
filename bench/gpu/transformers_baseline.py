# SPDX-License-Identifier: Apache-2.0
"""The same weights in ``transformers``: a baseline of decode steps for ``v2_lite_step``."""

import statistics
import time
from typing import Any

import torch

from twinpool.engine.models.decoder import PagedDecoder


@torch.inference_mode()
def copy_model(ours: PagedDecoder, config: dict[str, Any], device: str) -> Any:
    """A ``transformers`` model of ``config`` with the weights of ``ours``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(**config)
    with torch.device(device):
        theirs = AutoModelForCausalLM.from_config(made, dtype=ours.embedding.dtype).eval()
    state = theirs.state_dict()
    missing = set(state)
    for slot in ours.slots():
        name, _, tail = slot.name.partition(".mlp.experts.")
        if tail:
            expert, kind, _ = tail.split(".")
            place = state[f"{name}.mlp.experts.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"]
            missing.discard(f"{name}.mlp.experts.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}")
            place = place[int(expert)]
            if kind != "down_proj":
                place = place.chunk(2)[kind == "up_proj"]
        else:
            place = state[slot.name]
            missing.discard(slot.name)
        if slot.rows is None:
            place.copy_(slot.target)
        else:
            place[slot.rows.to(place.device)] = slot.target
    if missing:
        raise ValueError(f"no weights for {sorted(missing)[:4]}")
    return theirs


@torch.inference_mode()
def time_steps(theirs: Any, batch: int, prompt: int, steps: int) -> dict[str, object]:
    """Greedy steps after a prompt of random tokens, from token ids on the host to token ids on the host: median
    milliseconds. The cache is static."""
    from transformers import StaticCache

    device = theirs.device
    cache = StaticCache(config=theirs.config, max_cache_len=prompt + steps + 8)
    generator = torch.Generator().manual_seed(batch)
    tokens = torch.randint(theirs.config.vocab_size, (batch, prompt), generator=generator)
    spans = []
    for step in range(steps + 1):
        started = time.perf_counter()
        logits = theirs(input_ids=tokens.to(device), past_key_values=cache, logits_to_keep=1).logits
        tokens = logits[:, -1].argmax(-1, keepdim=True).cpu()
        if step:
            spans.append((time.perf_counter() - started) * 1e3)
    experts = getattr(theirs.config, "_experts_implementation", None)
    return {
        "batch": batch, "context": prompt, "ms": round(statistics.median(spans[2:]), 3),
        "attention": theirs.config._attn_implementation, "experts": experts,
    }  # fmt: skip
