# SPDX-License-Identifier: Apache-2.0
"""A worker's probe of its own transfer path, over NIXL and over the loopback twin."""

import queue

import numpy as np
import pytest
import torch

from twinpool.ids import WorkerKey
from twinpool.transfer.base import Fault, PoolMemory, TransferAgent, TransferError
from twinpool.transfer.loopback import Fabric, LoopbackAgent
from twinpool.transfer.thread import TransferThread

OWN = WorkerKey("probed", 7)
POOL = torch.zeros(8, 1024)
TABLE = np.arange(8, dtype=np.uint64)
WAIT_SECONDS = 60.0


def nixl() -> TransferAgent:
    pytest.importorskip("nixl_cu12")
    from twinpool.transfer.nixl import NixlAgent

    return NixlAgent(OWN, "fp", PoolMemory.of_tensor(POOL), TABLE, ucx_tls="tcp,sm,self")


def loopback() -> TransferAgent:
    return LoopbackAgent(OWN, "fp", PoolMemory.of_tensor(POOL), TABLE, fabric=Fabric())


@pytest.mark.parametrize("make", [nixl, loopback])
def test_a_probe_reads_its_own_memory_again_and_again(make) -> None:  # type: ignore[no-untyped-def]
    made: list[TransferAgent] = []

    def agent() -> TransferAgent:
        made.append(make())
        return made[0]

    thread = TransferThread(agent)
    thread.start()
    answers: queue.Queue[TransferError | None] = queue.Queue()
    try:
        for _ in range(3):
            thread.probe(answers.put)
            assert answers.get(timeout=WAIT_SECONDS) is None
        real = made[0].read_generations
        made[0].read_generations = refusing  # type: ignore[method-assign, assignment]
        thread.probe(answers.put)
        error = answers.get(timeout=WAIT_SECONDS)
        assert error is not None
        assert error.fault is Fault.BACKEND
        made[0].read_generations = real  # type: ignore[method-assign]
        thread.probe(answers.put)
        assert answers.get(timeout=WAIT_SECONDS) is None
        assert thread.in_flight == 0
        assert thread.alive
    finally:
        made.clear()
        thread.stop()
    assert not thread.alive


def refusing(peer: WorkerKey, remote: object) -> None:
    raise TransferError(Fault.BACKEND, "broken")
