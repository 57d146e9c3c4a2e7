# SPDX-License-Identifier: Apache-2.0
"""A real router over fake workers: gRPC on both sides, no model, no store."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio

from tests.support.fake_worker import Fabric, FakeWorker, Script
from tests.support.waiting import until
from twinpool.config import TwinpoolConfig
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.live_config import LiveConfig
from twinpool.router.app import Router
from twinpool.v1 import control_pb2, inference_pb2_grpc
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import worker_pb2 as worker


class Answer:
    """What a client got: events in their order, and the error that ended them, if one did."""

    def __init__(self) -> None:
        self.events: list[pb.GenerateResponse] = []
        self.error: TwinpoolError | None = None
        self.code: grpc.StatusCode | None = None

    @property
    def started(self) -> pb.GenerateStarted:
        assert self.events, f"no event; error {self.error}"
        return self.events[0].started

    @property
    def finished(self) -> pb.GenerateFinished:
        assert self.error is None, self.error
        assert self.events[-1].WhichOneof("event") == "finished"
        return self.events[-1].finished

    def tokens(self, index: int = 0) -> list[int]:
        """Token ids of a choice; fails if an offset was skipped or repeated."""
        ids: list[int] = []
        for event in self.events:
            if event.WhichOneof("event") == "tokens" and event.tokens.index == index:
                assert event.tokens.offset == len(ids)
                ids += event.tokens.token_ids
        return ids

    def text(self, index: int = 0) -> str:
        return "".join(event.tokens.text for event in self.events if event.tokens.index == index)

    @property
    def reason(self) -> str:
        """Reason of the error; fails if there was none."""
        assert self.error is not None, "the request succeeded"
        return self.error.reason


class FakeCluster:
    """``workers`` by name; ``router`` and a ``stub`` to it."""

    def __init__(self, router: Router, fabric: Fabric, live: LiveConfig) -> None:
        self.router = router
        self.live = live
        self.fabric = fabric
        self.workers: dict[str, FakeWorker] = {}
        self.channel = grpc.aio.insecure_channel(
            router.endpoint,
            [("grpc.max_send_message_length", 64 << 20), ("grpc.max_receive_message_length", 64 << 20)],
        )
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)

    async def add(
        self, name: str, role: "worker.Role.ValueType", script: Script | None = None, **record: object
    ) -> FakeWorker:
        """Starts a fake worker and registers it."""
        made = self.workers[name] = FakeWorker(name, role, self.fabric, script, **record)
        await made.start()
        self.router.fleet.upsert(made.record())
        return made

    def apply(self, **values: object) -> None:
        """Other keys of the router's section, as an operator applies them."""
        applied = {f"router.{name}": value for name, value in values.items()}
        assert self.live.take(self.live.generation + 1, applied), self.live.refusal

    async def ready(self) -> None:
        """Every worker's stream is up, every tokenizer is loaded."""
        keys = [made.key for made in self.workers.values()]
        await until(
            lambda: (
                all((session := self.router.fleet.session(key)) and session.up for key in keys)
                and self.router.models.servable
            )
        )

    async def ask(self, request: pb.GenerateRequest, timeout: float | None = 120.0) -> Answer:
        """One request, to its end."""
        return await collect(self.stub.Generate(request, timeout=timeout))

    def held(self) -> dict[str, set[tuple[str, int]]]:
        """Attempts that workers hold something for."""
        return {name: made.held for name, made in self.workers.items() if made.held}

    async def assert_quiescent(self) -> None:
        """Nothing of any request is left anywhere."""
        core = self.router.core
        await until(lambda: not self.held())
        await until(lambda: not len(self.router.background))
        await until(lambda: self.router.admission.active == 0)
        stats = core.stats()
        assert stats["requests"] == 0, stats
        assert stats["reservations"] == 0, stats
        for key in (made.key for made in self.workers.values()):
            session = self.router.fleet.session(key)
            assert session is None or session.legs == 0


async def collect(call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]") -> Answer:
    """Reads a call to its end."""
    answer = Answer()
    try:
        async for event in call:
            answer.events.append(event)
        answer.code = grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        answer.error, answer.code = from_rpc_error(error), error.code()
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
        answer.error, answer.code = TwinpoolError("CANCELLED"), grpc.StatusCode.CANCELLED
    return answer


def prompt(length: int = 20, seed: int = 0) -> list[int]:
    """Token ids; another first token for each seed, so that no two seeds share a block."""
    return [(seed * 7 + at) % 250 for at in range(length)]


def generate(
    tokens: Iterable[int] | None = None, *, max_tokens: int | None = 4, **fields: object
) -> pb.GenerateRequest:
    """A request with token ids; other fields by name."""
    request = pb.GenerateRequest(**fields)  # type: ignore[arg-type]
    if request.WhichOneof("prompt") is None:
        request.token_ids.ids.extend(prompt() if tokens is None else tokens)
    if max_tokens is not None:
        request.stop.max_tokens = max_tokens
    return request


@asynccontextmanager
async def fake_cluster(
    model_path: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    prefill_script: Script | None = None,
    decode_script: Script | None = None,
    settings: dict[str, object] | None = None,
    pools: dict[str, object] | None = None,
    audit_file: str = os.devnull,
    **record: object,
) -> AsyncIterator[FakeCluster]:
    """A router with so many fake workers of each role, all ready. ``record``: fields of the workers' records; ``settings`` and
    ``pools``: those sections of its configuration.

    ``audit_file``: of the router, whose log would else be mixed with what a command prints in this process."""
    config = TwinpoolConfig(
        # A hand-off each, unless a test is about the other way.
        router={"cancel_timeout_seconds": 1.0, "local_prefill": False, **(settings or {})},  # type: ignore[arg-type]
        rpc={"connect_timeout_seconds": 2.0},  # type: ignore[arg-type]
        audit={"file": audit_file},  # type: ignore[arg-type]
        pools=pools or {},  # type: ignore[arg-type]
    )
    live = LiveConfig(config)
    router = Router(live.following, "router-test")
    live.on_change(router.prepare)
    await router.start()
    cluster = FakeCluster(router, Fabric(), live)
    fields: dict[str, object] = {"model_path": str(model_path)} | record
    try:
        for number in range(prefill):
            await cluster.add(f"p{number}", worker.ROLE_PREFILL, prefill_script, **fields)
        for number in range(decode):
            await cluster.add(f"d{number}", worker.ROLE_DECODE, decode_script, **fields)
        if prefill and decode:
            await cluster.ready()
        await router.serve()
        yield cluster
    finally:
        await cluster.channel.close(None)
        await router.stop(0.0)
        for made in cluster.workers.values():
            await made.kill()


DRAINING = control_pb2.WORKER_STATE_DRAINING
