# SPDX-License-Identifier: Apache-2.0
"""The page of what clients call: each feature's row names tests that exist, and every method has its line."""

import re
from pathlib import Path

from twinpool.v1 import chat_pb2, inference_pb2
from twinpool.v1.kserve import open_inference_pb2

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "api.md").read_text()


def test_every_feature_names_tests_that_exist() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and ".py`" in line]
    assert len(rows) >= 10
    named = {path for row in rows for path in re.findall(r"`([\w/]+\.py)`", row)}
    assert [path for path in sorted(named) if not (ROOT / "tests" / path).is_file()] == []


def test_every_method_of_a_client_has_its_line() -> None:
    for module, service in (
        (inference_pb2, "InferenceService"),
        (chat_pb2, "ChatService"),
        (open_inference_pb2, "GRPCInferenceService"),
    ):
        for method in module.DESCRIPTOR.services_by_name[service].methods_by_name:
            assert f"{method}`" in PAGE, method
