# SPDX-License-Identifier: Apache-2.0
"""Seats of several choices on a decode worker."""

from worker_pair import BLOCK, Pair, cancel_command, decode_command, random_prompt

from twinpool.v1 import worker_pb2 as pb


def test_seats_of_all_choices_are_taken_with_the_reservation() -> None:
    """Or refused there: not found missing after the hand-off."""
    pair = Pair(max_num_seqs=4)
    pair.decode.do(decode_command(pair, random_prompt(BLOCK + 3, seed=1), "first", n=3, max_tokens=6))
    pair.run(lambda: bool(pair.decode.take("reserved")))
    assert pair.decode.stack.scheduler.reserved == 3
    pair.decode.do(decode_command(pair, random_prompt(BLOCK + 3, seed=2), "second", n=2, max_tokens=6))
    pair.run(lambda: bool(pair._kinds(pair.decode, "failed")))
    (failed,) = pair.decode.take("failed")
    assert failed.failed.reason == pb.FAILURE_REASON_NO_CAPACITY
    pair.decode.do(cancel_command("first"))
    pair.turn()
    assert pair.decode.stack.scheduler.reserved == 0
    pair.assert_quiet()
