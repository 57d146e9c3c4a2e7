# SPDX-License-Identifier: Apache-2.0
"""Where a session's turns are placed, and what is remembered of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.fake_cluster import DRAINING, FakeCluster, fake_cluster, generate, prompt
from tests.support.waiting import until
from twinpool._core import hash_blocks
from twinpool.config import SessionsSection
from twinpool.ids import WorkerKey
from twinpool.router.request import Group, Prepared, session_bytes
from twinpool.router.sessions import UNSEEN_SECONDS, Sessions
from twinpool.rpc import Deadline
from twinpool.v1 import inference_pb2 as pb

GROUP = Group("default", "fake", "fp", "llama", 258, 16, 4096, 256, (257,), "/models/fake")
P0, P1, D0 = WorkerKey("p0", 1), WorkerKey("p1", 1), WorkerKey("d0", 1)


def prepared(tokens: int, session: str = "s", tenant: str = "t", seed: int = 0) -> Prepared:
    ids = np.array(prompt(tokens, seed), np.int32)
    return Prepared(
        request_id="r",
        client_id="r",
        group=GROUP,
        tokens=ids,
        hashes=hash_blocks(bytes(16), ids, 16),
        root=bytes(16),
        sampling=pb.SamplingParams(),
        max_tokens=4,
        min_tokens=0,
        stop_strings=(),
        stop_token_ids=(),
        ignore_eos=False,
        n=1,
        logprobs=None,
        priority=0,
        preemptible=True,
        tenant=tenant,
        size_bytes=0,
        arrival=0.0,
        tokenized=0.0,
        deadline=Deadline(),
        session_id=session,
    )


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# --- what is remembered ------------------------------------------------------------------------


def test_the_last_turn_is_remembered_for_its_tenant_and_model_alone() -> None:
    clock = Clock()
    sessions = Sessions(SessionsSection(ttl_seconds=60), clock)
    turn = prepared(40)
    assert sessions.prefer(turn) == []
    sessions.ended(turn, P0, D0)
    assert sessions.prefer(prepared(70)) == [("d0", 1, 2), ("p0", 1, 2)]
    assert sessions.prefer(prepared(70, tenant="u")) == []
    assert sessions.prefer(prepared(70, session="other")) == []
    assert sessions.prefer(replace(turn, group=replace(GROUP, model="another"))) == []
    sessions.ended(prepared(70), P1, P1)
    assert sessions.prefer(prepared(90)) == [("p1", 1, 4)]
    sessions.forget("u", "s")
    assert sessions.prefer(prepared(90))
    sessions.forget("t", "s")
    assert sessions.prefer(prepared(90)) == []


def test_what_was_there_is_claimed_only_while_events_may_be_on_their_way_and_only_of_the_same_prompt() -> (
    None
):
    clock = Clock()
    sessions = Sessions(SessionsSection(ttl_seconds=60), clock)
    sessions.ended(prepared(40), P0, D0)
    assert sessions.prefer(prepared(70, seed=1)) == [("d0", 1, 0), ("p0", 1, 0)], "another prompt"
    assert sessions.prefer(prepared(20)) == [("d0", 1, 0), ("p0", 1, 0)], "a shorter one"
    clock.now += UNSEEN_SECONDS
    assert sessions.prefer(prepared(70)) == [("d0", 1, 0), ("p0", 1, 0)]
    clock.now += 60
    assert sessions.prefer(prepared(70)) == []
    assert len(sessions) == 0


def test_the_table_is_bounded_and_the_longest_unused_is_forgotten_first() -> None:
    sessions = Sessions(SessionsSection(max_sessions=2), Clock())
    for name in ("a", "b", "a", "c"):
        sessions.ended(prepared(40, name), P0, D0)
    assert len(sessions) == 2
    assert sessions.prefer(prepared(40, "b")) == []
    assert sessions.prefer(prepared(40, "a"))
    sessions.ended(prepared(40, ""), P0, D0)
    assert len(sessions) == 2, "no session, nothing to remember"


def test_two_tenants_have_no_session_in_common() -> None:
    names = {session_bytes(*pair) for pair in (("a", "b"), ("ab", ""), ("", "ab"), ("b", "a"), ("a", "bb"))}
    assert len(names) == 5
    assert all(len(name) == 16 for name in names)


# --- where turns go ----------------------------------------------------------------------------


async def turn(cluster: FakeCluster, number: int, session: str = "s", tenant: str = "") -> tuple[str, str]:
    tokens = prompt(32 + 16 * number)
    finished = (await cluster.ask(generate(tokens, session_id=session, tenant=tenant))).finished
    return finished.prefill_worker, finished.decode_worker


async def test_turns_of_a_session_stay_with_its_workers_though_no_event_has_come(model_path: Path) -> None:
    async with fake_cluster(model_path, prefill=3, decode=3) as cluster:
        first = await turn(cluster, 0)
        for number in range(1, 6):
            # Others come between, so that whose turn it would be changes.
            await turn(cluster, number, session="", tenant=f"other-{number}")
            assert await turn(cluster, number) == first
        core = cluster.router.core
        assert core.stats()["index_blocks"] == 0, "nobody has published anything"
        await cluster.assert_quiescent()


async def test_load_and_drain_win_over_a_session(model_path: Path) -> None:
    async with fake_cluster(model_path, prefill=2, decode=2) as cluster:
        prefill, decode = await turn(cluster, 0)
        calm = {"available_blocks": 4096, "total_blocks": 4096}
        for name, made in cluster.workers.items():
            busy = {"waiting_prefill_tokens": 100_000, "waiting_requests": 20} if name == prefill else {}
            made.report(**calm, **busy)
        cluster.router.fleet.upsert(cluster.workers[decode].record(DRAINING))
        reported = cluster.router.fleet.reported
        await until(lambda: all(reported(made.key) for made in cluster.workers.values()))
        moved = await turn(cluster, 1)
        assert (moved[0] != prefill, moved[1] != decode) == (True, True)
        # And from now on it is at home there.
        for made in cluster.workers.values():
            made.report(**calm)
        await until(lambda: reported(cluster.workers[prefill].key)[1].waiting_requests == 0)  # type: ignore[index]
        assert await turn(cluster, 2) == moved
        await cluster.assert_quiescent()


async def test_workers_hear_of_a_session_by_a_number_of_its_tenant(model_path: Path) -> None:
    async with fake_cluster(model_path) as cluster:
        for number, tenant in enumerate(("a", "b")):
            await turn(cluster, number, tenant=tenant)
        await turn(cluster, 3, session="")
        for commands in (cluster.workers["p0"].prefills, cluster.workers["d0"].decodes):
            said = [command.session for command in commands]
            assert said == [session_bytes("a", "s"), session_bytes("b", "s"), b""]


@pytest.mark.parametrize("session", ["x" * 129, "a\nb"])
async def test_a_wrong_session_id_is_refused(model_path: Path, session: str) -> None:
    async with fake_cluster(model_path) as cluster:
        assert (await cluster.ask(generate(session_id=session))).reason == "INVALID_SESSION"
        assert (await cluster.ask(generate(session_id="x" * 128))).finished
