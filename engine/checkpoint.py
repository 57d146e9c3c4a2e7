# SPDX-License-Identifier: Apache-2.0
"""The safetensors files of a checkpoint: which tensor lies where, checked before any is read."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from twinpool.engine.config_values import read_json, unreadable
from twinpool.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies, and what its file's header says of it (``dtype`` in safetensors' names: F32, BF16 ...)."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str


def share(path: Path) -> None:
    """Gives a file of weights that was written here the mode of any new file: safetensors lets only its owner read it, and pods
    of another user are to read it, too."""
    probe = path.with_name(f".{path.name}.mode")
    probe.touch()
    path.chmod(probe.stat().st_mode & 0o777)
    probe.unlink()


class Checkpoint:
    """Reads one checkpoint directory: an index with shards, or a single file. Only headers are read up front."""

    def __init__(self, path: str | Path) -> None:
        """Raises CheckpointError for a missing, truncated, corrupt or unreadable file, or an index that disagrees with its shards."""
        self.path = Path(path)
        try:
            self.files = self._find_files()
        except PermissionError as error:
            raise unreadable(self.path, error) from error
        self.tensors: dict[str, StoredTensor] = {}
        for file, promised in self.files.items():
            self._read_header(file, promised)

    def _find_files(self) -> dict[str, set[str] | None]:
        """Shards by name, each with the tensors that the index promises of it (None: there is no index)."""
        index = self.path / INDEX_FILE
        if not index.is_file():
            if not (self.path / SINGLE_FILE).is_file():
                found = f"{self.path} holds neither {INDEX_FILE} nor {SINGLE_FILE}"
                raise CheckpointError(found, file=SINGLE_FILE)
            return {SINGLE_FILE: None}
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing or not an object", file=INDEX_FILE)
        files: dict[str, set[str] | None] = {}
        for tensor, file in weight_map.items():
            # A name with a directory in it could point anywhere on this machine.
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{index}: weight_map[{tensor!r}] = {file!r} is not the name of a safetensors file",
                    file=INDEX_FILE,
                    tensor=tensor,
                )
            promised = files.setdefault(file, set())
            assert promised is not None
            promised.add(tensor)
        for file in files:
            if not (self.path / file).is_file():
                raise CheckpointError(
                    f"{self.path / file}: missing, although {INDEX_FILE} names it", file=file
                )
        return dict(sorted(files.items()))

    def _read_header(self, file: str, promised: set[str] | None) -> None:
        with self._open(file) as handle:
            names = set(handle.keys())
            for name in sorted(names):
                if name in self.tensors:
                    where = f"{self.path / file}: tensor {name} is also in {self.tensors[name].file}"
                    raise CheckpointError(where, file=file, tensor=name)
                part = handle.get_slice(name)
                shape = tuple(int(size) for size in part.get_shape())
                self.tensors[name] = StoredTensor(name, file, shape, str(part.get_dtype()))
        for name in sorted((promised or set()) - names):
            raise CheckpointError(
                f"{self.path / file}: tensor {name} is missing, although {INDEX_FILE} says that it is here",
                file=file,
                tensor=name,
            )

    @contextmanager
    def _open(self, file: str) -> Iterator[Any]:
        try:
            # The library says of a file that may not be read that there is none.
            (self.path / file).open("rb").close()
            with safe_open(self.path / file, framework="pt") as handle:
                yield handle
        except PermissionError as error:
            raise unreadable(self.path / file, error) from error
        except (SafetensorError, OSError) as error:
            size = (self.path / file).stat().st_size if (self.path / file).exists() else 0
            raise CheckpointError(
                f"{self.path / file}: truncated or corrupt ({size} bytes): {error}", file=file
            ) from error

    def read(self) -> Iterator[tuple[StoredTensor, Tensor]]:
        """All tensors, file by file, one at a time."""
        by_file: dict[str, list[StoredTensor]] = {}
        for tensor in self.tensors.values():
            by_file.setdefault(tensor.file, []).append(tensor)
        for file, tensors in by_file.items():
            with self._open(file) as handle:
                for tensor in tensors:
                    yield tensor, handle.get_tensor(tensor.name)
