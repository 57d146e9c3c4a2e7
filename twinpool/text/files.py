# SPDX-License-Identifier: Apache-2.0
"""Reads the small files around a tokenizer.json, in all the forms that published checkpoints have."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twinpool.text.errors import TokenizerLoadError

TokenizerConfig = Mapping[str, Any]

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@contextmanager
def loading(path: Path | str) -> Iterator[None]:
    """Whatever goes wrong inside becomes a TokenizerLoadError that names ``path``: files come from people whom the operator may
    not know, and may be wrong in any way."""
    try:
        yield
    except (TokenizerLoadError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        # The library raises a bare Exception for what it can't parse, and a BaseException where its own code panics.
        raise TokenizerLoadError(f"{path}: {type(error).__name__}: {str(error)[:500]}") from error


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """A JSON object; ``{}`` for a missing file if it is optional. Raises TokenizerLoadError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if optional:
            return {}
        raise TokenizerLoadError(f"{path}: missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerLoadError(f"{path}: {error}") from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise TokenizerLoadError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerLoadError(f"{path}: expected an object, found {type(value).__name__}")
    return value


def _token_text(value: object) -> str | None:
    """A token is written as its text or as an object with its text and flags."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and isinstance(value.get("content"), str):
        return str(value["content"])
    return None


def read_special_tokens(root: Path, config: TokenizerConfig) -> dict[str, str]:
    """Named special tokens. tokenizer_config.json goes before the older special_tokens_map.json."""
    merged = {**read_json(root / "special_tokens_map.json", optional=True), **config}
    extra = merged.get("extra_special_tokens")
    if isinstance(extra, Mapping):
        merged = {**merged, **extra}
    # Models with images or tools name tokens of their own, all called "..._token".
    names = [*_NAMED, *(name for name in merged if name.endswith("_token") and name not in _NAMED)]
    found = {name: _token_text(merged.get(name)) for name in names}
    return {name: text for name, text in found.items() if text is not None}


def _token_flags(value: object) -> dict[str, Any] | None:
    """What ``tokenizers.AddedToken`` takes; a special token unless the value says otherwise."""
    text = _token_text(value)
    if text is None:
        return None
    flags = value if isinstance(value, Mapping) else {"special": True}
    return {"content": text, **{flag: bool(flags[flag]) for flag in _TOKEN_FLAGS if flag in flags}}


def read_added_tokens(config: TokenizerConfig) -> list[dict[str, Any]]:
    """Tokens that the configuration adds, as arguments of ``tokenizers.AddedToken``, in the order of their ids."""
    decoder = config.get("added_tokens_decoder") or {}
    found = [_token_flags(token) for _, token in sorted(decoder.items(), key=lambda item: int(item[0]))]
    return [token for token in found if token is not None]


def read_special_flags(config: TokenizerConfig, special_tokens: Mapping[str, str]) -> list[dict[str, Any]]:
    """Named special tokens, then extra ones, as arguments of ``tokenizers.AddedToken``."""
    named = [config[name] if _token_text(config.get(name)) else text for name, text in special_tokens.items()]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    listed = [] if isinstance(extra, Mapping) else list(extra)
    found = [_token_flags(token) for token in (*named, *listed)]
    return [token for token in found if token is not None]


def read_template(path: Path) -> dict[str, str]:
    """A template in a file of its own, as the only one."""
    try:
        return {"default": path.read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerLoadError(f"{path}: {error}") from error


def read_chat_templates(root: Path, config: TokenizerConfig) -> dict[str, str]:
    """Templates by name. Files go before tokenizer_config.json; {} if the model has none."""
    templates: dict[str, str] = {}
    paths = {"default": root / "chat_template.jinja"}
    paths.update({path.stem: path for path in sorted((root / "additional_chat_templates").glob("*.jinja"))})
    for name, path in paths.items():
        if path.is_file():
            templates[name] = read_template(path)["default"]
    if templates:
        return templates
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    return {}


def read_eos_ids(root: Path) -> list[int]:
    """Ids that end generation, by generation_config.json if it says, else by config.json; [] if neither says."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(root / name, optional=True).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise TokenizerLoadError(
                f"{root / name}: eos_token_id {value!r} is not a token id or a list of them"
            )
        if ids:
            return ids
    return []
