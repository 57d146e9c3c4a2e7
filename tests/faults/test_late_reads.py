# SPDX-License-Identifier: Apache-2.0
"""Reads that come late, fail, or are never proven: over real NIXL between real processes.

A hand-off that fails must say so before its first decoded token; one that finishes equals the oracle.
"""

import asyncio
import zlib

import pytest

from tests.support.fleet import BLOCK, Fleet
from tests.support.quiescence import inspect
from tests.support.steps import failure_of, legs, patient, prompt
from tests.support.waiting import until
from tests.support.worker_client import wait_until
from twinpool.transfer.base import Fault
from twinpool.v1 import worker_pb2 as pb

pytestmark = [pytest.mark.integration, pytest.mark.faults]


async def test_a_late_read_of_an_aborted_request_does_not_touch_the_next_one(fleet: Fleet) -> None:
    """The client of A gives up while its read is on its way; B gets blocks at once; then the bytes of A land."""
    faults = fleet.faults("decode-0")
    async with legs(fleet) as walk:
        request = fleet.request(prompt(10 * BLOCK, 1), "late-a", max_tokens=4)
        held = faults.read("hold", skip=1)
        await walk.prefilled(request)
        await faults.reached("data", held)
        await walk.cancel(request)
        counts = await inspect(fleet.workers["decode-0"].endpoint)
        # B takes all that is left, and decodes until after the bytes of A have landed.
        tokens = prompt(19 * BLOCK, 2)
        other = fleet.request(tokens, "late-b", max_tokens=45, stop=())
        running = asyncio.create_task(walk.generate(other))
        await wait_until(lambda now: now.held_blocks >= 20, fleet.workers["decode-0"].endpoint)
        await until(lambda: walk.decode.step_messages)
        faults.free()
        await faults.landed()
        assert not running.done(), "the late bytes were to land while B decodes"
        assert (await running).tokens == [fleet.oracle.greedy(tokens, 45, ignore_eos=True)]
        assert counts.quarantined_blocks == 2, "the blocks of the read that was still out"
        assert counts.held_blocks == 0, "all others were free at once"
        await fleet.assert_quiet()


async def test_blocks_of_an_aborted_read_are_free_once_it_has_landed(fleet: Fleet) -> None:
    faults = fleet.faults("decode-0")
    endpoint = fleet.workers["decode-0"].endpoint
    async with legs(fleet) as walk:
        request = fleet.request(prompt(2 * BLOCK, 3), "drain", max_tokens=4)
        held = faults.read("hold")
        await walk.prefilled(request)
        await faults.reached("data", held)
        await walk.cancel(request)
        # The owner lets go at once; only the reader waits.
        await fleet.assert_quiet("prefill-0")
        assert (await inspect(endpoint)).transfers == 1
        faults.free()
        await wait_until(lambda counts: counts.quarantined_blocks == 0, endpoint)
        await fleet.assert_quiet()
        await walk.check(prompt(2 * BLOCK, 3), "drain-again")


async def test_blocks_are_not_evicted_before_a_late_reader_has_read_them(fleet: Fleet) -> None:
    """The read starts long after prefill; other prompts, more than the owner's pool holds, come in between."""
    faults = fleet.faults("decode-0")
    async with legs(fleet) as walk, legs(fleet, decode="decode-1") as other:
        tokens = prompt(4 * BLOCK + 5, 4)
        request = fleet.request(tokens, "slow-reader", max_tokens=6)
        held = faults.read("hold")
        done = await walk.prefilled(request)
        await faults.reached("data", held)
        for number in range(6):
            await other.check(prompt(8 * BLOCK, 100 + number), f"pressure-{number}", max_tokens=2)
        counts = await inspect(fleet.workers["prefill-0"].endpoint)
        assert counts.pinned_blocks == 5
        faults.free()
        answer = await walk.rest(request, done)
        assert answer.tokens == [fleet.oracle.greedy(tokens, 6)]


@pytest.mark.parametrize("kind", ["data", "generation"])
@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_post_that_cannot_start_fails_the_attempt(fleet: Fleet, kind: str, number: int) -> None:
    """Whichever of the three reads of a prompt of three chunks it is."""
    await _fails(fleet, kind, number, "refuse", Fault.BACKEND, f"refuse-{kind}-{number}")


@pytest.mark.parametrize("kind", ["data", "generation"])
@pytest.mark.parametrize("fault", list(Fault))
async def test_every_state_of_a_read_but_done_fails_the_attempt(
    fleet: Fleet, kind: str, fault: Fault
) -> None:
    await _fails(fleet, kind, 1, "report", fault, f"report-{kind}-{fault}")


async def _fails(fleet: Fleet, kind: str, number: int, how: str, fault: Fault, name: str) -> None:
    faults = fleet.faults("decode-0")
    tokens = prompt(5 * BLOCK + 3, zlib.crc32(name.encode()) % 1000)
    async with legs(fleet) as walk:
        faults.read(how, kind=kind, value=fault, skip=number)
        request = fleet.request(tokens, name, max_tokens=6)
        cached = await walk.reserve(request)
        walk.prefill.send(request.prefill(walk.decode.record, cached))
        failed = await failure_of(walk.decode.attempt(name))
        lost = fault in (Fault.PEER_LOST, Fault.PEER_UNKNOWN)
        assert failed.reason == (pb.FAILURE_REASON_PEER_LOST if lost else pb.FAILURE_REASON_TRANSFER)
        assert fault in failed.detail
        await fleet.assert_quiet()
        # The same prompt again, as a router would place it: nothing half-read was kept.
        await patient(walk, tokens, f"{name}-again")


async def test_a_block_that_the_owner_reuses_behind_its_back_is_never_decoded(fleet: Fleet) -> None:
    """The owner's prefill leg is cancelled and its word of that is lost; the bytes are read, then the blocks are given
    to other prompts, then the generations are read."""
    faults, owner = fleet.faults("decode-0"), fleet.faults("prefill-0")
    before = fleet.metric("decode-0", "twinpool_worker_fence_failures_total", reason="STALE_GENERATION")
    async with legs(fleet) as walk, legs(fleet, decode="decode-1") as other:
        request = fleet.request(prompt(BLOCK + 3, 6), "reused", max_tokens=6)
        owner.note("to_reader", "failed", "drop")
        held = faults.read("hold", kind="generation")
        await walk.prefilled(request)
        await faults.reached("generation", held)
        await walk.cancel(request, "prefill")
        for number in range(5):
            await other.check(prompt(9 * BLOCK, 200 + number), f"overwrite-{number}", max_tokens=2)
        faults.free()
        failed = await failure_of(walk.decode.attempt("reused"))
        assert failed.reason == pb.FAILURE_REASON_FENCED
        assert "reused by the owner" in failed.detail
    after = fleet.metric("decode-0", "twinpool_worker_fence_failures_total", reason="STALE_GENERATION")
    assert after == before + 1


async def test_a_read_past_its_deadline_fails_at_once_and_holds_its_blocks(brief_fleet: Fleet) -> None:
    fleet, faults = brief_fleet, brief_fleet.faults("decode-0")
    endpoint = fleet.workers["decode-0"].endpoint
    async with legs(fleet) as walk:
        request = fleet.request(prompt(2 * BLOCK, 7), "overdue", max_tokens=6)
        faults.read("hold")
        await walk.prefilled(request)
        failed = await failure_of(walk.decode.attempt("overdue"))
        assert failed.reason == pb.FAILURE_REASON_TRANSFER
        assert "DEADLINE" in failed.detail
        counts = await inspect(endpoint)
        assert (counts.quarantined_blocks, counts.held_blocks, counts.requests) == (2, 0, 0)
        await walk.check(prompt(6 * BLOCK, 8), "beside-the-quarantine")
        faults.free()
        await fleet.assert_quiet()
