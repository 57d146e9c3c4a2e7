# SPDX-License-Identifier: Apache-2.0
"""A request of higher priority takes the place of one that has no token yet, where the policy and the request allow it."""

import asyncio
from pathlib import Path

import pytest

from tests.support.fake_cluster import fake_cluster, generate, prompt
from tests.support.fake_worker import Script
from tests.support.waiting import until
from twinpool import metrics

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


@pytest.mark.parametrize(
    ("lengths", "kind"),
    [((40, 20), "long_by_short"), ((20, 40), "short_by_long"), ((20, 21), "short_by_short")],
)
async def test_it_is_counted_by_the_lengths_of_both_prompts(
    model_path: Path, lengths: tuple[int, int], kind: str
) -> None:
    def counted() -> float:
        return float(metrics.ROUTER_PREEMPTIONS.labels(kind)._value.get())

    gate = asyncio.Event()
    async with fake_cluster(model_path, prefill_script=Script(prefill_gate=gate), settings=POLICY) as cluster:
        applied = {"metrics.short_prompt_tokens": 30} | {
            f"router.{name}": value for name, value in POLICY.items()
        }
        assert cluster.live.take(1, applied)
        before = counted()
        low = asyncio.create_task(cluster.ask(generate(prompt(lengths[0], 1))))
        await until(lambda: cluster.workers["p0"].prefills)
        high = asyncio.create_task(cluster.ask(generate(prompt(lengths[1], 2), priority=5)))
        await until(lambda: len(cluster.workers["p0"].prefills) == 2)
        assert counted() == before + 1
        gate.set()
        assert [answer.error for answer in await asyncio.gather(low, high)] == [None, None]
