# SPDX-License-Identifier: Apache-2.0
"""Messages of the hand-off that are lost, doubled, late or wrong, between real processes.

Whatever is lost, blocks come free by themselves: by a repeated release, else by the lease; never while a reader may still
need them, and never twice.
"""

import asyncio

import pytest

from tests.support.fleet import BLOCK, Fleet
from tests.support.quiescence import inspect
from tests.support.steps import failure_of, legs, prompt
from tests.support.waiting import until
from tests.support.worker_client import wait_until
from twinpool.v1 import worker_pb2 as pb

pytestmark = [pytest.mark.integration, pytest.mark.faults]

EXPIRED = "twinpool_worker_nixl_num_kv_expired_reqs_total"
UNKNOWN = "twinpool_worker_unknown_transfers_total"
UNANSWERED = "twinpool_worker_nixl_num_failed_notifications_total"
RENEWALS_PAST_THE_LEASE = 5
"""A reader renews three times a lease."""


async def test_a_lost_release_is_repeated_long_before_the_lease_ends(fleet: Fleet) -> None:
    faults = fleet.faults("decode-0")
    before = faults.count("to_owner:release")
    async with legs(fleet) as walk:
        faults.note("to_owner", "release", "drop")
        await walk.check(prompt(2 * BLOCK, 21), "release-lost")
        await fleet.assert_quiet()
    assert faults.count("to_owner:release") == before + 2
    assert fleet.metric("prefill-0", EXPIRED) == 0


async def test_a_lost_acknowledgement_frees_nothing_twice(fleet: Fleet) -> None:
    faults, owner = fleet.faults("decode-0"), fleet.faults("prefill-0")
    released, releases = owner.count("to_reader:released"), faults.count("to_owner:release")
    unknown = fleet.metric("prefill-0", UNKNOWN, kind="release")
    async with legs(fleet) as walk:
        owner.note("to_reader", "released", "drop")
        await walk.check(prompt(2 * BLOCK, 22), "ack-lost")
        await owner.reached("to_reader:released", released + 2)
        await fleet.assert_quiet()
        assert fleet.metric("prefill-0", UNKNOWN, kind="release") == unknown + 1
        # The second answer was taken: the reader does not ask again.
        await walk.check(prompt(2 * BLOCK, 23), "ack-next")
        await owner.reached("to_reader:released", released + 3)
    assert fleet.metric("decode-0", UNANSWERED) == 0
    assert faults.count("to_owner:release") == releases + 3


async def test_a_release_that_comes_twice_does_not_free_another_reader_s_blocks(fleet: Fleet) -> None:
    """Two readers pull the same cached blocks of one owner; the first says twice that it is done."""
    first, second = fleet.faults("decode-0"), fleet.faults("decode-1")
    tokens = prompt(6 * BLOCK + 1, 24)
    async with legs(fleet) as walk, legs(fleet, decode="decode-1") as other:
        request = fleet.request(tokens, "twice-slow", max_tokens=5)
        held = second.read("hold")
        done = await other.prefilled(request)
        await second.reached("data", held)
        first.note("to_owner", "release", "duplicate")
        await walk.check(tokens, "twice-fast", max_tokens=5)
        counts = await inspect(fleet.workers["prefill-0"].endpoint)
        assert counts.pinned_blocks == 7
        for number in range(5):
            await walk.check(prompt(9 * BLOCK, 300 + number), f"twice-pressure-{number}", max_tokens=2)
        second.free()
        answer = await other.rest(request, done)
        assert answer.tokens == [fleet.oracle.greedy(tokens, 5)]


async def test_a_release_of_another_transfer_frees_nothing(brief_fleet: Fleet) -> None:
    """It names a transfer that the owner never minted: it is answered as unknown, and the lease ends the pins."""
    fleet, faults = brief_fleet, brief_fleet.faults("decode-0")
    expired, unknown = (
        fleet.metric("prefill-0", EXPIRED),
        fleet.metric("prefill-0", UNKNOWN, kind="release"),
    )
    async with legs(fleet) as walk:
        faults.note("to_owner", "release", "alter")
        await walk.check(prompt(2 * BLOCK, 25), "wrong-id")
        await wait_until(lambda counts: counts.requests == 0, fleet.workers["decode-0"].endpoint)
        assert (await inspect(fleet.workers["prefill-0"].endpoint)).pinned_blocks == 2
        await fleet.assert_quiet()
    assert fleet.metric("prefill-0", UNKNOWN, kind="release") == unknown + 1
    assert fleet.metric("prefill-0", EXPIRED) == expired + 1


async def test_a_reader_that_waits_longer_than_the_lease_keeps_its_blocks(brief_fleet: Fleet) -> None:
    fleet, owner, faults = brief_fleet, brief_fleet.faults("prefill-0"), brief_fleet.faults("decode-0")
    renewals, expired = faults.count("to_owner:renew"), fleet.metric("prefill-0", EXPIRED)
    tokens = prompt(5 * BLOCK + 2, 26)
    async with legs(fleet) as walk:
        owner.note("to_reader", "complete", "hold")
        request = fleet.request(tokens, "patience", max_tokens=6)
        done = await walk.prefilled(request)
        await faults.reached("to_owner:renew", renewals + RENEWALS_PAST_THE_LEASE)
        assert (await inspect(fleet.workers["prefill-0"].endpoint)).pinned_blocks == 6
        owner.free()
        answer = await walk.rest(request, done)
        assert answer.tokens == [fleet.oracle.greedy(tokens, 6)]
        await fleet.assert_quiet()
    assert fleet.metric("prefill-0", EXPIRED) == expired


async def test_a_reader_whose_renewals_are_lost_fails_and_says_why(brief_fleet: Fleet) -> None:
    fleet, owner, faults = brief_fleet, brief_fleet.faults("prefill-0"), brief_fleet.faults("decode-0")
    expired = fleet.metric("prefill-0", EXPIRED)
    async with legs(fleet) as walk:
        owner.note("to_reader", "complete", "hold")
        faults.note("to_owner", "renew", "drop", times=100)
        request = fleet.request(prompt(5 * BLOCK + 2, 27), "renewals-lost", max_tokens=6)
        await walk.prefilled(request)
        failed = await failure_of(walk.decode.attempt("renewals-lost"))
        assert failed.reason == pb.FAILURE_REASON_FENCED
        assert "no longer holds" in failed.detail
        await fleet.assert_quiet()
        owner.free()  # the ticket that comes after the end is nobody's
        await fleet.assert_quiet()
    assert fleet.metric("prefill-0", EXPIRED) == expired + 1
    assert fleet.metric("decode-0", "twinpool_worker_fence_failures_total", reason="LEASE_LOST") >= 1


async def test_a_ticket_older_than_its_lease_never_yields_another_prompt_s_text(brief_fleet: Fleet) -> None:
    """The ticket waits on its way until the lease has ended and the blocks hold other prompts."""
    fleet, owner = brief_fleet, brief_fleet.faults("prefill-0")
    expired = fleet.metric("prefill-0", EXPIRED)
    async with legs(fleet) as walk:
        owner.note("to_reader", "complete", "hold")
        request = fleet.request(prompt(2 * BLOCK, 28), "old-ticket", max_tokens=6)
        await walk.prefilled(request)
        await wait_until(lambda counts: counts.pinned_blocks == 0, fleet.workers["prefill-0"].endpoint)
        assert fleet.metric("prefill-0", EXPIRED) == expired + 1
        for number in range(4):
            await walk.check(prompt(9 * BLOCK, 400 + number), f"overwrite-{number}", max_tokens=2)
        owner.free()
        failed = await failure_of(walk.decode.attempt("old-ticket"))
        assert failed.reason == pb.FAILURE_REASON_FENCED
        assert "reused by the owner" in failed.detail


async def test_a_ticket_that_comes_twice_fails_the_attempt(fleet: Fleet) -> None:
    owner = fleet.faults("prefill-0")
    async with legs(fleet) as walk:
        owner.note("to_reader", "chunk_ready", "duplicate")
        request = fleet.request(prompt(5 * BLOCK, 29), "ticket-twice", max_tokens=4)
        cached = await walk.reserve(request)
        walk.prefill.send(request.prefill(walk.decode.record, cached))
        failed = await failure_of(walk.decode.attempt("ticket-twice"))
        assert failed.reason == pb.FAILURE_REASON_FENCED
        assert fleet.metric("decode-0", "twinpool_worker_fence_failures_total", reason="OUT_OF_ORDER") >= 1


async def test_abandoned_prompts_come_free_with_no_new_work(brief_fleet: Fleet) -> None:
    """Many prompts are prefilled, their readers give up and none of their releases gets through. Far more than the pool
    holds: those that wait are served only because the leases of those before them end by the clock alone."""
    fleet, faults = brief_fleet, brief_fleet.faults("decode-0")
    expired, unanswered = fleet.metric("prefill-0", EXPIRED), fleet.metric("decode-0", UNANSWERED)
    async with legs(fleet) as walk:
        faults.note("to_owner", "release", "drop", times=10_000)
        requests = [fleet.request(prompt(5 * BLOCK, 500 + number), f"left-{number}") for number in range(12)]

        async def abandon(number: int) -> None:
            request = requests[number]
            # The pool of the reader takes four at a time.
            cached = await walk.reserve(request)
            walk.prefill.send(request.prefill(walk.decode.record, cached))
            await walk.cancel(request, "decode")

        for first in range(0, len(requests), 4):
            await asyncio.gather(*(abandon(number) for number in range(first, first + 4)))
        # Looked at from outside of its loop: asking the owner itself would wake it.
        await until(lambda: fleet.metric("prefill-0", EXPIRED) == expired + len(requests))
        await fleet.assert_quiet()
        # Each release was tried until it was given up.
        await until(lambda: fleet.metric("decode-0", UNANSWERED) == unanswered + len(requests))
        faults.clear()
        await walk.check(prompt(20 * BLOCK, 30), "whole-pool", max_tokens=4)
