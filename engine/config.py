# SPDX-License-Identifier: Apache-2.0
"""Model configuration read from a checkpoint's ``config.json``."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from twinpool.engine.config_values import FAMILY_DEFAULTS, Values, read_json
from twinpool.engine.float8_config import read_float8
from twinpool.engine.rope_config import RopeConfig, read_rope
from twinpool.errors import CheckpointError

Family = Literal["llama", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3"]
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3")
MLA_FAMILIES: tuple[Family, ...] = ("deepseek_v2", "deepseek_v3")

# Config keys that change what a checkpoint computes and that nothing here implements: value that means "off".
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
}


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention. ``q_lora_rank`` None: queries come straight from the hidden state."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts. ``routing`` names how the experts of a token are chosen:

    ``greedy``: top-k of softmax; ``group_limited_greedy``: of the groups with the best experts;
    ``noaux_tc``: of sigmoid scores plus a learned correction bias, groups by their two best.
    """

    num_experts: int
    num_shared_experts: int
    experts_per_token: int
    intermediate_size: int
    routing: Literal["greedy", "group_limited_greedy", "noaux_tc"]
    num_groups: int
    groups_per_token: int
    routed_scaling_factor: float
    normalize: bool
    first_dense_layers: int
    layer_frequency: int

    def is_moe_layer(self, layer: int) -> bool:
        """Whether ``layer`` has experts rather than a dense MLP."""
        return layer >= self.first_dense_layers and layer % self.layer_frequency == 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape and constants, the same for every family. ``head_dim`` is that of GQA heads (0 for MLA)."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    mla: MlaConfig | None
    moe: MoeConfig | None
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    ignored_layers: (
        int  # trailing layers of the checkpoint that are not part of the decoder (multi-token prediction)
    )
    float8_weights: bool = False
    """Whether the checkpoint holds its linear layers as float8 codes and scales; see ``models.packed``."""

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "ModelConfig":
        """Reads ``config.json`` (and ``generation_config.json`` if present) of a checkpoint directory.

        Raises CheckpointError naming file, key, value and what is allowed.
        """
        directory = Path(path)
        raw = read_json(directory / "config.json")
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise CheckpointError(
                f"{directory / 'config.json'}: model_type {family!r} is not supported (supported: {', '.join(FAMILIES)})",
                file="config.json",
            )
        generation = directory / "generation_config.json"
        return cls.from_dict(raw, generation=read_json(generation) if generation.is_file() else {})

    @classmethod
    def from_dict(cls, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> "ModelConfig":
        """The same from parsed JSON."""
        family = cast(Family, raw["model_type"])
        values = Values(
            FAMILY_DEFAULTS[family] | {key: item for key, item in raw.items() if item is not None}
        )
        _refuse_unsupported(values)
        mla = _read_mla(values, raw, family) if family in MLA_FAMILIES else None
        hidden, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
        kv_heads = values.integer("num_key_value_heads", default=heads)
        head_dim = 0 if mla else _read_head_dim(values, hidden, heads, kv_heads)
        max_positions = values.integer("max_position_embeddings")
        layers = values.integer("num_hidden_layers")
        attention_bias = values.boolean("attention_bias", default=False)
        vocab = values.integer("vocab_size")
        return cls(
            family=family,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=values.integer("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=values.number("rms_norm_eps"),
            max_position_embeddings=max_positions,
            tie_word_embeddings=values.boolean("tie_word_embeddings", default=False),
            qkv_bias=attention_bias or family == "qwen2",  # Qwen2 has them always, whatever its config says
            output_bias=attention_bias and family != "qwen2",
            mlp_bias=values.boolean("mlp_bias", default=False) and family in ("llama", "deepseek_v2"),
            qk_norm=family == "qwen3",
            rope=read_rope(values, head_dim if mla is None else mla.qk_rope_head_dim, max_positions),
            mla=mla,
            moe=_read_moe(values, family) if mla else None,
            dtype=values.string("dtype", default=values.string("torch_dtype", default="float32")),
            bos_token_id=values.optional_integer("bos_token_id", minimum=0),
            eos_token_ids=_read_eos(values, generation or {}, vocab),
            ignored_layers=values.integer("num_nextn_predict_layers", default=0, minimum=0),
            float8_weights=read_float8(values),
        )


def _refuse_unsupported(values: Values) -> None:
    for key, off in _UNSUPPORTED.items():
        value = values.get(key)
        if value not in off:
            raise values.error(key, value, "is not supported")
    kinds = values.get("layer_types")
    if kinds is not None and any(kind != "full_attention" for kind in kinds):
        raise values.error("layer_types", sorted(set(kinds)), "only full_attention is supported")
    values.choice("hidden_act", ("silu",))


def _read_head_dim(values: Values, hidden: int, heads: int, kv_heads: int) -> int:
    head_dim = values.optional_integer("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise values.error("num_attention_heads", heads, f"must divide hidden_size {hidden}")
        head_dim = hidden // heads
    if heads % kv_heads:
        raise values.error("num_key_value_heads", kv_heads, f"must divide num_attention_heads {heads}")
    if head_dim % 2:
        raise values.error("head_dim", head_dim, "must be even")
    return head_dim


def _read_mla(values: Values, raw: dict[str, Any], family: Family) -> MlaConfig:
    # An explicit null means "no query compression"; an absent key means the family's default rank.
    explicit_none = "q_lora_rank" in raw and raw["q_lora_rank"] is None
    rope_dim = values.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise values.error("qk_rope_head_dim", rope_dim, "must be even")
    return MlaConfig(
        q_lora_rank=None if explicit_none else values.integer("q_lora_rank"),
        kv_lora_rank=values.integer("kv_lora_rank"),
        qk_nope_head_dim=values.integer("qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=values.integer("v_head_dim"),
        # V2 checkpoints hold rotary pairs side by side, always; V3 ones unless their config says otherwise.
        rope_interleave=True if family == "deepseek_v2" else values.boolean("rope_interleave", default=True),
    )


def _read_moe(values: Values, family: Family) -> MoeConfig:
    experts = values.integer("n_routed_experts")
    per_token = values.integer("num_experts_per_tok", maximum=experts)
    routing: Any = "noaux_tc"
    if family == "deepseek_v2":
        routing = values.choice("topk_method", ("greedy", "group_limited_greedy"))
        values.choice("scoring_func", ("softmax",), default="softmax")
    else:
        values.choice("topk_method", ("noaux_tc",), default="noaux_tc")
        values.choice("scoring_func", ("sigmoid",), default="sigmoid")
    grouped = routing != "greedy"
    groups = values.integer("n_group") if grouped else 1
    per_group_choice = values.integer("topk_group", maximum=groups) if grouped else 1
    if experts % groups:
        raise values.error("n_group", groups, f"must divide n_routed_experts {experts}")
    if experts // groups * per_group_choice < per_token:
        raise values.error(
            "topk_group", per_group_choice, f"leaves fewer than {per_token} experts to choose from"
        )
    return MoeConfig(
        num_experts=experts,
        num_shared_experts=values.integer("n_shared_experts", default=0, minimum=0),
        experts_per_token=per_token,
        intermediate_size=values.integer("moe_intermediate_size"),
        routing=routing,
        num_groups=groups,
        groups_per_token=per_group_choice,
        routed_scaling_factor=values.number("routed_scaling_factor"),
        # transformers' V2 router does not read norm_topk_prob, and it is the oracle; released V2 models say false.
        normalize=values.boolean("norm_topk_prob", default=True) if family == "deepseek_v3" else False,
        first_dense_layers=values.integer("first_k_dense_replace", minimum=0),
        layer_frequency=values.integer("moe_layer_freq", default=1),
    )


def _read_eos(values: Values, generation: dict[str, Any], vocab: int) -> tuple[int, ...]:
    """The ids that end an answer: generation_config.json's if it names any, else config.json's."""
    found = generation.get("eos_token_id")
    if found is None:
        found = values.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise values.error("eos_token_id", token, f"must be a token id below vocab_size {vocab}")
    return tuple(dict.fromkeys(ids))


def canonical_json(path: str | Path) -> bytes:
    """``config.json`` with sorted keys and no spaces, for hashing."""
    return json.dumps(read_json(Path(path) / "config.json"), sort_keys=True, separators=(",", ":")).encode()
