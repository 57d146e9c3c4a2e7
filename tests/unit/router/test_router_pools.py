# SPDX-License-Identifier: Apache-2.0
"""A router with several pools: short and long prompts apart, urgent requests apart, another model beside."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
from prometheus_client import REGISTRY
from rich.console import Console

from tests.support.fake_cluster import FakeCluster, fake_cluster, generate, prompt
from tests.support.fake_pair import fake_pair, whole
from tests.support.fake_worker import Script
from tests.support.waiting import until
from twinpool.control.cli import trace as trace_module
from twinpool.ids import WorkerKey
from twinpool.v1 import inference_pb2, router_pb2, router_pb2_grpc, telemetry_pb2
from twinpool.v1 import worker_pb2 as pb

LONG = 64
POOLS: dict[str, object] = {
    "prompt_tokens_most": LONG - 1,
    "further": {
        "long": {"prompt_tokens_least": LONG},
        "urgent": {"prompt_tokens_most": LONG - 1, "priority_least": 50},
        "other": {"model": {"name": "other"}},
    },
}


@asynccontextmanager
async def several(
    checkpoint: Path,
    script: Script | None = None,
    pools: dict[str, object] | None = None,
    settings: dict[str, object] | None = None,
    **record: object,
) -> AsyncIterator[FakeCluster]:
    """A pair of workers for each pool; ``script`` and ``record`` are those of the default pool's workers."""
    async with fake_cluster(checkpoint, prefill=0, decode=0, settings=settings, pools=pools or POOLS) as made:
        for pool in ("default", "long", "urgent", "other"):
            own: dict[str, object] = record if pool == "default" else {}
            fields = {"pool": pool, "model": "other" if pool == "other" else "fake"} | own
            fields = {"model_path": str(checkpoint)} | fields
            for side, role in (("p", pb.ROLE_PREFILL), ("d", pb.ROLE_DECODE)):
                await made.add(f"{pool}-{side}", role, script if pool == "default" else None, **fields)
        await made.ready()
        await until(lambda: all(members.servable for members in made.router.models._members.values()))
        yield made


def worked(made: FakeCluster) -> dict[str, int]:
    """Requests of each pool's workers, which agree."""
    counts = {name: len(each.prefills) + len(each.decodes) for name, each in made.workers.items()}
    assert all(counts[f"{name[:-2]}-p"] == counts[name] for name in counts)
    return {name[:-2]: count for name, count in counts.items() if name.endswith("-d") and count}


async def trace(made: FakeCluster, request_id: str) -> router_pb2.TraceRequestResponse:
    stub = router_pb2_grpc.RouterServiceStub(made.channel)
    return await stub.TraceRequest(router_pb2.TraceRequestRequest(request_id=request_id), timeout=10)


async def test_model_then_length_then_priority(
    model_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with several(model_path) as made:
        wanted: dict[str, tuple[int, dict[str, object]]] = {
            "default": (LONG - 1, {"model": "fake", "priority": 49}),
            "long": (LONG, {"model": "fake", "priority": 50}),
            "urgent": (LONG - 1, {"model": "fake", "priority": 50}),
            "other": (2 * LONG, {"model": "other"}),
        }
        for number, (pool, (length, fields)) in enumerate(wanted.items()):
            answer = await made.ask(generate(prompt(length, number), request_id=pool, **fields))
            assert answer.code == grpc.StatusCode.OK, answer.error
            assert (await trace(made, pool)).pool == pool
        assert worked(made) == dict.fromkeys(wanted, 1)
        found = await trace(made, "urgent")
        assert found.pool_reason == f"takes prompts of 0 to {LONG - 1} tokens, priorities 50 to 100"
        assert (await trace(made, "other")).pool_reason == ""
        monkeypatch.setattr(trace_module, "out", Console(width=200))
        trace_module._print(found)
        assert f"pool urgent: it takes prompts of 0 to {LONG - 1} tokens" in capsys.readouterr().out
        await made.assert_quiescent()


async def test_a_tenant_gets_no_pool_beyond_its_priority(model_path: Path) -> None:
    """Priorities above a tenant's are lowered, and the lowered one counts."""
    settings: dict[str, object] = {"tenant_max_priority": 49}
    async with several(model_path, settings=settings) as made:
        answer = await made.ask(generate(prompt(20), model="fake", priority=60))
        assert answer.code == grpc.StatusCode.OK
        assert worked(made) == {"default": 1}


async def test_every_model_is_listed_once_and_none_is_taken_for_another(model_path: Path) -> None:
    async with several(model_path) as made:
        listed = (await made.stub.ListModels(inference_pb2.ListModelsRequest(), timeout=10)).models
        assert [(model.name, model.decode_workers) for model in listed] == [("fake", 3), ("other", 1)]
        unnamed = await made.ask(generate())
        assert unnamed.reason == "INVALID_ARGUMENT"
        assert "fake, other" in str(unnamed.error)
        assert (await made.ask(generate(model="third"))).reason == "MODEL_NOT_FOUND"


async def test_a_pool_that_is_full_holds_up_no_other(model_path: Path) -> None:
    """One slot, and a request that keeps it: what waits there waits alone."""
    script = Script(hold_after_tokens=2)
    async with several(model_path, script, max_num_seqs=1) as made:
        first = asyncio.ensure_future(made.ask(generate(prompt(20), model="fake")))
        await until(lambda: made.workers["default-d"].held)
        waiting = asyncio.ensure_future(made.ask(generate(prompt(20, 1), model="fake", request_id="waits")))
        await until(lambda: made.router.core.queues())
        for number, fields in enumerate(({"model": "other"}, {"model": "fake", "priority": 60}), start=2):
            answer = await made.ask(generate(prompt(20, number), **fields))
            assert answer.code == grpc.StatusCode.OK
        answer = await made.ask(generate(prompt(LONG, 5), model="fake"))
        assert answer.code == grpc.StatusCode.OK
        assert not waiting.done()
        told = await telemetry(made)
        queues = {
            each.pool: (each.queued_requests, each.queued_tokens, each.running_requests) for each in told
        }
        assert queues["default"] == (1, 20, 1)
        assert queues["long"] == (0, 0, 0)
        gauge = "twinpool_router_pool_num_requests_waiting"
        labels = {"pool": "default", "model": "fake"}
        await until(lambda: REGISTRY.get_sample_value(gauge, labels) == 1)
        first.cancel()
        waiting.cancel()
        await asyncio.gather(first, waiting, return_exceptions=True)
        await made.assert_quiescent()
        await until(lambda: REGISTRY.get_sample_value(gauge, labels) == 0)


async def telemetry(made: FakeCluster) -> list[telemetry_pb2.PoolQueue]:
    stub = router_pb2_grpc.RouterServiceStub(made.channel)
    return list((await stub.GetTelemetry(router_pb2.GetTelemetryRequest(), timeout=10)).telemetry.pools)


async def test_times_are_counted_by_pool(model_path: Path) -> None:
    def count(pool: str) -> float:
        name, labels = (
            "twinpool_router_pool_time_to_first_token_seconds_count",
            {"pool": pool, "model": "fake"},
        )
        return REGISTRY.get_sample_value(name, labels) or 0.0

    async with several(model_path) as made:
        before = count("default"), count("long")
        await made.ask(generate(prompt(LONG), model="fake"))
        assert (count("default"), count("long")) == (before[0], before[1] + 1)


async def test_what_no_pool_takes_is_refused_with_what_they_take(model_path: Path) -> None:
    pools: dict[str, object] = {
        "prompt_tokens_most": 10,
        "further": {"long": {"prompt_tokens_least": LONG}, "urgent": {"priority_least": 50}, "other": {}},
    }
    pools["further"]["other"] = {"model": {"name": "other"}}  # type: ignore[index]
    async with several(model_path, pools=pools) as made:
        refused = await made.ask(generate(prompt(20), model="fake"))
        assert (refused.reason, refused.code) == ("NO_POOL", grpc.StatusCode.FAILED_PRECONDITION)
        assert "the prompt has 20 tokens and the priority is 0" in str(refused.error)
        assert worked(made) == {}


async def test_a_class_without_workers_is_refused_or_overflows(model_path: Path) -> None:
    async with several(model_path) as made:
        for side in "pd":
            made.router.fleet.remove(made.workers[f"long-{side}"].record())
        refused = await made.ask(generate(prompt(LONG), model="fake"))
        assert refused.reason == "NO_WORKERS"
        assert "no worker of pool long" in str(refused.error)
    spare = POOLS | {"overflow": True}
    async with several(model_path, pools=spare) as made:
        for side in "pd":
            made.router.fleet.remove(made.workers[f"long-{side}"].record())
        answer = await made.ask(generate(prompt(LONG), model="fake", request_id="spare"))
        assert answer.code == grpc.StatusCode.OK
        found = await trace(made, "spare")
        assert (found.pool, found.pool_reason) == (
            "default",
            "takes what overflows: its own pool has no workers",
        )


async def test_workers_of_pools_that_are_not_served_are_left_out(model_path: Path) -> None:
    async with fake_cluster(model_path, settings={"pools": ["default"]}, pools=POOLS) as made:
        foreign = made.workers["p0"].record()
        foreign.pool, foreign.worker.name = "long", "elsewhere"
        made.router.fleet.upsert(foreign)
        assert made.router.fleet.session(WorkerKey(foreign.worker.name, foreign.worker.incarnation)) is None


async def test_a_pool_reads_text_with_its_own_tokenizer(model_path: Path, tmp_path: Path) -> None:
    """Two checkpoints under one name: the text is read as the pool reads it that the request goes to."""
    path = shutil.copytree(model_path, tmp_path / "other") / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary: dict[str, int] = content["model"]["vocab"]
    # The same characters under other numbers.
    ids = sorted(set(vocabulary.values()) - {entry["id"] for entry in content["added_tokens"]})
    swapped = dict(zip(ids, reversed(ids), strict=True))
    content["model"]["vocab"] = {text: swapped.get(number, number) for text, number in vocabulary.items()}
    path.write_text(json.dumps(content))
    async with several(model_path, model_path=str(path.parent)) as made:
        texts = {"default": "a" * 10, "long": "a" * LONG}
        for text in texts.values():
            answer = await made.ask(generate(model="fake", text=text))
            assert answer.code == grpc.StatusCode.OK, answer.error
        default, long = (
            np.frombuffer(made.workers[f"{pool}-p"].prefills[0].prompt.token_ids, "<i4") for pool in texts
        )
        assert len(default) == len(texts["default"])
        assert default[-1] == swapped[long[-1]] != long[-1]


async def test_an_answer_that_moves_to_another_router_stays_in_its_pool(model_path: Path) -> None:
    """The other pool has more workers of the same format, and would be the first choice by the model alone."""
    pools: dict[str, object] = {"prompt_tokens_most": 39, "further": {"long": {"prompt_tokens_least": 40}}}
    script = Script(step_seconds=0.01)
    async with fake_pair(model_path, script=script, pools=pools, pool="long") as pair:
        for number in range(4):
            for side, role in (("p", pb.ROLE_PREFILL), ("d", pb.ROLE_DECODE)):
                fields: dict[str, object] = {"model_path": str(model_path)}
                made = await pair.one.add(f"default-{side}{number}", role, **fields)
                pair.other.router.fleet.upsert(made.record())
        await pair.one.ready()
        await pair.other.ready()
        asked = generate(prompt(40), max_tokens=60)
        asked.resume_grace.FromSeconds(60)
        stream = pair.generate(pair.other, asked)
        await stream.has(8)
        await stream.leave()
        again = pair.resume(pair.one, stream.token, stream.next_index())
        answer = await again.ended()
        assert answer.error is None
        assert len(whole(stream, again)[0]) == 60
        used = {name for name, each in pair.one.workers.items() if each.decodes}
        assert not [name for name in used if name.startswith("default")], used
        await pair.assert_quiescent()
