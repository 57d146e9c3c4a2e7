# SPDX-License-Identifier: Apache-2.0
"""What lies in etcd: records of members, segments of caches, and what resumes an answer. A value may be anybody's."""

import asyncio
from functools import cache
from typing import Any

from tests.fuzz.shake import frames, frames_mutator, message_mutator, packed
from tests.fuzz.target import Target
from twinpool._core import RouterCore
from twinpool.config import TwinpoolConfig
from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.kv_events import digest, read_state
from twinpool.membership.records import RecordError, incarnation_of, parse
from twinpool.membership.watch import RecordWatch
from twinpool.router.admission import Admission, core_config
from twinpool.router.background import Background
from twinpool.router.models import ModelTable
from twinpool.router.placement import Fleet
from twinpool.router.portable import outputs_of, prepared_of, progress
from twinpool.router.request import Group
from twinpool.router.tokenize import TokenizeHop
from twinpool.store import Batch, Change, Item, Keys, Origin
from twinpool.v1 import control_pb2
from twinpool.v1 import resume_pb2 as resume
from twinpool.v1 import worker_pb2 as worker
from twinpool.v1.locality_pb2 import LocalitySegment

KEYS = Keys("c")
KINDS = [control_pb2.WorkerRecord, control_pb2.RouterRecord]
GROUP = Group("default", "fake", "fp", "llama", 258, 16, 512, 64, (257,), "")


class Nothing:
    """Takes every call."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: Nothing()


class NoSession:
    """Stands for a stream that is up at once."""

    def __init__(self, key: WorkerKey) -> None:
        self.key, self.up, self.legs = key, True, 0

    def retry_now(self) -> None: ...

    async def close(self) -> None: ...


class Fleeting(Fleet):
    """A fleet without connections."""

    def _open_session(self, key: WorkerKey, endpoint: str) -> Any:
        return NoSession(key)


@cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


async def follow(key: str, value: bytes) -> None:
    """A record on its way through a router: the watch, the fleet, the table of models, the core."""
    config = TwinpoolConfig()
    admission = Admission(RouterCore(core_config(config.router)))
    tokenize = TokenizeHop(config.router)
    models = ModelTable(tokenize)
    nothing: Any = Nothing()
    fleet = Fleeting(config, admission, models, nothing, Background(), nothing, worker.Hello(router="r"))
    store: Any = None
    kind: Any = control_pb2.WorkerRecord
    heard: list[Any] = []
    watch: Any = RecordWatch(store, KEYS, KEYS.workers(), kind, name="fuzz", on_event=heard.append)
    good = record().SerializeToString()
    for number, text in ((1, value), (2, good)):
        item = Item(key, text, number, number, 1, 0)
        watch._apply(Batch(Origin.LIVE, (Change(key, None, item),)))
    # Whatever came first, the good record that follows is seen.
    assert watch.records() == [record()]
    for event in heard:
        fleet.upsert(event.record)
        models.models()
        if event.kind.value == "removed":
            fleet.remove(event.record)
        await asyncio.sleep(0)
    assert fleet.session(WorkerKey("w", 7)) is not None
    models.close()
    tokenize.close()
    admission.close()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


def run_records(data: bytes) -> None:
    which = data[0] % len(KINDS) if data else 0
    value = data[1:]
    incarnation_of(value, KINDS[which])
    key = KEYS.worker("default", "w") if which == 0 else KEYS.router("r")
    try:
        parse(KEYS, KINDS[which], key, value)
    except RecordError as error:
        assert error.cause in ("key", "decode", "content")
        assert len(str(error)) < 1000
    if which == 0:
        loop().run_until_complete(follow(key, value))


def record() -> control_pb2.WorkerRecord:
    return control_pb2.WorkerRecord(
        worker=worker.WorkerId(name="w", incarnation=7), pool="default", role=worker.ROLE_DECODE,
        state=control_pb2.WORKER_STATE_READY, endpoint="127.0.0.1:1", metrics_endpoint="127.0.0.1:2",
        events_endpoint="127.0.0.1:3", replay_endpoint="127.0.0.1:4", fingerprint="f", model="m", family="llama",
        num_blocks=64, block_tokens=16, kv_bytes_per_token=128, max_num_seqs=8, max_context_tokens=512,
        vocab_size=300, eos_token_ids=[1], model_path="/nowhere",
        prefill_cost=control_pb2.CostModel(base_seconds=0.1, unit_seconds=0.01),
        step_cost=control_pb2.CostModel(base_seconds=0.1, unit_seconds=0.01),
    )  # fmt: skip


def record_seeds() -> list[bytes]:
    router = control_pb2.RouterRecord(name="r", incarnation=3, endpoint="127.0.0.1:5")
    return [b"\0" + record().SerializeToString(), b"\1" + router.SerializeToString()]


def run_segments(data: bytes) -> None:
    state = read_state([frame[1:] for frame in frames(data)], 7)
    if state is not None:
        assert state.blocks * 16 <= len(data) * 2
        assert 0 <= state.digest < 1 << 64


def segment_seeds() -> list[bytes]:
    names = bytes(range(64))
    base = LocalitySegment(
        incarnation=7, generation=1, part=0, parts=1, stored=names, next_sequence=5, blocks=4, digest=digest(names)
    )  # fmt: skip
    delta = LocalitySegment(
        incarnation=7, generation=1, part=1, removed=names[:16], from_sequence=5, next_sequence=6, blocks=3,
        digest=digest(names[16:]),
    )  # fmt: skip
    return [packed([b"\0" + segment.SerializeToString() for segment in (base, delta)])]


def run_resume(data: bytes) -> None:
    """The state of an answer as another router or a worker tells it."""
    try:
        state = resume.PortableState.FromString(data[1:])
    except Exception:
        return
    progress(state)
    try:
        prepared_of(state, GROUP)
        outputs_of(state)
    except TwinpoolError:
        return


def resume_seeds() -> list[bytes]:
    request = resume.PortableRequest(stream_id="s", n=1, tenant="t", client_id="c", root_hash=bytes(16))
    request.stop.max_tokens = 9
    state = resume.PortableState(
        request=request, prompt=b"\1\0\0\0" * 40, choices=[resume.PortableChoice(token_ids=b"\2\0\0\0")]
    )
    return [b"\0" + state.SerializeToString()]


TARGETS = {
    "records": Target("records", run_records, record_seeds, message_mutator(KINDS)),
    "segments": Target(
        "segments", run_segments, segment_seeds, frames_mutator(message_mutator([LocalitySegment]))
    ),
    "resume": Target("resume", run_resume, resume_seeds, message_mutator([resume.PortableState])),
}
