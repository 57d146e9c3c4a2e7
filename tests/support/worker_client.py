# SPDX-License-Identifier: Apache-2.0
"""Plays the router against real worker processes: starts them, speaks their session, checks every token."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from tests.support.quiescence import inspect
from tests.support.worker_commands import draw_spec, prompt_spec, set_deadline
from twinpool import rpc
from twinpool._core import root_hash
from twinpool.config import RpcConfig, TwinpoolConfig, load_config, to_env
from twinpool.ids import new_incarnation
from twinpool.store import Keys, Store
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1 import worker_pb2_grpc
from twinpool.v1.control_pb2 import WORKER_STATE_READY, WorkerRecord

START_SECONDS = 60.0
ANSWER_SECONDS = 60.0

_ENTRY = """
import sys
from twinpool.config import load_config
from twinpool.launch import run_process
sys.exit(run_process(sys.argv[1], load_config()))
"""


@dataclass
class WorkerProcess:
    """A worker process and the record it has put into etcd."""

    name: str
    role: str
    config: TwinpoolConfig
    log: Path
    process: subprocess.Popen[bytes]
    record: WorkerRecord = field(default_factory=WorkerRecord)

    @property
    def endpoint(self) -> str:
        return self.record.endpoint

    def logs(self) -> str:
        return self.log.read_text(errors="replace")[-8000:]

    def stop(self, seconds: float = 20.0) -> int:
        """SIGTERM; the exit status. Fails if the process does not end in time."""
        self.process.terminate()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not stop in {seconds} s\n{self.logs()}") from None

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()


def start_worker(
    role: str,
    name: str,
    model: Path,
    store: str,
    directory: Path,
    settings: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> WorkerProcess:
    """Starts a process; it is not ready yet. Small poisoned pools, digests on. ``environment`` is added to this one's."""
    overrides: dict[str, object] = {
        "cluster.name": "test",
        "cluster.etcd_endpoints": store,
        "model.path": str(model),
        "kv.num_blocks": 40,
        "kv.block_tokens": 16,
        "kv.poison_freed": True,
        "scheduler.max_chunk_tokens": 32,
        "scheduler.max_batched_tokens": 128,
        "scheduler.max_num_seqs": 16,
        "transfer.digest": "always",
        "worker.name": name,
        "worker.drain_timeout_seconds": 5,
        "log.format": "json",
    }
    config = load_config(None, overrides | dict(settings or {}), env={})
    env = {key: value for key, value in os.environ.items() if not key.startswith("TWINPOOL_")}
    env |= to_env(config) | dict(environment or {})
    log = directory / f"{name}.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", _ENTRY, role],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return WorkerProcess(name, role, config, log, process)


def start_router(
    model: Path, store: str, directory: Path, settings: Mapping[str, object] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a router process; it is not ready yet. It logs to ``router.log``."""
    overrides: dict[str, object] = {
        "cluster.name": "test",
        "cluster.etcd_endpoints": store,
        "model.path": str(model),
        "router.name": "router-0",
        # A hand-off each, unless a test is about the other way.
        "router.local_prefill": False,
        "log.format": "json",
    }
    config = load_config(None, overrides | dict(settings or {}), env={})
    env = {key: value for key, value in os.environ.items() if not key.startswith("TWINPOOL_")}
    with (directory / "router.log").open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-c", _ENTRY, "router"],
            env=env | to_env(config),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


async def wait_ready(store: Store, worker: WorkerProcess, seconds: float = START_SECONDS) -> WorkerRecord:
    """Waits for this process's READY record; fails with its log."""
    key = Keys("test").worker("default", worker.name)
    deadline = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < deadline:
        assert worker.process.poll() is None, f"{worker.name} ended\n{worker.logs()}"
        item = await asyncio.to_thread(store.get, key)
        if item is not None:
            record = WorkerRecord.FromString(item.value)
            if record.pid == worker.process.pid and record.state == WORKER_STATE_READY:
                worker.record = record
                return record
        await asyncio.sleep(0.05)
    raise AssertionError(f"{worker.name} is not ready after {seconds} s\n{worker.logs()}")


class AttemptFailedError(AssertionError):
    """A leg said AttemptFailed."""

    def __init__(self, leg: str, failed: pb.AttemptFailed) -> None:
        super().__init__(f"{leg}: {pb.FailureReason.Name(failed.reason)}: {failed.detail}")
        self.leg = leg
        self.reason = failed.reason


class RouterSession:
    """One session with one worker. Messages of an attempt are routed to its queue."""

    def __init__(self, record: WorkerRecord, router: str = "test-router") -> None:
        self.record = record
        self.router = router
        self.incarnation = new_incarnation()
        self.loads: list[pb.LoadReport] = []
        self.welcome: pb.Welcome | None = None
        self.step_messages = 0
        self._channel = rpc.channel(record.endpoint, RpcConfig())
        self._out: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self._attempts: dict[tuple[str, int], asyncio.Queue[pb.SessionResponse]] = {}
        self._task: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    async def open(self, incarnation: int | None = None) -> None:
        """Hello and Welcome. ``incarnation`` overrides the worker's own."""
        welcomed = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(incarnation, welcomed))
        self.welcome = await asyncio.wait_for(welcomed, ANSWER_SECONDS)

    def send(self, message: pb.SessionRequest) -> None:
        self._out.put_nowait(message)

    def attempt(self, request_id: str, attempt: int = 1) -> "asyncio.Queue[pb.SessionResponse]":
        """Everything that the worker says about an attempt, in order. Call it before the command is sent."""
        return self._attempts.setdefault((request_id, attempt), asyncio.Queue())

    async def close(self) -> None:
        """Half-closes, then waits for the worker's end of the stream."""
        self._out.put_nowait(None)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(asyncio.shield(self.ended), 5)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    async def drop(self) -> None:
        """Cancels the call, as a router that dies does."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    async def _requests(self, incarnation: int | None) -> AsyncIterator[pb.SessionRequest]:
        worker = pb.WorkerId(
            name=self.record.worker.name, incarnation=incarnation or self.record.worker.incarnation
        )
        yield pb.SessionRequest(
            hello=pb.Hello(router=self.router, incarnation=self.incarnation, worker=worker)
        )
        while (message := await self._out.get()) is not None:
            yield message

    async def _run(self, incarnation: int | None, welcomed: "asyncio.Future[pb.Welcome]") -> None:
        error: BaseException | None = None
        try:
            call = worker_pb2_grpc.WorkerServiceStub(self._channel).Session(self._requests(incarnation))
            async for message in call:
                if message.WhichOneof("message") == "welcome":
                    welcomed.set_result(message.welcome)
                else:
                    self._route(message)
        except grpc.aio.AioRpcError as caught:
            error = caught
        finally:
            if not welcomed.done():
                welcomed.set_exception(error or AssertionError("the stream ended without Welcome"))
            if not self.ended.done():
                self.ended.set_result(error)

    def _route(self, message: pb.SessionResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "load":
            self.loads.append(message.load)
        elif kind == "step":
            self.step_messages += 1
            for token in message.step.tokens:
                one = pb.SessionResponse(step=pb.StepTokens(tokens=[token]))
                self._of(message.step.ids[token.slot]).put_nowait(one)
        else:
            assert kind is not None
            self._of(getattr(message, kind).id).put_nowait(message)

    def _of(self, key: pb.AttemptId) -> "asyncio.Queue[pb.SessionResponse]":
        return self._attempts.setdefault((key.request_id, key.attempt), asyncio.Queue())


@dataclass
class Request:
    """A prompt and how to draw. ``fingerprint`` roots the hashes."""

    tokens: Sequence[int]
    request_id: str
    fingerprint: str
    attempt: int = 1
    max_tokens: int = 8
    n: int = 1
    temperature: float = 0.0
    stop: Sequence[int] = ()
    block_tokens: int = 16
    deadline: float | None = None

    def id(self) -> pb.AttemptId:
        return pb.AttemptId(request_id=self.request_id, attempt=self.attempt)

    def prompt(self) -> pb.PromptSpec:
        root = root_hash(self.fingerprint.encode(), b"", b"")
        return prompt_spec(self.tokens, root, self.block_tokens)

    def draw(self) -> pb.DrawSpec:
        return draw_spec(max_tokens=self.max_tokens, n=self.n, stop=self.stop, temperature=self.temperature)

    def decode(self, owner: WorkerRecord) -> pb.SessionRequest:
        command = pb.DecodeCommand(
            id=self.id(),
            prompt=self.prompt(),
            draw=self.draw(),
            owner=owner.worker,
            owner_endpoint=owner.endpoint,
        )
        set_deadline(command, self.deadline)
        return pb.SessionRequest(decode=command)

    def prefill(self, reader: WorkerRecord, cached: int) -> pb.SessionRequest:
        command = pb.PrefillCommand(
            id=self.id(),
            prompt=self.prompt(),
            draw=self.draw(),
            reader=reader.worker,
            reader_cached_blocks=cached,
        )
        return pb.SessionRequest(prefill=command)

    def cancel(self) -> pb.SessionRequest:
        return pb.SessionRequest(cancel=pb.CancelCommand(id=self.id()))


@dataclass
class Answer:
    """What came back. Tokens are checked on arrival: each offset once, in order, none after the end."""

    tokens: list[list[int]]
    finish: list[int]
    decode_cached_blocks: int = 0
    prefill_cached_tokens: int = 0
    bytes: int = 0
    events: list[str] = field(default_factory=list)

    def add(self, index: int, offset: int, token: int, finish: int) -> None:
        assert not self.finish[index], f"choice {index}: a token after the end"
        assert offset == len(self.tokens[index]), (
            f"choice {index}: offset {offset} after {len(self.tokens[index])}"
        )
        self.tokens[index].append(token)
        self.finish[index] = finish


async def next_message(queue: "asyncio.Queue[pb.SessionResponse]", leg: str) -> pb.SessionResponse:
    """The next message of a leg. Raises AttemptFailedError."""
    message = await asyncio.wait_for(queue.get(), ANSWER_SECONDS)
    if message.WhichOneof("message") == "failed":
        raise AttemptFailedError(leg, message.failed)
    return message


async def generate(
    prefill: RouterSession,
    decode: RouterSession,
    request: Request,
    *,
    pause: Callable[[str], "asyncio.Future[None] | None"] = lambda _phase: None,
) -> Answer:
    """The whole path: reserve, prefill, hand-off, tokens until every choice has ended. Raises AttemptFailedError."""
    answer = Answer([[] for _ in range(request.n)], [0] * request.n)
    from_decode = decode.attempt(request.request_id, request.attempt)
    from_prefill = prefill.attempt(request.request_id, request.attempt)
    decode.send(request.decode(prefill.record))
    reserved = (await next_message(from_decode, "decode")).reserved
    answer.decode_cached_blocks = reserved.cached_blocks
    prefill.send(request.prefill(decode.record, reserved.cached_blocks))
    done = (await next_message(from_prefill, "prefill")).prefill_done
    answer.prefill_cached_tokens = done.cached_tokens
    for first in done.first_tokens:
        answer.add(first.index, 0, first.token_id, first.finish)
    handed = (await next_message(from_decode, "decode")).handoff_done
    answer.bytes = handed.stats.bytes
    while not all(answer.finish):
        message = await next_message(from_decode, "decode")
        for token in message.step.tokens:
            answer.add(token.index, token.offset, token.token_id, token.finish)
    return answer


async def wait_until(
    condition: Callable[[pb.InspectResponse], bool], endpoint: str, seconds: float = ANSWER_SECONDS
) -> None:
    """Polls a worker's counts until ``condition`` holds."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition(counts := await inspect(endpoint)):
        assert asyncio.get_running_loop().time() < deadline, f"not reached: {counts}"
        await asyncio.sleep(0.01)
