# SPDX-License-Identifier: Apache-2.0
"""Four workers on two devices behind three routers.

*split*: the prefill worker on the first device, the decode worker on the second. *whole*: that decode worker computes the prompts
too, so one device does both. *replicas*: two other workers, one a device, each of which does both with chunked prefill.
All four stay up, so that the ways can be measured in turn; a worker without work leaves its device alone.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from bench._split import ROUTERS, Processes, served
from twinpool.client import Client
from twinpool.v1.control_pb2 import WorkerRecord

REPLICAS = "replicas"
"""The pool of the two that do both."""

SERVED_SECONDS = 60.0
"""How long routers may take to answer once all workers are ready."""


@dataclass(frozen=True)
class Plan:
    """What is started. ``devices``: the first and the second; chunks in tokens."""

    devices: tuple[str, str]
    max_context_tokens: int
    num_blocks: int
    block_tokens: int
    split_chunk: int
    replica_chunk: int

    @property
    def one_device(self) -> bool:
        """Whether all share one."""
        return self.devices[0] == self.devices[1]

    def shared(self, model: Path) -> dict[str, object]:
        """Settings of every process."""
        gpu = self.devices[0].startswith("cuda")
        return {
            "model.path": str(model),
            "model.dtype": "bfloat16" if gpu else "float32",
            "model.max_context_tokens": self.max_context_tokens,
            "kv.block_tokens": self.block_tokens,
            "kv.num_blocks": self.num_blocks,
            "scheduler.max_num_seqs": 64,
            # What is measured first also builds kernels, which takes seconds where none are there yet.
            "worker.calibration_seconds": 10.0 if gpu else 1.0,
            "transfer.ucx_tls": "tcp,sm,self,cuda_copy,cuda_ipc" if gpu else "tcp,sm,self",
            "transfer.poll_microseconds": 20 if gpu else 150,
        }

    def workers(self) -> dict[str, tuple[str, dict[str, object]]]:
        """By name: role and own settings."""
        first, second = self.devices

        def own(device: str, chunk: int, pool: str = "default") -> dict[str, object]:
            return {
                "worker.device": device,
                "worker.pool": pool,
                "scheduler.max_chunk_tokens": chunk,
                "scheduler.max_batched_tokens": chunk + 256,
            }

        return {
            "prefill": ("prefill", own(first, self.split_chunk)),
            "decode": ("decode", own(second, self.split_chunk)),
            "replica-0": ("decode", own(first, self.replica_chunk, REPLICAS)),
            "replica-1": ("decode", own(second, self.replica_chunk, REPLICAS)),
        }

    def waves(self) -> list[list[str]]:
        """Who starts together: on a device of its own, or what a worker measures of itself is a part of it. Where all share one, only
        the decode worker's measurement is used, so it goes first."""
        names = list(self.workers())
        if self.one_device:
            return [["decode"], [name for name in names if name != "decode"]]
        return [names[:2], names[2:]]


@dataclass(frozen=True)
class Running:
    """What was started: a client a way, and what each worker registered."""

    clients: dict[str, Client]
    records: dict[str, WorkerRecord]


async def start(processes: Processes, plan: Plan) -> Running:
    """Starts all and waits until requests can be served each way."""
    workers = plan.workers()
    records: dict[str, WorkerRecord] = {}
    for wave in plan.waves():
        for name in wave:
            role, own = workers[name]
            processes.start(role, name, {"worker.name": name, **own})
        for name in wave:
            records[name] = await processes.record(name, str(workers[name][1]["worker.pool"]))
    routers = ROUTERS | {REPLICAS: {"router.local_prefill": True, "router.pool": REPLICAS}}
    clients: dict[str, Client] = {}
    for name, own in routers.items():
        processes.start("router", name, {"router.name": name, **own})
    for name in routers:
        clients[name] = Client((await processes.router(name)).endpoint)
    for name, client in clients.items():
        await asyncio.wait_for(served(client, 2 if name == REPLICAS else 1), SERVED_SECONDS)
    return Running(clients, records)
