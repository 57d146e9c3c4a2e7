# SPDX-License-Identifier: Apache-2.0
"""Workers that disagree on the form of KV never pair: neither for a router nor for a worker that is told to."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.asking import ask
from tests.support.fleet import BLOCK, Fleet, running_fleet
from tests.support.steps import failure_of, prompt
from twinpool.v1 import worker_pb2 as pb

pytestmark = [pytest.mark.integration, pytest.mark.faults]

OTHERS: dict[str, dict[str, object]] = {
    "decode-block": {"kv.block_tokens": 32},
    "decode-dtype": {"model.dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def unequal(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("unequal"), checkpoint, {"prefill-0": "prefill"}) as fleet:
        for name, settings in OTHERS.items():
            fleet.start("decode", name, settings)
        yield fleet


async def test_unequal_workers_never_pair(unequal: Fleet) -> None:
    await unequal.ready(*OTHERS)
    for name in OTHERS:
        async with unequal.session(name) as session:
            request = unequal.request(prompt(BLOCK, 91), f"told-{name}", max_tokens=4)
            if name == "decode-block":
                request.block_tokens = 32
            session.send(request.decode(unequal.workers["prefill-0"].record))
            failed = await failure_of(session.attempt(request.request_id))
            assert failed.reason == pb.FAILURE_REASON_FENCED
            # The operator reads both sides' fingerprints, and what has to be equal.
            assert "model, dtype, block size and layout must be equal" in failed.detail
            assert unequal.workers["prefill-0"].record.fingerprint in failed.detail
            assert unequal.workers[name].record.fingerprint in failed.detail
        await unequal.assert_quiet(name)
    await unequal.start_router({"router.queue_ttl_seconds": 1.0}, sees=False)
    async with unequal.client() as client:
        outcome = await ask(client, None, prompt(BLOCK, 92), 4)
    assert outcome.reason in ("NO_WORKERS", "QUEUE_TIMEOUT", "MODEL_NOT_FOUND")
    assert unequal.router_metric("twinpool_router_attempts_total") == 0
