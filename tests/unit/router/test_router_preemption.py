# SPDX-License-Identifier: Apache-2.0
"""A request of higher priority takes the place of one that has no token yet, where the policy and the request allow it."""

import asyncio
from pathlib import Path

import pytest

from tests.support.fake_cluster import fake_cluster, generate, prompt
from tests.support.fake_worker import Script
from tests.support.waiting import until

POLICY: dict[str, object] = {
    "preemption": True,
    "preemption_grace_seconds": 0.0,
    "transfer_window_requests": 1,
}


@pytest.mark.parametrize(
    ("policy", "preemptible", "first"),
    [
        (POLICY, None, "high"),
        (POLICY, False, "low"),
        (POLICY | {"preemption": False}, None, "low"),
    ],
)
async def test_who_goes_first(
    model_path: Path, policy: dict[str, object], preemptible: bool | None, first: str
) -> None:
    gate = asyncio.Event()
    script = Script(prefill_gate=gate)
    async with fake_cluster(model_path, prefill_script=script, settings=policy) as cluster:
        p0, ended = cluster.workers["p0"], []

        async def ask(name: str, **fields: object) -> None:
            answer = await cluster.ask(generate(prompt(30, len(name)), request_id=name, **fields))
            assert answer.text() == "ABCD"
            ended.append(name)

        low = asyncio.create_task(ask("low", **({} if preemptible is None else {"preemptible": preemptible})))
        await until(lambda: p0.prefills)
        high = asyncio.create_task(ask("high", priority=5))
        await until(lambda: cluster.router.core.stats()["requests"] == 2)
        if first == "high":
            await until(lambda: len(p0.prefills) == 2)
            assert p0.cancels == [(p0.prefills[0].id.request_id, 1)]
        gate.set()
        await asyncio.gather(low, high)
        assert ended[0] == first
        assert len(p0.prefills) == (3 if first == "high" else 2)
        await cluster.assert_quiescent()
