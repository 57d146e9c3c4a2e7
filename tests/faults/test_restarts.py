# SPDX-License-Identifier: Apache-2.0
"""Workers that are killed, and come back under their old name and address as another incarnation.

A client either gets the oracle's answer, or a prefix of it and the true reason; after the restart it gets answers again,
never through what the old incarnation left behind.
"""

import asyncio
import itertools

import pytest

from tests.support.asking import Outcome, ask
from tests.support.fleet import BLOCK, Fleet, available_port
from tests.support.load import under_load
from tests.support.steps import legs, prompt
from twinpool.transfer.base import Fault

pytestmark = [pytest.mark.integration, pytest.mark.faults]

DECODERS = ("decode-0", "decode-1")
LOST = {"WORKER_LOST", "TRANSFER_FAILED", "KV_FENCED", "ATTEMPTS_EXHAUSTED", "NO_CAPACITY", "NO_WORKERS"}


async def restart(fleet: Fleet, name: str, settings: dict[str, object] | None = None) -> None:
    """The next incarnation of a dead worker, seen by the router."""
    before = fleet.workers[name].record.worker.incarnation
    fleet.start(fleet.workers[name].role, name, settings)
    await fleet.ready(name)
    assert fleet.workers[name].record.worker.incarnation != before
    await fleet.router_sees()


async def test_a_decode_worker_that_dies_under_a_stream(routed: Fleet) -> None:
    """The answer goes on at the next token on the other one, and is the one that nobody interrupted."""
    before = {name: routed.faults(name).count("to_owner:release") for name in DECODERS}
    async with routed.client() as client:
        killed: list[str] = []

        def kill_after_five(outcome: Outcome) -> bool:
            if len(outcome.tokens) >= 5 and not killed:
                # The one that has taken a prompt over.
                (name,) = (n for n in DECODERS if routed.faults(n).count("to_owner:release") > before[n])
                routed.workers[name].kill()
                killed.append(name)
            return False

        outcome = await ask(client, routed.oracle, prompt(3 * BLOCK, 71), 290, leave=kill_after_five)
        assert len(killed) == 1
        assert len(outcome.tokens) == 290
        assert outcome.done.decode_worker not in killed
        assert outcome.done.attempts > 1
        # What needs the dead one no more is served at once.
        other = await ask(client, routed.oracle, prompt(3 * BLOCK, 72), 5)
        assert other.done.decode_worker not in killed
        await restart(routed, killed[0])


async def test_a_prefill_worker_that_dies_before_the_first_token(routed: Fleet) -> None:
    """The attempt is placed anew, unseen by the client."""
    for name in DECODERS:
        for skip in range(12):
            routed.faults(name).read("hold", skip=skip)
    async with routed.client() as client:
        running = asyncio.create_task(ask(client, routed.oracle, prompt(20 * BLOCK, 73), 5))
        name = ""
        while not name and not running.done():
            for decoder, owner in itertools.product(DECODERS, ("prefill-0", "prefill-1")):
                if routed.faults(decoder).count("late") and routed.faults(owner).count(
                    "to_reader:chunk_ready"
                ):
                    name = owner
            await asyncio.sleep(0.001)
        assert name, "the first chunk was never offered"
        routed.workers[name].kill()
        for decoder in DECODERS:
            routed.faults(decoder).clear()
        outcome = await running
        assert len(outcome.tokens) == 5
        await restart(routed, name)


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_worker_that_comes_back_on_the_same_address(routed: Fleet, role: str, rounds: int) -> None:
    """The peer's metadata of the old incarnation are stale; its name and its port are the same."""
    name = f"{role}-0"
    port = {"worker.port": available_port()}
    routed.workers[name].kill()
    await restart(routed, name, port)
    async with under_load(routed, seed=74, longest=150, max_tokens=6) as load:
        for _ in range(rounds):
            await load.more(6)
            endpoint = routed.workers[name].endpoint
            routed.workers[name].kill()
            await restart(routed, name, port)
            assert routed.workers[name].endpoint == endpoint
    outcomes = load.outcomes
    reasons = {outcome.reason for outcome in outcomes if outcome.error is not None}
    assert reasons <= LOST
    assert sum(outcome.finished is not None for outcome in outcomes) >= len(outcomes) / 2
    # The new incarnation itself serves, in a pair with each peer of the other role.
    for peer in range(2):
        pair = (name, f"decode-{peer}") if role == "prefill" else (f"prefill-{peer}", name)
        async with legs(routed, *pair) as walk:
            await walk.check(prompt(4 * BLOCK + peer, 80), f"back-{role}-{rounds}-{peer}")


async def test_an_owner_that_dies_in_the_middle_of_a_hand_off_leaves_nothing_behind(routed: Fleet) -> None:
    """Blocks were announced, some were read, some are on their way; its successor knows nothing of them."""
    faults = routed.faults("decode-0")
    async with legs(routed, "prefill-0", "decode-0") as walk:
        request = routed.request(prompt(6 * BLOCK, 81), "orphan-of-owner", max_tokens=5)
        held = faults.read("hold", skip=2)
        await walk.prefilled(request)
        await faults.reached("data", held)
        routed.workers["prefill-0"].kill()
        queue = walk.decode.attempt(request.request_id)
        while (message := await asyncio.wait_for(queue.get(), 60)).WhichOneof("message") != "failed":
            assert message.WhichOneof("message") != "step"
        # The read that is held is posted to a dead peer now, and ends.
        faults.free()
        await routed.assert_quiet("decode-0")
        await restart(routed, "prefill-0")
    async with legs(routed, "prefill-0", "decode-0") as walk:
        await walk.check(prompt(6 * BLOCK, 81), "orphan-again")


async def test_reads_that_a_transport_reports_as_lost_quarantine_no_one(routed: Fleet) -> None:
    """A link that breaks without its peer being dead: the pair serves again by itself."""
    faults = routed.faults("decode-0")
    async with legs(routed, "prefill-0", "decode-0") as walk:
        faults.read("report", value=Fault.PEER_LOST)
        request = routed.request(prompt(2 * BLOCK, 82), "flicker", max_tokens=5)
        await walk.prefilled(request)
        queue = walk.decode.attempt(request.request_id)
        while (await asyncio.wait_for(queue.get(), 60)).WhichOneof("message") != "failed":
            pass
        await walk.check(prompt(2 * BLOCK, 82), "flicker-again")
