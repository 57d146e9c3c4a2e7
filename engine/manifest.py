# SPDX-License-Identifier: Apache-2.0
"""The list of a directory's files with size and SHA-256, by which a later start knows that it is whole."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "twinpool-manifest.json"


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path, origin: Mapping[str, object]) -> None:
    """Records every file of ``directory`` and where they come from."""
    files = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file() and p.name != NAME):
        stat = path.stat()
        files[path.relative_to(directory).as_posix()] = {
            "size": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "sha256": sha256(path),
        }
    text = json.dumps({"origin": dict(origin), "files": files}, indent=2)
    (directory / NAME).write_text(text + "\n", encoding="utf-8")


def check_manifest(directory: Path, origin: Mapping[str, object]) -> str | None:
    """None if ``directory`` is what :func:`write_manifest` recorded for ``origin``, else what is wrong with it.

    A file with the recorded size and time is taken as unchanged; its content is read only if the time differs.
    """
    try:
        manifest = json.loads((directory / NAME).read_text(encoding="utf-8"))
        recorded: Mapping[str, Mapping[str, Any]] = manifest["files"]
        if manifest["origin"] != dict(origin):
            return "it was made from another source or by another version"
        for name, entry in recorded.items():
            problem = _check_file(directory / name, entry)
            if problem is not None:
                return f"{name}: {problem}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{NAME} is unreadable ({type(error).__name__})"
    return None


def _check_file(path: Path, entry: Mapping[str, Any]) -> str | None:
    stat = path.stat()
    if stat.st_size != entry["size"]:
        return f"{stat.st_size} bytes instead of {entry['size']}"
    if stat.st_mtime_ns != entry["mtime_ns"] and sha256(path) != entry["sha256"]:
        return "its SHA-256 differs"
    return None
