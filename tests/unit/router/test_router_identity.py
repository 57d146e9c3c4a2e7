# SPDX-License-Identifier: Apache-2.0
"""What a request says of its sender, beside its key and certificate, makes nobody of it: by gRPC and by HTTP."""

from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import yaml

from tests.support.chat_world import chat_cluster, write_chat_model
from tests.support.fake_cluster import FakeCluster, collect, generate
from tests.support.transports import each_transport  # noqa: F401
from tests.unit.router.test_router_tenants import BLUE, RED, blue, red
from twinpool.rpc import digest_of
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import router_pb2, router_pb2_grpc

OPERATOR = "tp-operator-key"
CLAIMS = {
    "x-tenant": "blue",
    "x-twinpool-tenant": "blue",
    "tenant": "blue",
    "x-tenant-id": "blue",
    "x-user-id": "blue",
    "x-forwarded-user": "blue",
    "x-remote-user": "blue",
    "x-auth-request-user": "blue",
    "x-forwarded-for": "10.0.0.1",
    "forwarded": "for=10.0.0.1;by=blue",
    "x-real-ip": "10.0.0.1",
    "x-forwarded-client-cert": 'Hash=00;Subject="CN=agents.blue";DNS=agents.blue',
    "x-ssl-client-s-dn": "CN=agents.blue",
    "x-ssl-client-verify": "SUCCESS",
    "x-operator": "true",
    "openai-organization": "blue",
    "openai-project": "blue",
    "cookie": f"authorization={BLUE}",
}
"""What proxies and other servers tell one another of a caller. ``agents.blue`` is an identity of the tenant blue."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


@pytest.fixture
def tenants(tmp_path: Path) -> str:
    path = tmp_path / "tenants.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "tenants": [red(), blue(identities=["agents.blue"])],
                "operators": {"keys": [digest_of(OPERATOR)], "identities": ["blue"]},
            }
        )
    )
    return str(path)


def roots(cluster: FakeCluster) -> list[bytes]:
    """What the block hashes of each prompt so far started from: it tells tenants apart."""
    return [command.prompt.root_hash for command in cluster.workers["p0"].prefills]


def metadata(key: str, claims: dict[str, str]) -> tuple[tuple[str, str], ...]:
    shown = {"authorization": f"Bearer {key}"} if key else {}
    return tuple((shown | claims).items())


async def test_by_grpc(model: Path, tenants: str) -> None:
    async with chat_cluster(model, "abc", tenants_file=tenants) as cluster:
        for claims in ({}, CLAIMS):
            answer = await collect(cluster.stub.Generate(generate(), metadata=metadata(RED, claims)))
            assert answer.error is None
        plain, claimed = roots(cluster)
        assert plain == claimed
        assert cluster.router.usage.totals("red").requests == 2
        usage = await cluster.stub.GetUsage(pb.GetUsageRequest(), metadata=metadata(RED, CLAIMS))
        assert usage.tenant == "red"
        refused = await collect(cluster.stub.Generate(generate(), metadata=metadata("", CLAIMS)))
        assert refused.reason == "UNAUTHENTICATED"
        answer = await collect(cluster.stub.Generate(generate(tenant="blue"), metadata=metadata(RED, CLAIMS)))
        assert answer.reason == "PERMISSION_DENIED"
        for key in ("", RED):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await router_pb2_grpc.RouterServiceStub(cluster.channel).InspectRouter(
                    router_pb2.InspectRouterRequest(), metadata=metadata(key, CLAIMS)
                )
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert cluster.router.usage.totals("blue").requests == 0


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
async def test_by_http(model: Path, tenants: str, path: str) -> None:
    body: dict[str, Any] = {
        "chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
        "completions": {"prompt": "x", "max_tokens": 9},
        "responses": {"input": "x", "max_output_tokens": 9},
    }[path] | {"model": "fake"}
    named = {"user": "blue", "metadata": {"tenant": "blue"}, "safety_identifier": "blue"}
    async with (
        chat_cluster(model, "abc", tenants_file=tenants) as cluster,
        aiohttp.ClientSession(f"http://{cluster.router.apis.http_endpoint}") as session,
    ):

        async def ask(body: dict[str, Any], key: str, claims: dict[str, str]) -> int:
            headers = dict(metadata(key, claims))
            async with session.post(f"/v1/{path}", json=body, headers=headers) as answer:
                return answer.status

        assert await ask(body, RED, {}) == 200
        assert await ask(body | named, RED, CLAIMS) == 200
        assert await ask(body | named, "", CLAIMS) == 401
        assert await ask(body | {"tenant": "blue"}, RED, CLAIMS) == 400, "no body has a tenant"
        async with session.post(f"/v1/{path}?tenant=blue&api_key={BLUE}", json=body) as answer:
            assert answer.status == 401
        plain, claimed = roots(cluster)
        assert plain == claimed
        assert cluster.router.usage.totals("red").requests == 2
        assert cluster.router.usage.totals("blue").requests == 0


async def test_without_tenants_they_count_for_nothing_either(model: Path) -> None:
    async with (
        chat_cluster(model, "abc") as cluster,
        aiohttp.ClientSession(f"http://{cluster.router.apis.http_endpoint}") as session,
    ):
        for claims in ({}, CLAIMS):
            body = {"model": "fake", "prompt": "x", "max_tokens": 9}
            async with session.post("/v1/completions", json=body, headers=claims) as answer:
                assert answer.status == 200
            request = generate([*b"x"], max_tokens=9)
            assert (
                await collect(cluster.stub.Generate(request, metadata=metadata("", claims)))
            ).error is None
        assert len(set(roots(cluster))) == 1


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
async def test_who_is_no_tenant_is_told_of_no_model(model: Path, tenants: str, path: str) -> None:
    body = {"model": "other", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x"}
    wanted = {"chat/completions": "messages", "completions": "prompt", "responses": "input"}[path]
    async with (
        chat_cluster(model, "abc", tenants_file=tenants, http_port=0) as cluster,
        aiohttp.ClientSession(f"http://{cluster.router.apis.http_endpoint}") as session,
    ):
        asked = {"model": "other", wanted: body[wanted]}
        async with session.post(f"/v1/{path}", json=asked) as answer:
            assert answer.status == 401
            assert "fake" not in await answer.text()
        async with session.post(
            f"/v1/{path}", json=asked, headers={"Authorization": f"Bearer {RED}"}
        ) as answer:
            assert answer.status == 404
