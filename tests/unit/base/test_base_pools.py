# SPDX-License-Identifier: Apache-2.0
"""The configuration of several pools."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.config import (
    ConfigError,
    PoolKeys,
    TwinpoolConfig,
    load_config,
    pool_config,
    pool_keys,
    pool_names,
    served_name,
    served_pools,
    to_env,
    to_yaml,
)
from twinpool.config.further import OVERLAID

ROOT = Path(__file__).parents[3]


def load(further: object, **pools: object) -> TwinpoolConfig:
    return load_config(None, {"pools": {"further": further} | pools, "model.path": "/models/big"}, env={})


def test_the_example_of_the_page_is_one(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "pools.md").read_text().partition("## Several pools")[2]
    example = re.search(r"```yaml\n(.*?)```", section, re.DOTALL)
    assert example is not None
    file = tmp_path / "cluster.yaml"
    file.write_text(example[1])
    config = load_config(file, env={})
    assert pool_names(config) == ["default", "chat", "long", "urgent"]
    assert served_pools(config) == pool_names(config)
    names = {pool: served_name(pool_config(config, pool)) for pool in pool_names(config)}
    assert names == {"default": "big", "chat": "chat", "long": "big", "urgent": "big"}
    assert pool_config(config, "long").kv.num_blocks == 32768
    assert pool_config(config, "long").pools.resources("decode") == {"GPU": 1.0, "large-memory": 1.0}
    variable = re.search(r"`TWINPOOL_POOLS__FURTHER='(.*?)'`", section)
    assert variable is not None
    assert pool_names(load_config(None, env={"TWINPOOL_POOLS__FURTHER": variable[1]})) == ["default", "chat"]


def test_a_pool_sees_a_configuration_of_its_own() -> None:
    config = load(
        {"long": {"prefill_workers": 3, "kv": {"num_blocks": 77}, "worker": {"threads": 2}}},
        decode_workers=5,
        max_restarts=4,
    )
    long, own = pool_config(config, "long"), pool_config(config, "default")
    assert (long.worker.pool, long.worker.threads, long.kv.num_blocks) == ("long", 2, 77)
    assert (long.kv.block_tokens, long.pools.max_restarts) == (config.kv.block_tokens, 4), "shared"
    assert (long.pools.prefill_workers, long.pools.decode_workers) == (3, 1), "numbers are not shared"
    assert (own.worker.pool, own.pools.decode_workers, own.kv) == ("default", 5, config.kv)
    assert long.pools.further == own.pools.further == {}
    assert pool_keys(config, "nobody") is None


def test_another_checkpoint_brings_its_name() -> None:
    config = load_config(
        None,
        {
            "model": {"path": "/models/big", "name": "shown"},
            "pools.further": {
                "a": {"model": {"path": "/models/chat"}},
                "b": {"model": {"path": "/models/chat", "name": "talk"}},
                "c": {},
            },
        },
        env={},
    )
    names = [served_name(pool_config(config, pool)) for pool in pool_names(config)]
    assert names == ["shown", "chat", "talk", "shown"]


def test_a_pool_of_which_nothing_is_run_is_left_out_beside_others() -> None:
    assert pool_names(load({}, prefill_workers=0, decode_workers=0)) == ["default"]
    assert pool_names(load({"a": {}}, prefill_workers=0, decode_workers=0)) == ["a"]
    assert pool_names(load({"a": {"prefill_workers": 0, "decode_workers": 0}})) == ["default", "a"]


def test_a_router_may_serve_some_pools_only() -> None:
    config = load({"a": {}, "b": {}})
    assert served_pools(config) == ["default", "a", "b"]
    text = load_config(None, env=to_env(config) | {"TWINPOOL_ROUTER__POOLS": "b,elsewhere"})
    assert served_pools(text) == ["b", "elsewhere"]


@pytest.mark.parametrize(
    ("further", "parts"),
    [
        ({"default": {}}, ["pools.further.default", "worker.pool"]),
        ({"Long": {}}, ["pools.further.Long", "DNS label"]),
        ({"a": {"prefill": 3}}, ["pools.further.a.prefill", "not permitted"]),
        ({"a": {"prefill_workers": -1}}, ["pools.further.a.prefill_workers", "greater than or equal to 0"]),
        ({"a": {"kv": {"num_blocks": 1}}}, ["pools.further.a.kv.num_blocks", "greater than or equal to 2"]),
        ({"a": {"kv": {"num_bloks": 9}}}, ["pools.further.a.kv.num_bloks", "not permitted"]),
        ({"a": {"worker": {"pool": "b"}}}, ["pools.further.a.worker.pool"]),
        ({"a": {"worker": {"name": "b"}}}, ["pools.further.a.worker.name"]),
        (
            {"a": {"prompt_tokens_least": 9, "prompt_tokens_most": 8}},
            ["pools.further.a.prompt_tokens_least", "9 exceeds", "= 8"],
        ),
        ({"a": {"priority_least": 5, "priority_most": 4}}, ["pools.further.a.priority_least"]),
        ({"a": {"prefill_workers": 5, "prefill_most": 4}}, ["pools.further.a.prefill_workers", "5"]),
        (
            {"a": {"scheduler": {"max_chunk_tokens": 4096}}},
            ["pools.further.a.scheduler.max_chunk_tokens", "4096"],
        ),
        ({f"p{number}": {} for number in range(65)}, ["pools.further", "64"]),
        ("[1]", ["pools.further", "dictionary"]),
        ("{", ["pools.further", "YAML"]),
    ],
)
def test_what_is_wrong_is_named_with_its_pool(further: object, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(further)
    assert [part for part in parts if part not in caught.value.message] == []
    assert caught.value.key.startswith("pools.further")


NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,6}[a-z0-9])?", fullmatch=True).filter(
    lambda name: name != "default"
)
POOLS = st.fixed_dictionaries(
    {},
    optional={
        "prefill_workers": st.integers(0, 9),
        "decode_resources": st.sampled_from([[], ["CPU=2", "GPU=0.5"]]),
        "prefill_placement": st.sampled_from(["spread", "group"]),
        "prompt_tokens_least": st.integers(0, 500),
        "prompt_tokens_most": st.integers(500, 1000),
        "priority_least": st.integers(-100, 0),
        "overflow": st.booleans(),
        # Of control characters pydantic and Python do not agree which are blanks at the ends.
        "model": st.fixed_dictionaries(
            {
                "path": st.text(
                    st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=9
                ).filter(str.strip)
            }
        ),
        "kv": st.fixed_dictionaries({"num_blocks": st.integers(2, 99)}),
    },
)


@settings(max_examples=20)
@given(st.dictionaries(NAMES, POOLS, max_size=3))
def test_children_get_the_same_pools(further: dict[str, Any]) -> None:
    config = load(further)
    assert load_config(None, env=to_env(config)) == config
    assert load_config(None, yaml.safe_load(to_yaml(config)), env={}) == config
    assert load(json.dumps(further)) == config
    for pool, said in further.items():
        own = pool_config(config, pool)
        assert load_config(None, env=to_env(own)) == own
        for key in PoolKeys.model_fields:
            assert getattr(own.pools, key) == getattr(config.pools.further[pool], key)
        for section in OVERLAID:
            for key, value in said.get(section, {}).items():
                assert getattr(getattr(own, section), key) == (
                    value.strip() if isinstance(value, str) else value
                )
