# SPDX-License-Identifier: Apache-2.0
import asyncio
import pickle
import re
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from hypothesis import given
from hypothesis import strategies as st

from twinpool.errors import (
    DOMAIN,
    TABLE,
    CheckpointError,
    ConfigError,
    TwinpoolError,
    as_twinpool_error,
    from_rpc_error,
    to_status,
)
from twinpool.errors.page import render

ROOT = Path(__file__).parents[3]


def as_rpc_error(error: TwinpoolError) -> grpc.aio.AioRpcError:
    status = to_status(error)
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    return grpc.aio.AioRpcError(error.code, grpc.aio.Metadata(), trailing, status.message)


def detail(error: TwinpoolError, kind: type[Any]) -> Any:
    found = [entry for entry in to_status(error).details if entry.Is(kind.DESCRIPTOR)]
    assert len(found) == 1
    message = kind()
    found[0].Unpack(message)
    return message


def test_page_is_what_the_table_gives() -> None:
    assert (ROOT / "docs" / "errors.md").read_text() == render(), (
        "run: python -m twinpool.errors > docs/errors.md"
    )


def test_reasons_are_unique_and_upper_snake() -> None:
    assert all(reason == spec.reason for reason, spec in TABLE.items())
    assert all(reason.replace("_", "").isalpha() and reason.isupper() for reason in TABLE)
    assert render().count("\n| `") == len(TABLE), "a reason twice in the groups"


@pytest.mark.parametrize("reason", sorted(TABLE))
def test_every_row_survives_the_wire(reason: str) -> None:
    sent = TwinpoolError(
        reason, f"because of {reason}", retry_after=1.5, metadata={"limit": 3}, field="stop.max_tokens"
    )
    got = from_rpc_error(as_rpc_error(sent))
    assert (got.reason, got.code, got.message) == (reason, TABLE[reason].code, f"because of {reason}")
    assert (got.retry_after, got.metadata, got.field) == (1.5, {"limit": "3"}, "stop.max_tokens")


def test_every_reason_in_the_sources_is_in_the_table() -> None:
    found: set[tuple[str, str]] = set()
    for folder in ("router", "prefill_worker", "decode_worker", "control", "engine", "transfer", "twinpool"):
        for path in (ROOT / folder).rglob("*.py"):
            for reason in re.findall(r'TwinpoolError\(\s*"([^"]+)"', path.read_text()):
                found.add((reason, str(path.relative_to(ROOT))))
    assert len(found) > 20
    assert [entry for entry in sorted(found) if entry[0] not in TABLE] == []


def test_details_are_the_standard_ones() -> None:
    error = TwinpoolError(
        "QUEUE_FULL", "the queue holds 3 of 3 requests", retry_after=2, metadata={"limit": "3"}
    )
    info = detail(error, ErrorInfo)
    assert (info.reason, info.domain, dict(info.metadata)) == ("QUEUE_FULL", DOMAIN, {"limit": "3"})
    assert detail(error, RetryInfo).retry_delay.ToSeconds() == 2
    violation = detail(
        TwinpoolError("INVALID_N", "n: 17 is above 16", field="n"), BadRequest
    ).field_violations[0]
    assert (violation.field, violation.description) == ("n", "n: 17 is above 16")


def test_an_unknown_reason_is_refused_at_once() -> None:
    with pytest.raises(KeyError):
        TwinpoolError("NO_SUCH_REASON")


@given(
    st.text(max_size=2000),
    st.dictionaries(st.text(max_size=300), st.text(max_size=300), max_size=20),
    st.floats(0, 1e6),
)
def test_the_status_always_fits_into_grpc_metadata(
    message: str, metadata: dict[str, str], delay: float
) -> None:
    error = TwinpoolError("INTERNAL", message, metadata=metadata, retry_after=delay, field="f" * 200)
    status = to_status(error)
    # gRPC sends the message percent-encoded beside the details, at worst three characters for each byte.
    assert len(status.SerializeToString()) + 3 * len(status.message.encode()) < 16 * 1024


def test_lone_surrogates_do_not_break_the_status() -> None:
    assert to_status(TwinpoolError("INVALID_TEXT", "bad \ud800")).message == "bad ?"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, "SERVER_UNREACHABLE"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
        (grpc.StatusCode.CANCELLED, "CANCELLED"),
        (grpc.StatusCode.UNKNOWN, "INTERNAL"),
    ],
)
def test_errors_of_grpc_itself_get_a_row(code: grpc.StatusCode, reason: str) -> None:
    got = from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "text"))
    assert (got.reason, got.message, got.metadata["grpc_code"]) == (reason, "text", code.name)


def test_a_reason_of_a_newer_server_keeps_its_message() -> None:
    status = to_status(TwinpoolError("NO_WORKERS", "hello"))
    info = ErrorInfo(reason="FROM_THE_FUTURE", domain=DOMAIN)
    status.details[0].Pack(info)
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    got = from_rpc_error(
        grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, "hello")
    )
    assert (got.reason, got.message) == ("SERVER_UNREACHABLE", "hello")
    assert got.metadata["reason"] == "FROM_THE_FUTURE"


def test_damaged_details_fall_back_to_the_code() -> None:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    got = from_rpc_error(
        grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, "x")
    )
    assert got.reason == "SERVER_UNREACHABLE"


@pytest.mark.parametrize(
    "error",
    [
        TwinpoolError("KV_FENCED", "m", retry_after=0.5, metadata={"a": "b"}, field="x"),
        ConfigError("kv.num_blocks: no", key="kv.num_blocks"),
        CheckpointError("truncated", file="model.safetensors", tensor="lm_head.weight"),
    ],
)
def test_pickle_keeps_everything(error: TwinpoolError) -> None:
    got = pickle.loads(pickle.dumps(error))
    assert type(got) is type(error)
    assert got.__dict__ == error.__dict__
    assert str(got) == str(error)


def test_unknown_exceptions_do_not_leak_their_text() -> None:
    got = as_twinpool_error(ValueError("the user's secret prompt"))
    assert got.reason == "INTERNAL"
    assert "secret" not in str(to_status(got))
    assert as_twinpool_error(TimeoutError()).reason == "DEADLINE_EXCEEDED"
    assert as_twinpool_error(asyncio.CancelledError()).reason == "CANCELLED"
    error = TwinpoolError("NO_WORKERS")
    assert as_twinpool_error(error) is error
