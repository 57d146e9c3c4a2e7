# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from twinpool.config import ConfigError, TwinpoolConfig, config_schema, env_name, load_config, to_env, to_yaml
from twinpool.config.model import fields
from twinpool.config.page import render

ROOT = Path(__file__).parents[3]


def load(
    overrides: dict[str, Any] | None = None, env: dict[str, str] | None = None, path: Any = None
) -> TwinpoolConfig:
    return load_config(path, overrides, env={} if env is None else env)


def failure(**kwargs: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(**kwargs)
    return caught.value


def test_page_is_what_the_sections_give() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == render(), "run: python -m twinpool.config > docs/configuration.md"


def test_every_key_is_described() -> None:
    assert [f"{section}.{name}" for section, name, info in fields() if not info.description] == []


def test_numbers_are_bounded() -> None:
    schema = config_schema()
    for section, name, info in fields():
        if info.annotation in (int, float):
            entry = schema["$defs"][TwinpoolConfig.model_fields[section].annotation.__name__]["properties"][
                name
            ]  # type: ignore[union-attr]
            low = {"minimum", "exclusiveMinimum"} & set(entry)
            assert low, f"{section}.{name} has no lower bound"


def test_precedence_is_argument_environment_file_default(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("kv: {num_blocks: 10, block_tokens: 32}\nscheduler: {max_num_seqs: 3}\n")
    env = {
        "TWINPOOL_KV__NUM_BLOCKS": "20",
        "TWINPOOL_SCHEDULER__MAX_NUM_SEQS": "4",
        "TWINPOOL_CONFIG": str(file),
    }
    config = load({"kv.num_blocks": 30, "kv.block_tokens": None}, env)
    assert (config.kv.num_blocks, config.kv.block_tokens, config.scheduler.max_num_seqs) == (30, 32, 4)
    assert config.scheduler.max_batched_tokens == TwinpoolConfig().scheduler.max_batched_tokens


def test_the_constructor_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINPOOL_KV__NUM_BLOCKS", "77")
    assert TwinpoolConfig().kv.num_blocks == 1024
    assert load_config().kv.num_blocks == 77


def test_configurations_are_frozen() -> None:
    config = load()
    with pytest.raises(ValidationError):
        config.kv.num_blocks = 3  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.kv = config.kv  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kwargs", "parts"),
    [
        (
            {"overrides": {"kv.num_bloks": 3}},
            ["'kv.num_bloks'", "argument", "'kv.num_blocks'", "poison_freed"],
        ),
        ({"overrides": {"kv": {"num_bloks": 3}}}, ["'kv.num_bloks'", "'kv.num_blocks'"]),
        ({"env": {"TWINPOOL_KV__NUM_BLOKS": "3"}}, ["TWINPOOL_KV__NUM_BLOKS", "'kv.num_blocks'"]),
        ({"env": {"TWINPOOL_SHEDULER__POLICY": "fcfs"}}, ["'sheduler'", "'scheduler'"]),
        ({"overrides": {"router.lease_seconds": 3}}, ["'router.lease_seconds'", "'transfer.lease_seconds'"]),
    ],
)
def test_unknown_keys_are_named_with_the_nearest_known_one(kwargs: dict[str, Any], parts: list[str]) -> None:
    message = failure(**kwargs).message
    assert [part for part in parts if part not in message] == []


def test_unknown_keys_of_a_file_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("workers: {port: 3}\n")
    error = failure(path=file)
    assert str(file) in error.message
    assert "nearest: 'worker'" in error.message


@pytest.mark.parametrize("text", ["- a\n", "kv: 3\n", "kv: [1]\n", "{", "\x00", "kv: {num_blocks: many}\n"])
def test_broken_files_are_config_errors(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert failure(path=file).reason == "CONFIG_INVALID"


def test_a_missing_or_binary_file_is_a_config_error(tmp_path: Path) -> None:
    assert "cannot read" in failure(path=tmp_path / "none.yaml").message
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x80")
    assert "cannot read" in failure(path=tmp_path / "b.yaml").message


def test_empty_files_and_sections_give_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("kv:\nmodel:\n  path:\n")
    assert load(path=file) == TwinpoolConfig()


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"kv.block_tokens": 8}, "kv.block_tokens"),
        ({"kv.block_tokens": 40}, "kv.block_tokens"),
        ({"kv.block_tokens": 144}, "kv.block_tokens"),
        ({"kv.num_blocks": 1}, "kv.num_blocks"),
        ({"cluster.lease_ttl_seconds": 1}, "cluster.lease_ttl_seconds"),
        ({"cluster.name": "Prod"}, "cluster.name"),
        ({"cluster.etcd_endpoints": ["http://h:1"]}, "cluster.etcd_endpoints"),
        ({"cluster.etcd_endpoints": []}, "cluster.etcd_endpoints"),
        ({"cluster.etcd_endpoints": ["h:0"]}, "cluster.etcd_endpoints"),
        ({"scheduler.max_chunk_tokens": 4096}, "scheduler.max_chunk_tokens"),
        ({"scheduler.max_num_seqs": 4096}, "scheduler.max_num_seqs"),
        ({"transfer.read_deadline_seconds": 30}, "transfer.read_deadline_seconds"),
        ({"transfer.ucx_tls": "sm,self"}, "transfer.ucx_tls"),
        ({"rpc.max_message_bytes": 1 << 20}, "rpc.max_message_bytes"),
        ({"transfer.lease_seconds": float("nan")}, "transfer.lease_seconds"),
        ({"router.queue_ttl_seconds": float("inf")}, "router.queue_ttl_seconds"),
        ({"tls.cert_file": "c.pem"}, "tls.key_file"),
        ({"tls.cert_file": "c.pem", "tls.key_file": "k.pem"}, "tls.ca_file"),
        ({"cluster.etcd_user": "u"}, "cluster.etcd_password_file"),
        ({"cluster.etcd_cert_file": "c", "cluster.etcd_ca_file": "a"}, "cluster.etcd_key_file"),
        ({"worker.device": "gpu"}, "worker.device"),
        ({"model.dtype": "int8"}, "model.dtype"),
    ],
)
def test_bad_values_name_their_key_and_value(overrides: dict[str, Any], key: str) -> None:
    error = failure(overrides=overrides)
    assert error.key == key
    assert key in error.message


def test_all_faults_are_told_at_once() -> None:
    error = failure(overrides={"kv.block_tokens": 8, "worker.port": 70000})
    assert "kv.block_tokens = 8" in error.message
    assert "worker.port = 70000" in error.message


def test_a_huge_value_does_not_flood_the_message() -> None:
    assert len(failure(overrides={"kv.num_blocks": "x" * 10_000}).message) < 1000


hosts = st.from_regex(r"[a-z]{1,8}(\.[a-z]{1,8})?", fullmatch=True)
overrides = st.fixed_dictionaries(
    {},
    optional={
        "cluster.etcd_endpoints": st.lists(
            st.builds("{}:{}".format, hosts, st.integers(1, 65535)), min_size=1, max_size=4
        ),
        "cluster.etcd_timeout_seconds": st.floats(0.1, 60),
        "kv.num_blocks": st.integers(2, 1 << 24),
        "kv.block_tokens": st.sampled_from(range(16, 129, 16)),
        "kv.poison_freed": st.booleans(),
        "model.path": st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30).map(str.strip),
        "router.tenant_tokens_per_second": st.floats(0, 1e12),
        "transfer.digest": st.sampled_from(["off", "sample", "always"]),
        "log.format": st.sampled_from(["auto", "json", "console"]),
    },
)


@given(overrides)
def test_environment_and_file_hand_over_exactly(values: dict[str, Any]) -> None:
    config = load(values)
    env = to_env(config)
    assert load(env=env) == config
    assert set(env) == {env_name(section, name) for section, name, _ in fields()}
    content = yaml.safe_load(to_yaml(config))
    assert TwinpoolConfig.model_validate(content) == config


def test_a_child_is_not_moved_by_what_it_inherits(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("kv: {num_blocks: 9}\nlog: {level: debug}\n")
    config = load()
    inherited = {"TWINPOOL_CONFIG": str(file), "TWINPOOL_KV__NUM_BLOCKS": "8"}
    assert load(env=inherited | to_env(config)) == config


def test_the_schema_is_json_and_forbids_unknown_keys() -> None:
    schema = json.loads(json.dumps(config_schema()))
    assert schema["additionalProperties"] is False
    assert all(entry["additionalProperties"] is False for entry in schema["$defs"].values())
