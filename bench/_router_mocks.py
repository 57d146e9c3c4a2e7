# SPDX-License-Identifier: Apache-2.0
"""Workers without a model that speak Twinpool's protocol, in a process of their own: ``python -m bench._router_mocks``.

A prefill worker answers at once; a decode worker answers at once, or one token a step with a pace. One message a step, as a
real worker sends. Prints one line of JSON with the records for the router.
"""

import argparse
import asyncio
import base64
import json
import sys
from collections.abc import AsyncIterator

import grpc.aio

from twinpool.config import KvEventsConfig
from twinpool.ids import WorkerKey, new_incarnation
from twinpool.rpc import run
from twinpool.v1 import control_pb2, inference_pb2, worker_pb2_grpc
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.kv_events import EventPublisher

_LENGTH = inference_pb2.FINISH_REASON_LENGTH
_RUNNING = inference_pb2.FINISH_REASON_UNSPECIFIED
_TOKEN = 1000
_BLOCK_TOKENS = 64


class MockWorker(worker_pb2_grpc.WorkerServiceServicer):
    """One worker of either role. ``step_seconds`` 0: the whole answer at once."""

    def __init__(self, name: str, role: "pb.Role.ValueType", step_seconds: float) -> None:
        self.key = WorkerKey(name, new_incarnation())
        self.role = role
        self.port = 0
        self._step_seconds = step_seconds
        # A cache in which nothing happens says so from time to time.
        self._events = EventPublisher(KvEventsConfig(), self.key, "mock", _BLOCK_TOKENS)
        self._ticking: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listens on a free port."""
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 << 20)])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._server = server
        self._events.open("127.0.0.1")
        self._events.start()

    def record(self, model_path: str) -> control_pb2.WorkerRecord:
        """What it would register."""
        record = control_pb2.WorkerRecord(
            role=self.role,
            state=control_pb2.WORKER_STATE_READY,
            endpoint=f"127.0.0.1:{self.port}",
            pool="default",
            fingerprint="mock-v1",
            model="mock",
            model_path=model_path,
            family="llama",
            num_blocks=1 << 20,
            block_tokens=_BLOCK_TOKENS,
            events_endpoint=self._events.events_endpoint,
            replay_endpoint=self._events.replay_endpoint,
            kv_bytes_per_token=128,
            max_num_seqs=4096,
            max_context_tokens=1 << 20,
            vocab_size=1 << 20,
            eos_token_ids=[(1 << 20) - 1],
        )
        record.worker.name, record.worker.incarnation = self.key.name, self.key.incarnation
        return record

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: object
    ) -> AsyncIterator[pb.SessionResponse]:
        """See the protocol."""
        await anext(request_iterator)
        outbox: asyncio.Queue[pb.SessionResponse] = asyncio.Queue()
        welcome = pb.SessionResponse(welcome=pb.Welcome(role=self.role))
        welcome.welcome.worker.name, welcome.welcome.worker.incarnation = self.key.name, self.key.incarnation
        outbox.put_nowait(welcome)
        running: dict[tuple[str, int], tuple[pb.AttemptId, int, int]] = {}
        reading = asyncio.create_task(self._read(request_iterator, outbox, running))
        try:
            while True:
                yield await outbox.get()
        finally:
            reading.cancel()

    async def _read(
        self,
        requests: AsyncIterator[pb.SessionRequest],
        outbox: "asyncio.Queue[pb.SessionResponse]",
        running: dict[tuple[str, int], tuple[pb.AttemptId, int, int]],
    ) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "prefill":
                done = pb.SessionResponse()
                done.prefill_done.id.CopyFrom(request.prefill.id)
                done.prefill_done.first_tokens.add(token_id=_TOKEN)
                outbox.put_nowait(done)
            elif kind == "decode":
                self._decode(request.decode, outbox, running)
            elif kind == "cancel":
                running.pop((request.cancel.id.request_id, request.cancel.id.attempt), None)
                outbox.put_nowait(pb.SessionResponse(cancelled=pb.Cancelled(id=request.cancel.id)))

    def _decode(
        self,
        command: pb.DecodeCommand,
        outbox: "asyncio.Queue[pb.SessionResponse]",
        running: dict[tuple[str, int], tuple[pb.AttemptId, int, int]],
    ) -> None:
        outbox.put_nowait(pb.SessionResponse(reserved=pb.Reserved(id=command.id)))
        outbox.put_nowait(pb.SessionResponse(handoff_done=pb.HandoffDone(id=command.id)))
        limit = command.draw.stop.max_tokens
        if not self._step_seconds:
            step = pb.SessionResponse()
            step.step.ids.add().CopyFrom(command.id)
            for offset in range(1, limit):
                finish = _LENGTH if offset + 1 == limit else _RUNNING
                step.step.tokens.add(slot=0, index=0, offset=offset, token_id=_TOKEN, finish=finish)
            outbox.put_nowait(step)
            return
        running[command.id.request_id, command.id.attempt] = (command.id, 1, limit)
        if len(running) == 1:
            task = asyncio.create_task(self._tick(outbox, running))
            self._ticking.add(task)
            task.add_done_callback(self._ticking.discard)

    async def _tick(
        self,
        outbox: "asyncio.Queue[pb.SessionResponse]",
        running: dict[tuple[str, int], tuple[pb.AttemptId, int, int]],
    ) -> None:
        while running:
            await asyncio.sleep(self._step_seconds)
            message = pb.SessionResponse()
            for slot, (key, (attempt, offset, limit)) in enumerate(list(running.items())):
                message.step.ids.add().CopyFrom(attempt)
                last = offset + 1 == limit
                message.step.tokens.add(
                    slot=slot, offset=offset, token_id=_TOKEN, finish=_LENGTH if last else _RUNNING
                )
                if last:
                    del running[key]
                else:
                    running[key] = (attempt, offset + 1, limit)
            outbox.put_nowait(message)


async def _main(args: argparse.Namespace) -> int:
    workers = [MockWorker(f"p{i}", pb.ROLE_PREFILL, 0.0) for i in range(args.prefill)]
    workers += [MockWorker(f"d{i}", pb.ROLE_DECODE, args.step_seconds) for i in range(args.decode)]
    for worker in workers:
        await worker.start()
    records = [base64.b64encode(worker.record(args.model).SerializeToString()).decode() for worker in workers]
    print(json.dumps(records), flush=True)
    # Whoever started it holds its standard input: it ends with them.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    return 0


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--model", required=True, help="directory of the tokenizer")
    run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
