# SPDX-License-Identifier: Apache-2.0
"""A core whose limits are changed decides like one that began with them, field by field."""

import random

import numpy as np
import pytest

from twinpool import _core
from twinpool._core import Action, AdmissionConfig, CoreError, RouterCore
from twinpool.config import reloadable

BASE: dict[str, float | int] = {
    "max_queue_requests": 40,
    "max_queue_tokens": 30_000,
    "max_queue_bytes": 100_000,
    "queue_ttl_seconds": 3.0,
    "max_attempts": 3,
    "max_resumes": 2,
    "max_refusals": 4,
    "prefill_window_tokens": 1500,
    "transfer_window_requests": 3,
    "max_tenant_requests": 30,
    "tenant_tokens_per_second": 20_000,
    "tenant_burst_tokens": 4_000,
    "preemption": 1,
    "preemption_grace_seconds": 0.05,
    "prefix_fetch": 1,
    "ageing_seconds": 1.0,
    "max_bypass": 8,
}
OTHER: dict[str, float | int] = {
    "max_queue_requests": 3,
    "max_queue_tokens": 1500,
    "max_queue_bytes": 900,
    "queue_ttl_seconds": 0.2,
    "ageing_seconds": 0.05,
    "order_stretch": 0,
    "max_bypass": 0,
    "max_attempts": 1,
    "max_resumes": 0,
    "max_refusals": 0,
    "retry_backoff_seconds": 5.0,
    "refusal_backoff_seconds": 2.0,
    "max_tenant_requests": 2,
    "tenant_tokens_per_second": 500,
    "tenant_burst_tokens": 700,
    "tenant_max_priority": 0,
    "prefill_window_tokens": 200,
    "transfer_window_requests": 1,
    "refuse_without_workers": 1,
    "early_rejection": 0,
    "preemption": 0,
    "preemption_grace_seconds": 2.0,
    "harm_weight": 500,
    "prefix_fetch": 0,
    "local_prefill": 1,
    "retry_after_min_seconds": 50.0,
    "retry_after_max_seconds": 0.1,
}
AT_START = set(AdmissionConfig.FIELDS) - set(OTHER)
NO_HASHES = np.empty((0, 16), np.uint8)


class World:
    """A core, and a script that does to it whatever a router may do. Outcomes are kept."""

    def __init__(self, limits: dict[str, float | int]) -> None:
        self.core = RouterCore(AdmissionConfig(**limits))
        self.random = random.Random(7)
        self.heard: list[object] = []
        self.later: list[tuple[float, int, int, int, str, str]] = []
        for name in ("p0", "p1", "d0", "d1"):
            role = "prefill" if name[0] == "p" else "decode"
            self.core.upsert_worker(0.0, name, 1, "m", role, "ready", "fp", 200, 16, 12)
            self.core.set_cost_model(name, 1, "prefill", 0.001, 2e-4)
            self.core.set_cost_model(name, 1, "transfer", 0.001, 1e-4)
            self.core.set_cost_model(name, 1, "step", 0.01, 1e-3)
            for tokens in range(100, 1100, 100):
                self.core.observe_prefill(name, 1, tokens, 0, 0.01 + tokens * 1e-4)
        # A pool and a tenant that the change finds there.
        known = self.core.submit(0.0, "known", "m", 32, 8, NO_HASHES, tenant="a")
        self.core.advance(0.0, known.request, 0, "cancel")
        self.core.forget(known.request)

    def run(self) -> list[object]:
        prefix = np.random.default_rng(3).integers(0, 256, (20, 16), dtype=np.uint8)
        self.core.index_stored("p0", 1, prefix)
        for step in range(600):
            self._step(1000.0 + step * 0.02, step, prefix)
        return self.heard

    def _step(self, now: float, step: int, prefix: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]") -> None:
        draw = self.random
        self._advance(now)
        tokens = draw.choice([20, 60, 300, 700])
        hashes = prefix[: tokens // 16] if tokens == 300 and draw.random() < 0.7 else NO_HASHES
        pool = "nobody" if step % 97 == 0 else "m"
        submission = self.core.submit(
            now,
            f"r{step}",
            pool,
            tokens,
            draw.choice([4, 40]),
            hashes,
            priority=draw.choice([-1, 0, 0, 5]),
            tenant=draw.choice(["a", "b", "c"]),
            deadline=draw.choice([0.0, 0.0, now + 0.05, now + 1.0]),
            bytes=200,
        )
        self.heard.append(
            (submission.accepted, submission.reason, submission.limit, round(submission.retry_after, 6))
        )
        for name in ("d0", "d1"):
            running = draw.choice([0, 4, 9])
            self.core.report_load(now, name, 1, running, 0, 0, 200 - 10 * running, 0.01 * (1 + running))
        for action in self.core.plan(now):
            self._act(now, action)
        self.heard.append(self.core.next_wake(now))

    def _act(self, now: float, action: Action) -> None:
        self.heard.append(
            (
                action.kind,
                action.request,
                action.prefill,
                action.decode,
                action.fetch_from,
                action.local,
                action.cause,
            )
        )
        self.heard.append(round(action.retry_after, 6))
        if action.kind != "place":
            return
        fate = self.random.random()
        if fate < 0.15:
            events = [("decode_refused", "")]
        elif fate < 0.35:
            events = [*_PREFILL[:2], ("attempt_failed", "INTERNAL:prefill")]
        elif fate < 0.5:
            events = [*_PREFILL, *_DECODE[:2], ("attempt_failed", "TRANSFER:decode")]
        else:
            events = [*_PREFILL, *_DECODE]
        # One event a while, so that requests hold what they have for a time.
        due = now
        for event, detail in events:
            due += self.random.choice([0.002, 0.01, 0.05])
            self.later.append((due, len(self.later), action.request, action.attempt, event, detail))

    def _advance(self, now: float) -> None:
        """What is due of what workers say."""
        for entry in sorted(self.later):
            due, _, request, attempt, event, detail = entry
            if due > now:
                return
            self.later.remove(entry)
            try:
                after = self.core.advance(due, request, attempt, event, detail)
            except CoreError as error:
                self.heard.append(str(error))
                continue
            self.heard.append((event, request, after.applied, after.state, after.cause))
            if after.state == "Retrying":
                self.heard.append(self.core.advance(due, request, attempt, "requeue").state)


_PREFILL = [("decode_reserved", ""), ("prefill_started", "")]
_DECODE = [("first_token", ""), ("delivered", ""), ("handoff_done", ""), ("token", "3"), ("finished", "")]


def test_every_live_limit_of_the_core_is_looked_at() -> None:
    live = {key.removeprefix("router.") for key in reloadable()} & set(AdmissionConfig.FIELDS)
    assert live == set(OTHER)


@pytest.mark.parametrize("field", sorted(OTHER))
def test_a_changed_limit_is_that_of_a_core_that_began_with_it(field: str) -> None:
    before = World(BASE).run()
    fresh = World(BASE | {field: OTHER[field]}).run()
    assert fresh != before, f"the script does not show {field}"
    changed = World(BASE)
    changed.core.configure(500.0, AdmissionConfig(**BASE | {field: OTHER[field]}))
    heard = changed.run()
    assert heard == fresh


@pytest.mark.parametrize("field", sorted(AT_START))
def test_what_counts_at_the_start_alone_refuses_the_whole_change(field: str) -> None:
    core = RouterCore(AdmissionConfig())
    other = AdmissionConfig(max_queue_requests=0)
    setattr(other, field, getattr(other, field) / 2 if field != "index_max_bytes" else 1 << 30)
    with pytest.raises(CoreError, match=f"{field} counts at the start alone"):
        core.configure(0.0, other)
    other = AdmissionConfig(max_queue_requests=1)
    core.configure(0.0, other)
    assert core.submit(0.0, "a", "m", 10, 1, NO_HASHES).accepted
    assert core.submit(0.0, "b", "m", 10, 1, NO_HASHES).limit.startswith("max_queue_requests")


def test_what_waits_is_placed_when_it_fits_by_the_new_limits() -> None:
    world = World({"prefill_window_tokens": 100, "max_bypass": 0})
    for name in ("a", "b", "c", "d"):
        world.core.submit(1.0, name, "m", 90, 4, NO_HASHES)
    assert len(world.core.plan(1.0)) == 2
    assert world.core.plan(1.1) == []
    world.core.configure(1.2, AdmissionConfig(prefill_window_tokens=1000))
    assert len(world.core.plan(1.2)) == 2


def test_what_waits_rises_after_the_new_time() -> None:
    def order(seconds: float) -> list[int]:
        world = World({"prefill_window_tokens": 1, "ageing_seconds": 1000.0})
        core = world.core
        core.submit(1.0, "low", "m", 50, 4, NO_HASHES, tenant="a", priority=-1)
        for worker in ("p0", "p1"):
            core.quarantine(1.0, worker, 1, 5.0)
        core.configure(2.0, AdmissionConfig(prefill_window_tokens=1, ageing_seconds=seconds))
        core.submit(4.9, "high", "m", 50, 4, NO_HASHES, tenant="b", priority=0)
        core.quarantine(4.95, "p1", 1, 1e6)
        return [action.request for action in core.plan(5.0)]

    slow, fast = order(1000.0), order(0.5)
    assert len(slow) == len(fast) == 1
    assert slow != fast


def test_a_change_is_part_of_a_recording() -> None:
    world = World(BASE)
    world.core.record(8192)
    world.run()
    world.core.configure(2000.0, AdmissionConfig(**BASE | {"max_queue_requests": 1}))
    lines: list[str] = []
    report = _core.replay_log(world.core.recorded(), lines.append)
    assert report.equal, report.mismatch
    assert lines[-1].endswith("configure")
    for _ in range(4):  # until the change is older than the log
        world.heard.clear()
        for step in range(600):
            world._step(3000.0 + step, step, NO_HASHES.reshape(0, 16))
    report = _core.replay_log(world.core.recorded())
    assert report.equal, report.mismatch
