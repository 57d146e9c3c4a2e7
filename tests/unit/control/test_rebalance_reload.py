# SPDX-License-Identifier: Apache-2.0
"""A rebalancer that runs decides by other settings as one that began with them, key by key."""

import asyncio
from dataclasses import replace

import pytest

from tests.support.waiting import until
from tests.unit.control.rebalancing import SETTINGS
from tests.unit.control.rebalancing_pool import BEGAN, Pool, loop_of
from twinpool.config import RebalanceSection, TwinpoolConfig, reloadable
from twinpool.control.rebalance.loop import RebalanceLoop
from twinpool.control.rebalance.window import Sample
from twinpool.live_config import LiveConfig

OTHER: dict[str, object] = {
    "dry_run": True,
    "scale": True,
    "ttft_seconds": 0.05,
    "itl_seconds": 0.011,
    "window_seconds": 120,
    "confirm_seconds": 100,
    "dwell_seconds": 2000,
    "cooldown_seconds": 150,
    "reversal_seconds": 1,
    "utilisation_high": 1.2,
    "utilisation_low": 0.05,
    "max_flips": 3,
    "flip_seconds": 200,
    "horizon_seconds": 20,
}
HALF = 60


class Shifting(Pool):
    """First prompts that take four prefill workers, then answers that take as many decode workers, then prompts again."""

    async def sample(self, pool: str, at: float) -> Sample | None:
        sample = await super().sample(pool, at)
        assert sample is not None
        turns = (at - BEGAN) / SETTINGS.interval_seconds
        prompts, answers = min(turns, HALF), min(max(turns - HALF, 0), HALF)
        prompts += max(turns - 2 * HALF, 0)
        tokens, drawn = int(prompts * 20_000), int(answers * 30_000)
        workers = tuple(
            replace(each, running=60) if each.role == "decode" and 0 < answers < HALF else each
            for each in sample.workers
        )
        return replace(
            sample,
            workers=workers,
            requests=tokens // 1000 + drawn // 500,
            prompt_tokens=tokens,
            prefilled_tokens=tokens,
            finished=drawn // 500,
            output_tokens=drawn,
            generated_tokens=drawn,
            queued_tokens=3000 if 0 < turns < HALF else 0,
        )


def live_of(**settings: object) -> LiveConfig:
    return LiveConfig(TwinpoolConfig(rebalance=SETTINGS.model_copy(update=settings)))


async def heard_of(live: LiveConfig, applied: dict[str, object]) -> list[object]:
    """Decisions and events, from the second look on: ``applied`` counts from there."""
    around = Shifting(prefill=3, decode=3)
    loop = loop_of(around, live.following.rebalance)
    await turn(loop, around)
    assert live.take(1, {f"rebalance.{name}": value for name, value in applied.items()}), live.refusal
    heard: list[object] = []
    for _ in range(3 * HALF):
        decision = await turn(loop, around)
        heard.append(decision)
        for operation in around.operations:
            # Each takes two intervals.
            began = operation.created_at.ToNanoseconds() / 1e9
            if not operation.steps and around.now - began >= 2 * SETTINGS.interval_seconds:
                around.end(operation)
    return [*heard, *around.told]


async def turn(loop: RebalanceLoop, around: Pool) -> object:
    around.now += SETTINGS.interval_seconds
    decision = await loop.tick(around.spec)
    return decision, loop.telemetry("default")


@pytest.mark.parametrize("key", OTHER)
async def test_a_changed_setting_is_that_of_a_loop_that_began_with_it(key: str) -> None:
    value = OTHER[key]
    before = await heard_of(live_of(), {})
    fresh = await heard_of(live_of(**{key: value}), {})
    assert fresh != before, f"the load does not show {key}"
    assert await heard_of(live_of(), {key: value}) == fresh


async def test_a_shorter_interval_counts_at_once() -> None:
    live, around = live_of(interval_seconds=25), Pool()
    loop = loop_of(around, live.following.rebalance)
    live.on_change(lambda _config: loop.wake)
    looks = 0

    async def sample(pool: str, at: float) -> Sample | None:
        nonlocal looks
        looks += 1
        return None

    around.sample = sample  # type: ignore[method-assign]
    loop.start()
    await until(lambda: looks == 1)
    for _ in range(5):
        await asyncio.sleep(0)
    assert looks == 1
    assert live.take(1, {"rebalance.interval_seconds": 0.1})
    await until(lambda: looks >= 4)
    await loop.stop()


def test_every_live_key_of_the_rebalancer_is_shown() -> None:
    live = {key.removeprefix("rebalance.") for key in reloadable() if key.startswith("rebalance.")}
    assert live == {*OTHER, "interval_seconds"}
    assert set(RebalanceSection.model_fields) - live == {"auto"}
