# SPDX-License-Identifier: Apache-2.0
"""What a router writes down of operators who look into others' requests."""

import json
from pathlib import Path

import pytest
import yaml

from tests.support.chat_world import chat_cluster, write_chat_model
from tests.unit.router.test_router_tenants import BLUE, RED, bearer, red
from twinpool import metrics
from twinpool.errors import TwinpoolError
from twinpool.router_client import RouterClient
from twinpool.rpc import digest_of
from twinpool.v1 import inference_pb2
from twinpool.v1 import router_pb2 as pb

SECRET = "nobody is to read this"


async def test_inspection_is_written_down_without_prompts_and_keys(tmp_path: Path) -> None:
    path, tenants = tmp_path / "audit.jsonl", tmp_path / "tenants.yaml"
    model = write_chat_model(tmp_path / "model")
    tenants.write_text(yaml.safe_dump({"tenants": [red()], "operators": {"keys": [digest_of(BLUE)]}}))
    settings = {"tenants_file": str(tenants), "record_bytes": 1 << 20}
    async with chat_cluster(model, "abc", audit_file=str(path), **settings) as cluster:
        request = inference_pb2.GenerateRequest(text=SECRET, request_id="mine")
        call = cluster.stub.Generate(request, metadata=bearer(RED))
        assert [event async for event in call]
        endpoint = cluster.router.endpoint
        async with RouterClient(endpoint, key=BLUE) as operator:
            await operator.inspect()
            await operator.trace("mine")
            await operator.lookup(pb.LookupPrefixRequest(text=SECRET, tenant="red", model="fake"))
            assert [piece async for piece in operator.recording()]
            with pytest.raises(TwinpoolError, match="REQUEST_NOT_FOUND"):
                await operator.trace("theirs")
        async with RouterClient(endpoint, key=RED) as tenant:
            with pytest.raises(TwinpoolError, match="UNAUTHENTICATED"):
                await tenant.trace("mine")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["method"], line["target"], line["code"]) for line in lines] == [
        ("RouterService/InspectRouter", "", "OK"),
        ("RouterService/TraceRequest", "mine", "OK"),
        ("RouterService/LookupPrefix", "red", "OK"),
        ("RouterService/FetchRecording", "", "OK"),
        ("RouterService/TraceRequest", "theirs", "NOT_FOUND"),
        ("RouterService/TraceRequest", "mine", "UNAUTHENTICATED"),
    ]
    assert lines[0]["process"] == "router-test"
    assert {line["who"]["key"] for line in lines} == {digest_of(BLUE)[:23], digest_of(RED)[:23]}
    for private in (SECRET, BLUE, RED):
        assert private not in path.read_text()


async def test_who_looks_is_answered_though_the_audit_log_is_full(tmp_path: Path) -> None:
    before = metrics.AUDIT_WRITE_FAILURES._value.get()
    model = write_chat_model(tmp_path / "model")
    async with (
        chat_cluster(model, "abc", audit_file="/dev/full") as cluster,
        RouterClient(cluster.router.endpoint) as operator,
    ):
        assert (await operator.inspect()).router == "router-test"
    assert metrics.AUDIT_WRITE_FAILURES._value.get() == before + 1
