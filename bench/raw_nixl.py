# SPDX-License-Identifier: Apache-2.0
"""Claim: pulling KV blocks through the product costs no more than a tenth over raw NIXL on the same descriptors.

An owner process and this one. *raw* makes a NIXL READ of scattered blocks from fresh descriptors and polls it without a
pause, and proves nothing. *product* is ``TransferThread.pull``: a command to the transfer thread, the same blocks, the
owner's generations after them, a callback. *copy* moves the same blocks inside one process. Alternating, in one run.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench._common import Figures, arguments, interleave, report
from twinpool.ids import WorkerKey, new_incarnation
from twinpool.transfer.base import Blocks, PeerDescriptor, PoolMemory, TransferError
from twinpool.transfer.nixl import NixlAgent
from twinpool.transfer.nixl_backend import load_api, ucx_environment
from twinpool.transfer.pull import PullOutcome
from twinpool.transfer.thread import TransferThread

BLOCK_TOKENS = 64
V3_WIDTH = 576
BYTES_PER_VALUE = 2
DEADLINE_SECONDS = 60.0


def make_pool(num_blocks: int, block_bytes: int, device: str) -> PoolMemory:
    """A pool whose pages are all there; on ``cuda`` the same code reads device memory."""
    if device == "cpu":
        return PoolMemory.of_array(np.ones((num_blocks, block_bytes), dtype=np.uint8))
    import torch

    return PoolMemory.of_tensor(torch.ones((num_blocks, block_bytes), dtype=torch.uint8, device=device))


def make_thread(name: str, num_blocks: int, block_bytes: int, ucx_tls: str, device: str) -> TransferThread:
    """A started transfer thread over a pool of its own."""
    pool = make_pool(num_blocks, block_bytes, device)
    generations = np.ones(num_blocks, dtype=np.uint64)
    key = WorkerKey(name, new_incarnation())
    thread = TransferThread(lambda: NixlAgent(key, "bench", pool, generations, ucx_tls=ucx_tls))
    thread.start()
    return thread


def serve(connection: Connection, num_blocks: int, block_bytes: int, ucx_tls: str, device: str) -> None:
    """The owner's process: polls at its busy pace until the connection ends."""
    thread = make_thread("owner", num_blocks, block_bytes, ucx_tls, device)
    thread.set_offers(1)
    connection.send(thread.descriptor)
    connection.poll(None)
    thread.stop()


class Raw:
    """NIXL without the product."""

    def __init__(self, owner: PeerDescriptor, num_blocks: int, ucx_tls: str, device: str) -> None:
        api = load_api()
        with ucx_environment(ucx_tls):
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = api.nixl_agent(f"raw-{new_incarnation():x}", config)
        self._owner = owner
        self._pool = make_pool(num_blocks, owner.block_bytes, device)
        region = self._pool.region
        entry = (region.address, region.length_bytes, region.device_id, "")
        self._agent.register_memory([entry], region.memory_type)
        self._agent.add_remote_agent(owner.agent_metadata)

    def read(self, remote: Blocks, local: Blocks) -> float:
        """Seconds of one READ."""
        agent = self._agent
        began = time.perf_counter()
        ours = self._descriptors(local, self._pool.region.address, self._pool.region.device_id)
        theirs = self._descriptors(remote, self._owner.pool.address, self._owner.pool.device_id)
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(ours, self._pool.region.memory_type),
            agent.get_xfer_descs(theirs, self._owner.pool.memory_type),
            self._owner.agent_name,
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state
        seconds = time.perf_counter() - began
        handle.release()
        return seconds

    def _descriptors(self, blocks: Blocks, address: int, device: int) -> np.ndarray:
        size = self._owner.block_bytes
        rows = np.empty((len(blocks), 3), dtype=np.uint64)
        rows[:, 0] = address + blocks.astype(np.uint64) * np.uint64(size)
        rows[:, 1] = size
        rows[:, 2] = device
        return rows


class Product:
    """The same through the transfer thread, validated generations included."""

    def __init__(self, owner: PeerDescriptor, num_blocks: int, ucx_tls: str, device: str) -> None:
        self.thread = make_thread("reader", num_blocks, owner.block_bytes, ucx_tls, device)
        self._owner = owner
        self._done = threading.Event()
        self._outcome: PullOutcome | TransferError | None = None
        self.thread.connect(owner, self._finish)
        self._wait()

    def read(self, remote: Blocks, local: Blocks) -> float:
        """Seconds of one pull, as its caller sees them."""
        began = time.perf_counter()
        self.thread.pull(
            self._owner.worker,
            remote,
            local,
            deadline_seconds=DEADLINE_SECONDS,
            on_done=self._finish,
            on_fenced=lambda: None,
        )
        outcome = self._wait()
        seconds = time.perf_counter() - began
        assert isinstance(outcome, PullOutcome)
        assert outcome.fault is None, outcome
        assert outcome.generations is not None
        assert (outcome.generations == 1).all()
        return seconds

    def _finish(self, outcome: PullOutcome | TransferError | None) -> None:
        self._outcome = outcome
        self._done.set()

    def _wait(self) -> PullOutcome | TransferError | None:
        assert self._done.wait(DEADLINE_SECONDS)
        self._done.clear()
        return self._outcome


class Copy:
    """The same blocks copied inside this process, on one thread."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._source = np.ones((num_blocks, block_bytes), dtype=np.uint8)
        self._target = np.ones((num_blocks, block_bytes), dtype=np.uint8)

    def read(self, remote: Blocks, local: Blocks) -> float:
        began = time.perf_counter()
        for theirs, ours in zip(remote.tolist(), local.tolist(), strict=True):
            self._target[ours] = self._source[theirs]
        return time.perf_counter() - began


def measure(
    read: Callable[[Blocks, Blocks], float], count: int, num_blocks: int, block_bytes: int
) -> Figures:
    """Median over a few reads of ``count`` scattered blocks."""
    random = np.random.default_rng(count)
    seconds = []
    for _ in range(5):
        remote = random.permutation(num_blocks)[:count].astype(np.int32)
        local = random.permutation(num_blocks)[:count].astype(np.int32)
        seconds.append(read(remote, local))
    middle = statistics.median(seconds)
    return {"us": middle * 1e6, "GB_per_s": count * block_bytes / middle / 1e9}


def run(
    ucx_tls: str, counts: list[int], block_bytes: int, rounds: int, device: str
) -> tuple[Figures, Figures]:
    """Figures and ratios for one list of transports."""
    num_blocks = 2 * max(counts)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(
        target=serve, args=(theirs, num_blocks, block_bytes, ucx_tls, device), daemon=True
    )
    owner.start()
    descriptor: PeerDescriptor = ours.recv()
    raw = Raw(descriptor, num_blocks, ucx_tls, device)
    product = Product(descriptor, num_blocks, ucx_tls, device)
    variants: dict[str, Raw | Product | Copy] = {"raw": raw, "product": product}
    if device == "cpu":
        variants["copy"] = Copy(num_blocks, block_bytes)
    figures: Figures = {}
    ratios: Figures = {}
    try:
        for count in counts:
            found = interleave(
                rounds,
                {
                    name: partial(measure, variant.read, count, num_blocks, block_bytes)
                    for name, variant in variants.items()
                },
            )
            for name, values in found.items():
                for figure, value in values.items():
                    figures[f"{ucx_tls} {count} blocks {name} {figure}"] = value
            rate = {name: values["GB_per_s"] for name, values in found.items()}
            ratios[f"{ucx_tls} {count} blocks product/raw"] = rate["product"] / rate["raw"]
    finally:
        product.thread.stop()
        ours.send("stop")
        owner.join(10)
        owner.kill()
    return figures, ratios


def main() -> None:
    options = arguments(
        __doc__ or "",
        ("--layers", {"type": int, "default": 61, "help": "layers of a block; 61 is DeepSeek-V3"}),
        ("--blocks", {"default": "1,16,64", "help": "blocks of one read, several by comma"}),
        ("--tls", {"default": "tcp,sm,self;tcp,self", "help": "UCX transports, several lists by semicolon"}),
        ("--device", {"default": "cpu", "help": "where the pools are: cpu or cuda"}),
        ("--rounds", {"type": int, "default": 7}),
    )
    if options.quick:
        options.layers, options.blocks, options.rounds = 8, "1,16", 3
    block_bytes = options.layers * BLOCK_TOKENS * V3_WIDTH * BYTES_PER_VALUE
    figures: dict[str, object] = {"block_bytes": block_bytes}
    ratios: Figures = {}
    for ucx_tls in options.tls.split(";"):
        counts = [int(count) for count in options.blocks.split(",")]
        found, compared = run(ucx_tls, counts, block_bytes, options.rounds, options.device)
        figures.update(found)
        ratios.update(compared)
    claim = "a validated pull through the product keeps up with raw NIXL"
    report(claim, figures, ratios, as_json=options.json)


if __name__ == "__main__":
    main()
