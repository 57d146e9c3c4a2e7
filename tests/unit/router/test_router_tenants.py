# SPDX-License-Identifier: Apache-2.0
"""Who a caller is, what its tenant may do and what it has used: over gRPC and HTTP, with workers that only pretend."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import openai
import pytest
import yaml
from openai import AsyncOpenAI

from tests.support.chat_world import chat_cluster, weather_chat, write_chat_model
from tests.support.fake_cluster import FakeCluster, collect, generate, prompt
from tests.support.waiting import until
from twinpool.client import Client, request
from twinpool.cluster_client import ClusterClient
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.router.tenants import Tenants, read_tenants
from twinpool.router_client import RouterClient
from twinpool.rpc import Caller, digest_of, new_key
from twinpool.v1 import chat_pb2, chat_pb2_grpc, inference_pb2_grpc
from twinpool.v1 import inference_pb2 as pb

RED, BLUE = "tp-red-key", "tp-blue-key"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


def write(path: Path, *tenants: dict[str, object]) -> Path:
    """Replaces the file as an operator's tool would: whole, at once."""
    part = path.with_suffix(".part")
    part.write_text(yaml.safe_dump({"tenants": list(tenants)}))
    part.rename(path)
    return path


def red(**fields: object) -> dict[str, object]:
    return {"name": "red", "keys": [digest_of(RED)]} | fields


def blue(**fields: object) -> dict[str, object]:
    return {"name": "blue", "keys": [digest_of(BLUE)]} | fields


@asynccontextmanager
async def guarded(
    model: Path, tmp_path: Path, *tenants: dict[str, object], **settings: object
) -> AsyncIterator[FakeCluster]:
    path = write(tmp_path / "tenants.yaml", *tenants)
    async with chat_cluster(model, "abc", tenants_file=str(path), **settings) as cluster:
        yield cluster


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def reason(cluster: FakeCluster, request: pb.GenerateRequest, key: str = "") -> str:
    """Why a request is refused; "" if it is not."""
    answer = await collect(cluster.stub.Generate(request, metadata=bearer(key) if key else ()))
    return answer.error.reason if answer.error is not None else ""


# --- the file -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[", "is not YAML"),
        ("tenants: 5", "tenants"),
        ("tenants: [{name: a, surprise: 1}]", "surprise"),
        ("tenants: [{name: 'a/b'}]", "name"),
        ("tenants: [{name: a}, {name: a}]", "shares its name"),
        ("tenants: [{name: a, keys: [secret]}]", "is not 'sha256:'"),
        ("tenants: [{name: a, weight: 0}]", "weight"),
        ("tenants: [{name: a, identities: ['']}]", "empty name"),
        (yaml.safe_dump({"tenants": [red(), red(name="x")]}), "shares its name, a key"),
    ],
)
def test_a_wrong_file_says_what_is_wrong_and_shows_no_key(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        read_tenants(str(path))
    assert "secret" not in caught.value.message
    with pytest.raises(ConfigError, match="cannot read"):
        Tenants(str(tmp_path / "missing"))


def test_keys_are_new_and_only_their_digests_are_kept() -> None:
    (one, digest), (other, _) = new_key(), new_key()
    assert one != other
    assert digest == digest_of(one)
    assert one not in digest


def test_a_renewed_file_is_taken_and_a_broken_one_is_not(tmp_path: Path) -> None:
    path = write(tmp_path / "tenants.yaml", red())
    tenants = Tenants(str(path))
    assert not tenants.refresh()
    write(path, red(), blue())
    assert tenants.refresh()
    assert tenants.admit(Caller(BLUE)) == "blue"
    path.write_text("tenants: 5")
    assert not tenants.refresh()
    assert tenants.admit(Caller(BLUE)) == "blue", "what was there stays"
    write(path, blue())
    assert tenants.refresh()
    with pytest.raises(TwinpoolError, match="UNAUTHENTICATED"):
        tenants.admit(Caller(RED))


def test_a_certificate_s_name_is_as_good_as_a_key(tmp_path: Path) -> None:
    tenants = Tenants(str(write(tmp_path / "tenants.yaml", red(identities=["agents.example"]))))
    assert tenants.admit(Caller(identities=("x", "agents.example"))) == "red"
    with pytest.raises(TwinpoolError, match="UNAUTHENTICATED"):
        tenants.admit(Caller(identities=("x",)))
    with pytest.raises(TwinpoolError, match="UNAUTHENTICATED"):
        tenants.admit(Caller("wrong", ("agents.example",)))


# --- over the wire ------------------------------------------------------------------------------


async def test_only_tenants_are_served_and_each_as_itself(model: Path, tmp_path: Path) -> None:
    async with guarded(model, tmp_path, red(), blue()) as cluster:
        assert await reason(cluster, generate()) == "UNAUTHENTICATED"
        assert await reason(cluster, generate(), "tp-wrong") == "UNAUTHENTICATED"
        assert await reason(cluster, generate(tenant="blue"), RED) == "PERMISSION_DENIED"
        assert not cluster.workers["p0"].prefills, "no work was started"
        assert await reason(cluster, generate(), RED) == ""
        assert await reason(cluster, generate(tenant="blue"), BLUE) == ""
        roots = {command.prompt.root_hash for command in cluster.workers["p0"].prefills}
        assert len(roots) == 2, "one tenant never hits what another has cached"
        for call in (
            cluster.stub.ListModels(pb.ListModelsRequest()),
            cluster.stub.Tokenize(pb.TokenizeRequest(text="x")),
            cluster.stub.Detokenize(pb.DetokenizeRequest()),
            cluster.stub.GetUsage(pb.GetUsageRequest()),
            cluster.stub.Warm(pb.WarmRequest(request=generate())),
            cluster.stub.Cancel(pb.CancelRequest(token=b"x")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        chats = chat_pb2_grpc.ChatServiceStub(cluster.channel)
        for stream in (
            cluster.stub.Resume(pb.ResumeRequest(token=b"x")),
            chats.Resume(chat_pb2.ChatServiceResumeRequest(token=b"x")),
            chats.Chat(weather_chat()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stream:
                    pass
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_a_chat_is_its_tenant_s_own(model: Path, tmp_path: Path) -> None:
    async with guarded(model, tmp_path, red(), blue()) as cluster:
        asked = weather_chat()
        asked.request.idempotency_key = "k"
        chats = chat_pb2_grpc.ChatServiceStub(cluster.channel)
        events = [event async for event in chats.Chat(asked, metadata=[("x-api-key", RED)])]
        again = chat_pb2.ChatServiceResumeRequest(token=events[0].started.resume_token)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in chats.Resume(again, metadata=[("x-api-key", BLUE)]):
                pass
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
        rest = [event.response async for event in chats.Resume(again, metadata=[("x-api-key", RED)])]
        assert "".join(event.delta.content for event in rest) == "abc"
        others = [event async for event in chats.Chat(asked, metadata=[("x-api-key", BLUE)])]
        assert others[0].started.request_id != events[0].started.request_id, "keys are a tenant's own"


async def test_our_own_clients_show_a_key(model: Path, tmp_path: Path) -> None:
    async with guarded(model, tmp_path, red()) as cluster:
        endpoint = cluster.router.endpoint
        async with Client(endpoint, key=RED) as client:
            assert [found.name for found in await client.models()] == ["fake"]
            assert (await client.complete(request("x", max_tokens=9))).texts == ["abc"]
        async with ClusterClient([endpoint], key=RED) as client:
            assert (await client.complete(request("x", max_tokens=9))).texts == ["abc"]
        async with Client(endpoint) as client:
            with pytest.raises(TwinpoolError, match="UNAUTHENTICATED"):
                await client.models()


async def test_only_operators_see_what_everybody_asks(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "operators.yaml"
    path.write_text(yaml.safe_dump({"tenants": [red()], "operators": {"keys": [digest_of(BLUE)]}}))
    async with chat_cluster(model, "abc", tenants_file=str(path)) as cluster:
        assert await reason(cluster, generate(request_id="mine"), RED) == ""
        async with RouterClient(cluster.router.endpoint, key=BLUE) as client:
            assert (await client.trace("mine")).state == "Finished"
            assert len((await client.inspect()).workers) == 2
        for key in ("", RED):
            async with RouterClient(cluster.router.endpoint, key=key) as client:
                for call in (client.trace("mine"), client.inspect()):
                    with pytest.raises(TwinpoolError, match="UNAUTHENTICATED"):
                        await call
        assert await reason(cluster, generate(), BLUE) == "UNAUTHENTICATED", "an operator is no tenant"


async def test_over_http(model: Path, tmp_path: Path) -> None:
    async with guarded(model, tmp_path, red(), blue(models=["other"])) as cluster:
        base = f"http://{cluster.router.apis.http_endpoint}/v1"
        ask = [{"role": "user", "content": "x"}]
        async with AsyncOpenAI(base_url=base, api_key=RED, max_retries=0) as client:
            answer = await client.chat.completions.create(model="fake", messages=ask, max_tokens=9)  # type: ignore[arg-type]
            assert answer.choices[0].message.content == "abc"
            assert [found.id async for found in client.models.list()] == ["fake"]
        async with AsyncOpenAI(base_url=base, api_key=BLUE, max_retries=0) as client:
            assert [found.id async for found in client.models.list()] == []
            with pytest.raises(openai.PermissionDeniedError):
                await client.completions.create(model="fake", prompt="x")
        async with AsyncOpenAI(base_url=base, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="fake", messages=ask)  # type: ignore[arg-type]
        async with aiohttp.ClientSession(f"http://{cluster.router.apis.http_endpoint}") as session:
            async with session.post(
                "/v1/completions", json={"prompt": "x"}, headers={"x-api-key": RED}
            ) as found:
                assert found.status == 200
            async with session.get("/health") as found:
                assert found.status == 200, "a probe has no key"


async def test_limits_of_a_tenant_are_its_own(model: Path, tmp_path: Path) -> None:
    async with guarded(model, tmp_path, red(max_requests=1, max_priority=3), blue()) as cluster:
        cluster.workers["d0"].script.hold_after_tokens = 2
        first = cluster.stub.Generate(generate(prompt(20, 1), max_tokens=30), metadata=bearer(RED))
        await first.read()
        assert await reason(cluster, generate(prompt(20, 2)), RED) == "TENANT_CONCURRENCY"
        second = cluster.stub.Generate(generate(prompt(20, 3), max_tokens=30), metadata=bearer(BLUE))
        await second.read()
        first.cancel()
        second.cancel()
        await until(lambda: not cluster.held())
        cluster.workers["d0"].script.hold_after_tokens = None
        path = tmp_path / "tenants.yaml"
        write(path, red(max_requests=5), blue())
        await until(lambda: cluster.router.tenants.all[0].max_requests == 5)


async def test_a_key_is_changed_without_an_error(model: Path, tmp_path: Path) -> None:
    """Old and new key side by side, then the new one alone: requests with a valid key never fail."""
    async with guarded(model, tmp_path, red()) as cluster:
        path, fresh = tmp_path / "tenants.yaml", "tp-fresh"
        both = red(keys=[digest_of(RED), digest_of(fresh)])
        write(path, both)
        while await reason(cluster, generate(), fresh):
            assert await reason(cluster, generate(), RED) == ""
        write(path, red(keys=[digest_of(fresh)]))
        while not await reason(cluster, generate(), RED):
            assert await reason(cluster, generate(), fresh) == ""
        assert await reason(cluster, generate(), fresh) == ""


async def test_tenants_that_share_a_cache_share_it_alone(model: Path, tmp_path: Path) -> None:
    third = {"name": "green", "keys": [digest_of("tp-green")]}
    async with guarded(model, tmp_path, red(cache="team"), blue(cache="team"), third) as cluster:
        for key in (RED, BLUE, "tp-green"):
            assert await reason(cluster, generate(), key) == ""
        roots = [command.prompt.root_hash for command in cluster.workers["p0"].prefills]
        assert roots[0] == roots[1] != roots[2]


async def test_usage(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "usage.jsonl"
    async with guarded(model, tmp_path, red(), blue(), usage_file=str(log)) as cluster:
        cluster.workers["p0"].script.prefill_cached_tokens = 16
        for number in range(3):
            assert await reason(cluster, generate(prompt(20 + number), max_tokens=9), RED) == ""
        usage = await cluster.stub.GetUsage(pb.GetUsageRequest(), metadata=bearer(RED))
        assert usage == pb.GetUsageResponse(
            tenant="red", requests=3, prompt_tokens=63, cached_tokens=48, completion_tokens=12
        )
        usage = await cluster.stub.GetUsage(pb.GetUsageRequest(tenant="blue"), metadata=bearer(BLUE))
        assert usage == pb.GetUsageResponse(tenant="blue")
        with pytest.raises(grpc.aio.AioRpcError, match="another tenant"):
            await cluster.stub.GetUsage(pb.GetUsageRequest(tenant="blue"), metadata=bearer(RED))
        # A request that is repeated under its key attaches to the first one: its tokens are sent again, and it is no other request.
        keyed = generate(prompt(20), max_tokens=9, idempotency_key="k")
        for _ in range(2):
            assert await reason(cluster, keyed, BLUE) == ""
        twice = cluster.router.usage.totals("blue")
        assert (twice.requests, twice.prompt_tokens, twice.completion_tokens) == (1, 20, 8)
        # One that the client has left is counted up to there.
        cluster.workers["d0"].script.hold_after_tokens = 2
        call = cluster.stub.Generate(generate(prompt(30), max_tokens=30), metadata=bearer(RED))
        async for event in call:
            if (
                event.WhichOneof("event") == "tokens"
                and event.tokens.offset + len(event.tokens.token_ids) == 2
            ):
                break
        call.cancel()
        await until(lambda: cluster.router.usage.totals("red").requests == 4)
        assert cluster.router.usage.totals("red").completion_tokens == 14
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines = [line for line in lines if line["tenant"] == "red"]
    assert [(line["tenant"], line["ended"], line["completion_tokens"]) for line in lines] == [
        ("red", "finished", 4), ("red", "finished", 4), ("red", "finished", 4), ("red", "incomplete", 2),
    ]  # fmt: skip


async def test_without_a_file_everybody_is_served_under_the_name_it_gives(model: Path) -> None:
    async with chat_cluster(model, "abc", max_usage_tenants=2) as cluster:
        for name in ("a", "b", "c", "d"):
            assert await reason(cluster, generate(tenant=name)) == ""
        assert cluster.router.usage.totals("a").requests == 1
        assert cluster.router.usage.totals("c").requests == 2, "those beyond the limit share one entry"


# --- other calls --------------------------------------------------------------------------------


async def test_warm_and_detokenize(model: Path) -> None:
    async with chat_cluster(model, "abc") as cluster:
        request = generate(prompt(40), max_tokens=200, n=3)
        warmed = await cluster.stub.Warm(pb.WarmRequest(request=request))
        assert warmed.prompt_tokens == 40
        command = cluster.workers["p0"].prefills[0]
        assert (command.draw.n, command.draw.stop.max_tokens) == (1, 1)
        await cluster.assert_quiescent()
        text = await cluster.stub.Detokenize(
            pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=[*"Grüß".encode(), 257]))
        )
        assert text.text == "Grüß"
        kept = await cluster.stub.Detokenize(
            pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=[257]), keep_special_tokens=True)
        )
        assert kept.text == "<|eos|>"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.stub.Detokenize(pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=[9999])))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_every_call_of_the_service_is_registered() -> None:
    from twinpool.router.service import InferenceService

    methods = pb.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name
    assert all(hasattr(InferenceService, name) for name in methods)
    assert {name for name in dir(inference_pb2_grpc.InferenceServiceServicer) if name[0].isupper()} == set(
        methods
    )
