# SPDX-License-Identifier: Apache-2.0
"""On the step thread: the role of a worker is replaced, and all that it works with goes on in the other one."""

import pytest
from test_worker_kept import begin, drawn, lose_router, rows, take_over
from worker_pair import BLOCK, SESSION, Pair, Worker, prefix_source, random_prompt, reference
from worker_requests import decode_command, prefill_command

from twinpool import launch
from twinpool.transfer.base import AttemptKey
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.load import STEP_WINDOW


def become(worker: Worker, role: str, epoch: int) -> None:
    """As ``Serving.change_role`` does it."""
    made = launch.role_factory(role)(worker.assembly.parts)
    made.epoch = epoch
    worker.assembly.loop.post(lambda: worker.assembly.loop.replace_role(made))


def exchange(pair: Pair, epoch: int) -> None:
    """Each of the two has the other one's role."""
    become(pair.prefill, "decode", epoch)
    become(pair.decode, "prefill", epoch)
    pair.prefill, pair.decode = pair.decode, pair.prefill
    pair.settle()


def test_roles_are_exchanged_to_and_fro() -> None:
    """Links stay up, and nobody hears of them again: who reads over one that stands must know it."""
    pair = Pair()
    for number in range(5):
        prompt = random_prompt(2 * BLOCK + 3, seed=number)
        assert pair.generate(prompt, f"r{number}", max_tokens=6) == [reference(prompt, 6)]
        pair.assert_quiet()
        links = {(link.reader.key, link.owner.key) for link in pair.links}
        exchange(pair, number + 2)
    # One for each direction, of the first two rounds.
    assert len(links) == len(pair.links) == 2
    assert pair.prefill.assembly.loop.role.role == pb.ROLE_PREFILL
    pair.assert_quiet()


def test_what_was_pulled_in_the_one_role_is_cached_in_the_other() -> None:
    pair = Pair()
    prompt = random_prompt(3 * BLOCK + 3)
    pair.generate(prompt, "first", max_tokens=4)
    exchange(pair, 2)
    # The decode worker computes now; it has pulled the KV of the prompt before.
    pair.start(prompt, "second", max_tokens=4)
    pair.run(lambda: bool(pair._kinds(pair.prefill, "prefill_done")))
    (done,) = pair.prefill.take("prefill_done")
    assert done.prefill_done.cached_tokens == 3 * BLOCK
    pair.run(lambda: bool(pair._kinds(pair.decode, "handoff_done")))
    (handed,) = pair.decode.take("handoff_done")
    # Nor does the one that decodes need more than the block that was not full.
    assert handed.handoff_done.stats.blocks <= 1


def test_commands_of_another_epoch_are_refused() -> None:
    pair = Pair()
    prompt = random_prompt(BLOCK + 3)
    become(pair.decode, "prefill", 2)
    become(pair.decode, "decode", 3)
    pair.settle()
    stale = decode_command(pair, prompt, max_tokens=4)
    stale.decode.epoch = 1
    pair.decode.do(stale)
    pair.settle()
    (failed,) = pair.decode.take("failed")
    assert failed.failed.reason == pb.FAILURE_REASON_STALE_EPOCH
    assert "epoch 1" in failed.failed.detail
    pair.assert_quiet()
    # Nothing of it was taken: the attempt may come again, by who knows the epoch, or says none.
    stale.decode.epoch = 3
    pair.decode.do(stale)
    pair.run(lambda: pair.decode.take("reserved"))
    command = prefill_command(pair, prompt, max_tokens=4)
    assert not command.prefill.epoch
    pair.prefill.do(command)
    pair.run(lambda: pair.prefill.take("prefill_done"))


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_what_is_left_of_the_former_role_fails_and_holds_nothing(side: str) -> None:
    pair = Pair()
    begun = pair.start(random_prompt(5 * BLOCK), max_tokens=200)
    if side == "decode":
        pair.run(drawn(pair, 2))
    worker: Worker = getattr(pair, side)
    pair.run(lambda: worker.assembly.loop.role.attempts == 1)
    become(worker, "decode" if side == "prefill" else "prefill", 2)
    pair.settle()
    (failed,) = worker.take("failed")
    assert failed.failed.reason == pb.FAILURE_REASON_NOT_SERVING
    assert AttemptKey.of(failed.failed.id) == begun
    # The other one hears of it by its router, or by its peer.
    pair.prefill.assembly.loop.role.on_session_closed(SESSION)
    pair.decode.assembly.loop.role.on_session_closed(SESSION)
    pair.assert_quiet()


def test_answers_that_are_kept_outlive_the_role() -> None:
    pair, prompt = Pair(), random_prompt(2 * BLOCK + 3)
    begin(pair, prompt, max_tokens=20)
    pair.run(drawn(pair, 3))
    lose_router(pair)
    exchange(pair, 2)
    pair.decode = pair.prefill  # whom the question goes to
    state = take_over(pair)
    assert state is not None
    assert rows(state)[0] == reference(prompt, 20)[: len(rows(state)[0])]
    assert rows(state)[0]
    # They end in their time, in whichever role.
    kept = pair.prefill.assembly.parts.kept
    assert len(kept) == 1
    pair.turn(seconds=11.0)
    assert len(kept) == 0


def test_readers_of_cached_prefixes_keep_no_role_from_ending() -> None:
    """They read from the cache, which stays; what runs does."""
    pair = Pair()
    prompt, before = random_prompt(3 * BLOCK + 3), random_prompt(2 * BLOCK + 3, seed=2)
    for each in (before, prompt):
        pair.generate(each, f"r{len(each)}", max_tokens=4)
    owner, other = pair.prefill, pair.add("prefill", "prefill-1")
    pair.prefill = other
    # All links are up, so what follows waits for a read alone.
    pair.start(before, "linked", max_tokens=4, prefix=prefix_source(owner, 2))
    pair.run(lambda: other.take("prefill_done"))
    pair.settle(200)
    pair.stalled = True
    pair.start(prompt, "second", max_tokens=4, prefix=prefix_source(owner, 3))
    role = owner.assembly.loop.role
    pair.run(lambda: role.requests > role.attempts == 0)
    quiet = owner.assembly.loop.when_quiet()
    free = owner.assembly.loop.when_quiet(readers=False)
    pair.settle()
    assert (quiet.done(), free.done()) == (False, True)
    # It is read to its end by what the worker has become.
    become(owner, "decode", 2)
    pair.settle()
    pair.stalled = False
    pair.run(lambda: bool(pair._kinds(other, "prefill_done")))
    (done,) = other.take("prefill_done")
    assert done.prefill_done.cached_tokens == 3 * BLOCK
    pair.run(quiet.done)


def test_steps_of_the_other_role_are_not_reported() -> None:
    pair = Pair()
    pair.generate(random_prompt(BLOCK), max_tokens=4)
    load = pair.decode.assembly.loop.load
    for _ in range(STEP_WINDOW):
        load.step_took(3.0)
    assert load.step_seconds() == 3.0
    become(pair.decode, "prefill", 2)
    pair.settle()
    assert load.step_seconds() == 0
