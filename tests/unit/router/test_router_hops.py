# SPDX-License-Identifier: Apache-2.0
"""Single hops of the router: locality, models, outcomes, the driver of the core."""

import asyncio
import threading
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from tests.support.waiting import until
from twinpool._core import Action, AdmissionConfig, CoreError, RouterCore, hash_blocks, root_hash
from twinpool.config import MetricsConfig, RouterSection
from twinpool.errors import TABLE, TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.router.admission import Admission, core_config
from twinpool.router.models import ModelTable
from twinpool.router.outcome import core_error, found, lost, said_by
from twinpool.router.recent import Recent
from twinpool.router.request import Group, Prepared
from twinpool.router.timing import HOPS, HopClock
from twinpool.router.tokenize import TokenizeHop
from twinpool.rpc import Deadline
from twinpool.text import Tokenizer
from twinpool.v1 import control_pb2
from twinpool.v1 import inference_pb2 as inference
from twinpool.v1 import worker_pb2 as pb

BLOCK = 16
KEY = WorkerKey("d0", 5)
GROUP = Group("default", "fake", "fp", "llama", 258, BLOCK, 4096, 256, (257,), "/models/fake")
ROOT = root_hash(b"fp", b"", b"")


def prepared(tokens: list[int]) -> Prepared:
    array = np.array(tokens, np.int32)
    return Prepared(
        "r", "r", GROUP, array, hash_blocks(ROOT, array, BLOCK), ROOT, inference.SamplingParams(), 100, 0, (),
        (), False, 1, None, 0, True, "", 0, 0.0, 0.0, Deadline(),
    )  # fmt: skip


# --- outcomes -------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", pb.FailureReason.values())
def test_every_failure_reason_has_an_error_and_an_event(reason: "pb.FailureReason.ValueType") -> None:
    outcome = said_by(pb.AttemptFailed(reason=reason, detail="why"), KEY, "decode", reserving=False)
    assert outcome.event == "attempt_failed"
    assert outcome.event in RouterCore.EVENTS
    error = outcome.as_error(1, delivered=False)
    assert error.reason in TABLE
    assert "why" in error.message
    assert error.metadata["worker"] == "d0"


def test_a_refusal_is_one_only_as_the_answer_to_the_command() -> None:
    message = pb.AttemptFailed(reason=pb.FAILURE_REASON_NO_CAPACITY)
    assert said_by(message, KEY, "decode", reserving=True).event == "decode_refused"
    assert said_by(message, KEY, "decode", reserving=False).detail == "NO_CAPACITY:decode"


def test_the_error_says_whether_all_was_tried() -> None:
    outcome = lost(KEY, "decode", "stream broke")
    assert outcome.event in RouterCore.EVENTS
    assert outcome.as_error(1, delivered=False).reason == "WORKER_LOST"
    assert outcome.as_error(3, delivered=False).reason == "ATTEMPTS_EXHAUSTED"
    assert outcome.as_error(3, delivered=True).reason == "WORKER_LOST"
    own = found(TwinpoolError("DETOKENIZE_FAILED", "no text"))
    assert own.as_error(2, delivered=False).reason == "DETOKENIZE_FAILED", "a retry would not have helped"
    assert core_error("QUEUE_TIMEOUT", 0.5).retry_after == 0.5
    assert core_error("WHAT_IS_THIS", 0.0).reason == "INTERNAL"


def test_hops_are_the_fields_of_the_timings() -> None:
    fields = [field.name for field in inference.HopTimings.DESCRIPTOR.fields]
    assert [hop.name for hop in HOPS] == fields[: len(HOPS)]
    assert {hop.event for hop in HOPS} - {""} <= set(RouterCore.EVENTS)
    clock = HopClock(10.0, 10.5, 3, Recent(MetricsConfig()))
    clock.mark(HOPS[1], 11.0)
    clock.mark(HOPS[1], 12.0)
    timings = clock.finish(1)
    assert timings.queue.ToNanoseconds() == 1.5e9, "waiting again is added"
    assert timings.total.ToNanoseconds() == 2e9


# --- the driver of the core -------------------------------------------------------------------


class Owner:
    """Raises when it is placed."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.placed = 0
        self.fault: Exception | None = None

    def on_placed(self, action: Action) -> None:
        self.placed += 1
        if self.fails:
            raise RuntimeError("bug")

    def on_preempted(self, action: Action) -> None: ...

    def on_ended(self, action: Action) -> None: ...

    def on_leaving(self, decode: WorkerKey) -> bool:
        return False

    def on_fault(self, error: Exception) -> None:
        self.fault = error


async def test_a_fault_in_one_request_does_not_stop_the_next() -> None:
    core = RouterCore(core_config(RouterSection()))
    admission = Admission(core)
    for role in ("prefill", "decode"):
        core.upsert_worker(0.0, role, 1, GROUP.label, role, "ready", "fp", 256, BLOCK, 8)
    owners = [Owner(fails=True), Owner(fails=False)]
    requests = []
    for number, owner in enumerate(owners):
        request = prepared(list(range(20)))
        object.__setattr__(request, "request_id", f"r{number}")
        requests.append(admission.submit(request, owner))
    await until(lambda: all(owner.placed for owner in owners))
    assert [owner.placed for owner in owners] == [1, 1]
    assert isinstance(owners[0].fault, RuntimeError)
    for request_number in requests:
        admission.forget(request_number)
    assert core.stats()["reservations"] == 0
    admission.close()


async def test_an_event_that_the_state_machine_refuses_ends_the_request() -> None:
    core = RouterCore(core_config(RouterSection()))
    admission = Admission(core)
    owner = Owner(fails=False)
    number = admission.submit(prepared([1, 2, 3]), owner)
    after = admission.advance(number, 1, "handoff_done")
    assert (after.terminal, after.state) == (True, "Cancelled")
    assert isinstance(owner.fault, CoreError)
    admission.forget(number)
    assert core.stats()["requests"] == 0
    admission.close()


async def test_the_timer_ends_what_waits_too_long() -> None:
    admission = Admission(RouterCore(core_config(RouterSection(queue_ttl_seconds=0.05))))
    ended = asyncio.Event()
    owner = Owner(fails=False)
    owner.on_ended = lambda action: ended.set()  # type: ignore[method-assign]
    admission.submit(prepared([1, 2, 3]), owner)
    await asyncio.wait_for(ended.wait(), 60)
    admission.close()


def test_every_limit_of_the_configuration_reaches_the_core() -> None:
    section = RouterSection(
        max_queue_requests=11, max_queue_tokens=12, max_queue_bytes=2000, queue_ttl_seconds=14.0, max_attempts=5,
        ageing_seconds=16.0, prefill_window_tokens=17, transfer_window_requests=18, max_tenant_requests=19,
        tenant_tokens_per_second=20.0, tenant_burst_tokens=21.0, order_stretch=3.0,
    )  # fmt: skip
    config = core_config(section)
    for name in AdmissionConfig.FIELDS:
        if name in RouterSection.model_fields:
            assert getattr(config, name) == getattr(section, name), name


# --- tokenise ---------------------------------------------------------------------------------


class NeedsTheLoop:
    """A tokenizer that answers once the event loop has turned: called on the loop itself, it never could."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner
        self.turned = threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def encode(self, text: str, **options: bool) -> object:
        assert self.turned.wait(30), "tokenising held the event loop"
        return self._inner.encode(text, **options)


@pytest.mark.parametrize("field", ["text", "chat"])
async def test_a_long_text_does_not_stop_the_loop(model_path: Path, field: str) -> None:
    hop = TokenizeHop(RouterSection())
    tokenizer = NeedsTheLoop(await hop.load(str(model_path)))
    text = "a long text " * 1000
    chat = inference.ChatMessages(messages=[inference.ChatMessage(role="user", content=text)])
    request = (
        inference.GenerateRequest(text=text) if field == "text" else inference.GenerateRequest(chat=chat)
    )
    asyncio.get_running_loop().call_soon(tokenizer.turned.set)
    tokens, _ = await hop.prompt(request, cast("Tokenizer", tokenizer), GROUP)
    assert len(tokens) >= len(text)
    hop.close()


# --- models -----------------------------------------------------------------------------------


async def test_a_model_outlives_its_last_worker_by_name(model_path: Path) -> None:
    table = ModelTable(TokenizeHop(RouterSection()))

    def record(name: str, **fields: object) -> control_pb2.WorkerRecord:
        base: dict[str, object] = {
            "pool": "default", "model": "fake", "fingerprint": "fp", "role": pb.ROLE_DECODE, "num_blocks": 8,
            "block_tokens": 16, "max_context_tokens": 100, "vocab_size": 258, "model_path": str(model_path),
            "state": control_pb2.WORKER_STATE_READY,
        }  # fmt: skip
        made = control_pb2.WorkerRecord(**(base | fields))  # type: ignore[arg-type]
        made.worker.name, made.worker.incarnation = name, 1
        return made

    with pytest.raises(TwinpoolError, match="no worker") as caught:
        table.resolve("")
    assert caught.value.reason == "NO_WORKERS"
    table.upsert(WorkerKey("a", 1), record("a", max_context_tokens=90))
    table.upsert(WorkerKey("b", 1), record("b", role=pb.ROLE_PREFILL, num_blocks=6))
    with pytest.raises(TwinpoolError, match="it is loading"):
        table.resolve("fake")
    await until(lambda: table.servable)
    group = table.resolve("").group
    assert (group.max_context_tokens, group.num_blocks) == (90, 6), "the smallest of its workers"
    with pytest.raises(TwinpoolError, match="the limit is one of fake") as caught:
        table.resolve("other")
    assert caught.value.reason == "MODEL_NOT_FOUND"
    table.remove(WorkerKey("a", 1))
    assert table.resolve("fake").group.max_context_tokens == 100
    table.remove(WorkerKey("b", 1))
    with pytest.raises(TwinpoolError) as caught:
        table.resolve("fake")
    assert caught.value.reason == "NO_WORKERS", "it was there and may come back"
    table.close()


async def test_a_tokenizer_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    table = ModelTable(TokenizeHop(RouterSection()))
    broken = control_pb2.WorkerRecord(
        pool="default",
        model="fake",
        fingerprint="fp",
        role=pb.ROLE_DECODE,
        model_path=str(tmp_path),
        block_tokens=16,
    )
    table.upsert(WorkerKey("a", 1), broken)
    async with asyncio.timeout(60):
        while True:
            with pytest.raises(TwinpoolError) as caught:
                table.resolve("fake")
            if "tokenizer.json" in caught.value.message:
                break
            await asyncio.sleep(0.01)
    assert caught.value.reason == "NO_WORKERS"
    table.close()
