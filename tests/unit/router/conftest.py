# SPDX-License-Identifier: Apache-2.0
"""What the router's tests share."""

from pathlib import Path

import pytest

from tests.support.byte_tokenizer import write_byte_tokenizer


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the byte-level tokenizer."""
    return write_byte_tokenizer(tmp_path_factory.mktemp("byte-tokenizer"))
