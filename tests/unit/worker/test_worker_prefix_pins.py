# SPDX-License-Identifier: Apache-2.0
"""Prefixes that a worker keeps: through pressure, until their time has passed, and never so that nothing goes on any more."""

import numpy as np
import pytest
from prometheus_client import REGISTRY
from worker_pair import BLOCK, ROOT, Pair, Worker, random_prompt, reference

from twinpool._core import hash_blocks
from twinpool.errors import TwinpoolError
from twinpool.v1 import worker_pb2 as pb

SESSION, OTHER = b"s" * 16, b"o" * 16


def hashes(prompt: list[int]) -> np.ndarray:
    return hash_blocks(ROOT, np.array(prompt, np.int32), BLOCK)


def chain(prompt: list[int]) -> pb.PrefixChain:
    return pb.PrefixChain(block_hashes=hashes(prompt).tobytes(), root_hash=ROOT)


def wanted(prompt: list[int], seconds: float = 60.0, **fields: object) -> pb.PinPrefixRequest:
    request = pb.PinPrefixRequest(
        chain=chain(prompt), **{"tenant": "t", "max_tenant_tokens": 1 << 20, **fields}
    )  # type: ignore[arg-type]
    request.lease.FromNanoseconds(int(seconds * 1e9))
    return request


def pin(worker: Worker, request: pb.PinPrefixRequest) -> pb.PinPrefixResponse:
    worker.assembly.parts.pins.check_pin(request)
    return worker.assembly.parts.pins.pin(request)


def release(worker: Worker, **target: object) -> pb.ReleasePrefixResponse:
    request = pb.ReleasePrefixRequest(**{"tenant": "t", **target})  # type: ignore[arg-type]
    worker.assembly.parts.pins.check_release(request)
    return worker.assembly.parts.pins.release(request)


def cached(worker: Worker, prompt: list[int]) -> int:
    return worker.stack.blocks.lookup(hashes(prompt))


def events(outcome: str) -> float:
    return REGISTRY.get_sample_value("twinpool_worker_prefix_pin_events_total", {"outcome": outcome}) or 0.0


def pressure(pair: Pair, requests: int = 8) -> None:
    """Prompts that fill both pools again and again."""
    for number in range(requests):
        prompt = random_prompt(4 * BLOCK, 900 + number)
        assert pair.generate(prompt, f"pressure-{number}", max_tokens=2) == [reference(prompt, 2)]


def test_a_pinned_prefix_outlives_what_evicts_all_else() -> None:
    pair = Pair(prefill_blocks=16, decode_blocks=16, sessions={"max_pinned_ratio": 0.5})
    kept, lost = random_prompt(4 * BLOCK + 3, 1), random_prompt(4 * BLOCK, 2)
    for name, prompt in (("kept", kept), ("lost", lost)):
        pair.generate(prompt, name, max_tokens=2)
    pair.settle()
    before = events("pinned")
    pinned = pin(pair.prefill, wanted(kept))
    assert (pinned.tokens, events("pinned") - before) == (4 * BLOCK, 1)
    assert pair.prefill.stack.blocks.available_blocks == 12
    pressure(pair)
    assert (cached(pair.prefill, kept), cached(pair.prefill, lost)) == (4, 0)
    assert cached(pair.decode, kept) == 0, "it is pinned on the one worker alone"
    assert pair.generate(kept, "again", max_tokens=3) == [reference(kept, 3)]
    pair.assert_quiet()
    loads = [message.load for message in pair.prefill.take("load")]
    assert not loads, "no session is open"


def test_a_pin_ends_by_the_worker_s_own_clock_with_nothing_to_do() -> None:
    pair = Pair(prefill_blocks=16)
    prompt = random_prompt(4 * BLOCK, 1)
    pair.generate(prompt, max_tokens=2)
    pin(pair.prefill, wanted(prompt, 30.0))
    blocks, pins, before = pair.prefill.stack.blocks, pair.prefill.assembly.parts.pins, events("expired")
    assert pins.next_wake() == pair.clock.now + 30.0
    longer = pin(pair.prefill, wanted(prompt, 50.0))
    assert longer.expires_in.ToSeconds() == 50
    assert pin(pair.prefill, wanted(prompt, 10.0)).expires_in.ToSeconds() == 50, "never shorter"
    pair.turn(49.0)
    assert (blocks.prefix_pins, events("expired") - before) == (1, 0)
    pair.turn(1.5)
    assert (blocks.prefix_pins, events("expired") - before) == (0, 1)
    assert pins.next_wake() is None
    assert cached(pair.prefill, prompt) == 4, "only its protection has ended"
    assert blocks.available_blocks == 16
    pressure(pair)
    assert cached(pair.prefill, prompt) == 0
    pair.assert_quiet()


def test_limits_refuse_by_name_and_pin_nothing() -> None:
    pair = Pair(prefill_blocks=16, sessions={"max_pinned_ratio": 0.25, "max_pin_seconds": 100})
    first, second = random_prompt(4 * BLOCK, 1), random_prompt(4 * BLOCK, 2)
    for number, prompt in enumerate((first, second)):
        pair.generate(prompt, f"r{number}", max_tokens=2)
    assert pin(pair.prefill, wanted(first, max_tenant_tokens=4 * BLOCK)).tokens == 4 * BLOCK
    before = events("refused")
    with pytest.raises(TwinpoolError, match="PIN_QUOTA") as quota:
        pin(pair.prefill, wanted(second, max_tenant_tokens=8 * BLOCK - 1))
    assert (quota.value.metadata["limit"], quota.value.retry_after) == (str(8 * BLOCK - 1), 60.0)
    with pytest.raises(TwinpoolError, match="PIN_CAPACITY") as capacity:
        pin(pair.prefill, wanted(second, tenant="u"))
    assert capacity.value.metadata["limit"] == "sessions.max_pinned_ratio=0.25"
    assert events("refused") - before == 2
    assert pin(pair.prefill, wanted(first, tenant="u")).tokens == 4 * BLOCK, (
        "the same blocks take no more room"
    )
    with pytest.raises(TwinpoolError, match="INVALID_PIN"):
        pin(pair.prefill, wanted(first, 101.0))
    for wrong in (wanted(first, session=b"short"), wanted(first, tenant="x" * 300), wanted([])):
        with pytest.raises(TwinpoolError, match="INVALID_ARGUMENT"):
            pin(pair.prefill, wrong)
    middle = wanted(first)
    middle.chain.block_hashes = middle.chain.block_hashes[16:]
    with pytest.raises(TwinpoolError, match="a chain from its root"):
        pin(pair.prefill, middle)
    assert pair.prefill.stack.blocks.prefix_pinned_blocks == 4
    pair.assert_quiet()


def test_what_is_not_cached_is_not_pinned_and_only_what_is_pinned_is_renewed() -> None:
    pair = Pair()
    prompt = random_prompt(4 * BLOCK, 1)
    assert not pin(pair.prefill, wanted(prompt)).pin_id
    pair.generate(prompt, max_tokens=2)
    assert not pin(pair.prefill, wanted(prompt, renew=True)).pin_id
    name = pin(pair.prefill, wanted(prompt)).pin_id
    assert pin(pair.prefill, wanted(prompt, renew=True)).pin_id == name
    assert pin(pair.decode, wanted(prompt)).pin_id == name, "the same on every worker"
    assert pin(pair.prefill, wanted(prompt, session=SESSION)).pin_id != name
    pair.assert_quiet()


def test_release_is_of_the_own_tenant_and_repeats_to_no_effect() -> None:
    pair = Pair(prefill_blocks=24, sessions={"max_pinned_ratio": 0.9})
    one, two = random_prompt(4 * BLOCK, 1), random_prompt(3 * BLOCK, 2)
    for number, prompt in enumerate((one, two)):
        pair.generate(prompt, f"r{number}", max_tokens=2)
    name = pin(pair.prefill, wanted(one, session=SESSION)).pin_id
    pin(pair.prefill, wanted(two, session=SESSION))
    pin(pair.prefill, wanted(two, tenant="u", session=SESSION))
    assert release(pair.prefill, tenant="u", pin_id=name).pins == 0
    told = release(pair.prefill, pin_id=name)
    assert (told.pins, told.tokens, told.demoted_tokens) == (1, 4 * BLOCK, 4 * BLOCK)
    assert release(pair.prefill, pin_id=name).pins == 0
    told = release(pair.prefill, session=SESSION)
    assert (told.pins, told.tokens, told.demoted_tokens) == (1, 3 * BLOCK, 0), "another tenant keeps it"
    assert release(pair.prefill, session=SESSION).pins == 0
    assert release(pair.prefill, tenant="u", chain=chain(two)).pins == 1
    assert release(pair.prefill, tenant="u", chain=chain(two)).pins == 0
    with pytest.raises(TwinpoolError, match="INVALID_ARGUMENT"):
        release(pair.prefill)
    assert pair.prefill.stack.blocks.prefix_pins == 0
    pair.assert_quiet()


def test_a_released_session_goes_first_on_both_workers() -> None:
    pair = Pair(prefill_blocks=16, decode_blocks=16)
    shared = random_prompt(2 * BLOCK, 5)
    ended, other = shared + random_prompt(3 * BLOCK, 6), shared + random_prompt(3 * BLOCK, 7)
    pair.generate(other, "other", max_tokens=2, session=OTHER)
    pair.generate(ended, "ended", max_tokens=2 * BLOCK + 2, session=SESSION)
    # The prompt's own part on the one, and what was generated besides on the other.
    assert release(pair.prefill, session=SESSION).demoted_tokens == 3 * BLOCK
    assert release(pair.decode, session=SESSION).demoted_tokens == 5 * BLOCK
    assert release(pair.decode, session=SESSION).demoted_tokens == 0, "it is forgotten"
    assert cached(pair.prefill, ended) == 5, "nothing is erased"
    for worker, room in ((pair.prefill, 8), (pair.decode, 6)):
        assert worker.stack.blocks.free_blocks == room
        taken = worker.stack.blocks.allocate(room + 3)
        assert taken is not None
        assert (cached(worker, ended) < 5, cached(worker, other)) == (True, 5), "the newer session went first"
        worker.stack.blocks.release(taken)
    pair.assert_quiet()


def test_a_turn_replaces_the_one_before_and_sessions_are_bounded() -> None:
    pair = Pair(sessions={"max_noted_sessions": 1})
    first, second = random_prompt(3 * BLOCK, 1), random_prompt(2 * BLOCK, 2)
    pair.generate(first, "r1", max_tokens=2, session=SESSION)
    pair.generate(second, "r2", max_tokens=2, session=SESSION)
    pair.settle()
    assert release(pair.prefill, session=SESSION).demoted_tokens == 2 * BLOCK
    pair.generate(first, "r3", max_tokens=2, session=SESSION)
    pair.generate(second, "r4", max_tokens=2, session=OTHER)
    pair.settle()
    assert release(pair.prefill, session=SESSION).demoted_tokens == 0, "another one took its place"
    pair.assert_quiet()


def test_what_is_still_held_at_the_release_goes_first_a_moment_later() -> None:
    pair = Pair(prefill_blocks=16)
    ended, other = random_prompt(3 * BLOCK, 1), random_prompt(3 * BLOCK, 2)
    pair.generate(other, "other", max_tokens=2, session=OTHER)
    pair.settle()
    pair.generate(ended, "ended", max_tokens=2, session=SESSION)
    assert pair.prefill.stack.blocks.pinned_blocks, "the reader has not said that it is done"
    assert release(pair.prefill, session=SESSION).demoted_tokens == 0
    pair.settle()
    assert pair.prefill.assembly.parts.pins.next_wake() is not None
    pair.turn(1.0)
    assert pair.prefill.assembly.parts.pins.next_wake() is None
    blocks = pair.prefill.stack.blocks
    taken = blocks.allocate(blocks.free_blocks + 3)
    assert taken is not None
    assert (cached(pair.prefill, ended), cached(pair.prefill, other)) == (0, 3)
    blocks.release(taken)
    pair.assert_quiet()


def test_a_prompt_that_fits_only_without_pins_ends_the_one_that_would_end_first() -> None:
    pair = Pair(prefill_blocks=12, sessions={"max_pinned_ratio": 0.9})
    soon, later = random_prompt(4 * BLOCK, 1), random_prompt(4 * BLOCK, 2)
    for number, prompt in enumerate((later, soon)):
        pair.generate(prompt, f"r{number}", max_tokens=2)
    pin(pair.prefill, wanted(later, 90.0))
    pin(pair.prefill, wanted(soon, 30.0))
    before = events("gave_way")
    large = random_prompt(7 * BLOCK, 3)
    assert pair.generate(large, "large", max_tokens=3) == [reference(large, 3)]
    assert events("gave_way") - before == 1
    assert (cached(pair.prefill, later), pair.prefill.stack.blocks.prefix_pins) == (4, 1)
    pair.assert_quiet()


def test_pins_are_part_of_the_load() -> None:
    pair = Pair(prefill_blocks=16)
    prompt = random_prompt(4 * BLOCK, 1)
    pair.generate(prompt, max_tokens=2)
    loop = pair.prefill.assembly.loop
    loop.post(lambda: loop.load.open(1))
    pair.settle()
    assert [message.load.prefix_pinned_blocks for message in pair.prefill.take("load")][-1] == 0
    pin(pair.prefill, wanted(prompt))
    pair.turn(1.0)
    (load,) = [message.load for message in pair.prefill.take("load")]
    assert (load.prefix_pinned_blocks, load.cached_blocks, load.available_blocks) == (4, 4, 12)
