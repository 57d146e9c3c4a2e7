# SPDX-License-Identifier: Apache-2.0
"""A worker that dies, or stands still, in each phase of a request: its client sees the oracle's answer, every token once.

Phases are those of docs/failures.md. Each is held open by the test, so that the death falls into it and not beside it.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import pytest

from tests.faults.conftest import ROUTER
from tests.faults.test_restarts import DECODERS, restart
from tests.support.asking import Outcome, ask
from tests.support.fleet import BLOCK, Fleet, running_fleet
from tests.support.quiescence import inspect
from tests.support.steps import prompt
from tests.support.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.faults]

PREFILLERS = ("prefill-0", "prefill-1")
OF_ROLE = {"prefill": PREFILLERS, "decode": DECODERS}
WAIT_SECONDS = 120.0
ANSWER = 120
BRIEF = {"rpc.keepalive_seconds": 1, "rpc.keepalive_timeout_seconds": 1}
"""Who does not answer a ping is given up after two seconds. (The default is fifteen.)"""


@pytest.fixture(scope="module")
def brief_routed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two workers of each role behind a router, all of which give silent peers up soon."""
    workers = {name: role for role, names in OF_ROLE.items() for name in names}
    # Over TCP, as between machines: memory that two processes share is read without its owner.
    settings = BRIEF | {
        "transfer.read_deadline_seconds": 3,
        "transfer.lease_seconds": 5,
        "transfer.ucx_tls": "tcp,self",
    }
    with running_fleet(tmp_path_factory.mktemp("brief-routed"), checkpoint, workers, settings) as fleet:
        asyncio.run(fleet.start_router(ROUTER | BRIEF))
        yield fleet


@pytest.fixture
async def silent(brief_routed: Fleet) -> AsyncIterator[Fleet]:
    """Left whole and at rest."""
    yield brief_routed
    await brief_routed.router_sees()
    await brief_routed.assert_quiet(within=WAIT_SECONDS)
    await brief_routed.assert_router_quiet(within=WAIT_SECONDS)


@contextlib.contextmanager
def stopped(fleet: Fleet, *names: str) -> Iterator[None]:
    """They stand still meanwhile; who is dead by the end stays so."""
    pids = [fleet.workers[name].process.pid for name in names]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def holder(fleet: Fleet, names: tuple[str, ...]) -> str:
    """Waits for the one of the workers that has a request."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            for name in names:
                with contextlib.suppress(grpc.RpcError):
                    if (await inspect(fleet.workers[name].endpoint)).requests:
                        return name
            await asyncio.sleep(0.005)


class Asked:
    """A request of a client that runs, and what it has so far."""

    def __init__(self, fleet: Fleet, seed: int, blocks: int = 3, tokens: int = ANSWER) -> None:
        self.outcome = Outcome()
        self._fleet = fleet
        self._prompt = prompt(blocks * BLOCK + 3, seed)
        self._tokens = tokens
        self.task = asyncio.create_task(self._ask())

    async def _ask(self) -> Outcome:
        def see(outcome: Outcome) -> bool:
            self.outcome = outcome
            return False

        async with self._fleet.client() as client:
            return await ask(client, self._fleet.oracle, self._prompt, self._tokens, leave=see)

    async def has(self, tokens: int) -> None:
        await until(lambda: len(self.outcome.tokens) >= tokens or self.task.done(), WAIT_SECONDS)
        assert not self.task.done(), "the answer was over before its time"

    async def whole(self) -> Outcome:
        """The answer, which ``ask`` has checked."""
        outcome = await self.task
        assert outcome.error is None, outcome.error
        assert len(outcome.tokens) == self._tokens
        return outcome


def hold_reads(fleet: Fleet) -> None:
    """No decode worker gets the KV of the next prompts."""
    for name in DECODERS:
        for skip in range(24):
            fleet.faults(name).read("hold", skip=skip)


def free_reads(fleet: Fleet) -> None:
    for name in DECODERS:
        if fleet.workers[name].process.poll() is None:
            fleet.faults(name).clear()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_all_die_while_it_is_queued(routed: Fleet, role: str) -> None:
    """Nobody of the role is left to place it on: it waits until one is back."""
    for name in OF_ROLE[role]:
        routed.workers[name].kill()
    asked = Asked(routed, 201)
    await until(lambda: routed.router_metric("twinpool_router_num_requests_waiting") == 1, WAIT_SECONDS)
    for name in OF_ROLE[role]:
        await asyncio.to_thread(routed.start, role, name)
    await routed.ready(*OF_ROLE[role])
    assert (await asked.whole()).done.decode_worker in DECODERS
    await routed.router_sees()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_it_dies_while_the_prompt_is_computed(routed: Fleet, role: str) -> None:
    """The decode worker has reserved, the prefill worker has its command and no token is there."""
    with stopped(routed, *PREFILLERS):
        asked = Asked(routed, 202)
        reader = await holder(routed, DECODERS)
        # Which prefill worker has it, a stopped one does not say.
        died = PREFILLERS if role == "prefill" else (reader,)
        for name in died:
            routed.workers[name].kill()
    if role == "prefill":
        for name in died:
            await restart_one_of(routed, name, died)
    outcome = await asked.whole()
    assert outcome.done.attempts > 1
    if role == "decode":
        await restart(routed, reader)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_it_dies_in_the_hand_off(routed: Fleet, role: str) -> None:
    """The client has the first token, the decode worker does not have the KV."""
    hold_reads(routed)
    asked = Asked(routed, 203)
    await asked.has(1)
    reader = await holder(routed, DECODERS)
    assert len(asked.outcome.tokens) == 1
    died = reader if role == "decode" else await holder(routed, PREFILLERS)
    routed.workers[died].kill()
    free_reads(routed)
    outcome = await asked.whole()
    assert outcome.done.attempts > 1
    await restart(routed, died)


async def test_a_prefill_worker_that_dies_while_the_answer_is_decoded_is_not_missed(routed: Fleet) -> None:
    asked = Asked(routed, 204, tokens=280)
    await asked.has(5)
    for name in PREFILLERS:
        routed.workers[name].kill()
    outcome = await asked.whole()
    assert outcome.done.attempts == 1
    for name in PREFILLERS:
        await restart_one_of(routed, name, PREFILLERS)


async def restart_one_of(fleet: Fleet, name: str, dead: tuple[str, ...]) -> None:
    """The router sees all only once the last of them is back."""
    fleet.start(fleet.workers[name].role, name)
    await fleet.ready(name)
    if name == dead[-1]:
        await fleet.router_sees()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_it_dies_with_the_last_token(routed: Fleet, role: str) -> None:
    """The answer is complete: it ends well, whoever is gone by then."""
    died: list[str] = []

    def kill_at_the_end(outcome: Outcome) -> bool:
        if len(outcome.tokens) == 40 and not died:
            died.extend(OF_ROLE[role])
            for name in died:
                routed.workers[name].kill()
        return False

    async with routed.client() as client:
        outcome = await ask(client, routed.oracle, prompt(50, 205), 40, leave=kill_at_the_end)
    assert outcome.error is None
    assert died
    for name in died:
        await restart_one_of(routed, name, tuple(died))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_it_stands_still_before_the_first_token(silent: Fleet, role: str) -> None:
    """A process that is stopped closes no connection: who waits for it gives it up by its silence."""
    done: Callable[[], bool]
    with stopped(silent, OF_ROLE[role][0]):
        asked = [Asked(silent, 210 + number, tokens=10) for number in range(4)]
        done = lambda: all(each.task.done() for each in asked)  # noqa: E731
        # While it still stands: nobody waits for its return.
        await until(done, WAIT_SECONDS)
    for each in asked:
        await each.whole()


async def test_a_decode_worker_stands_still_under_a_stream(silent: Fleet) -> None:
    asked = Asked(silent, 220, tokens=280)
    await asked.has(5)
    name = await holder(silent, DECODERS)
    with stopped(silent, name):
        outcome = await asked.whole()
    assert outcome.done.decode_worker != name
    assert outcome.done.attempts > 1


async def test_an_owner_stands_still_in_the_hand_off(silent: Fleet) -> None:
    """Reads of a stopped owner never end by themselves: their deadline ends them, and the prompt is computed elsewhere."""
    hold_reads(silent)
    asked = Asked(silent, 221)
    await asked.has(1)
    owner = await holder(silent, PREFILLERS)
    with stopped(silent, owner):
        free_reads(silent)
        outcome = await asked.whole()
    assert outcome.done.prefill_worker != owner
