# SPDX-License-Identifier: Apache-2.0
"""The batch of a step, and the parts of it that kernels get."""

import numpy as np
import pytest

from twinpool.engine.batch import AttentionBatch

Q_START, CONTEXT = np.array([0, 1, 2, 7, 10], np.int32), np.array([9, 4, 5, 12], np.int32)
TABLE = np.array([[4, 5, 6], [1, -1, -1], [2, 3, -1], [7, 8, 9]], np.int32)
SLOTS = np.arange(100, 110, dtype=np.int64)


@pytest.fixture
def batch() -> AttentionBatch:
    return AttentionBatch.build(
        q_start=Q_START,
        context=CONTEXT,
        block_table=TABLE,
        slots=SLOTS,
        block_tokens=4,
        num_decodes=2,
        last_rows=np.array([0, 1, 9]),
    )


def test_build_copies_what_the_scheduler_may_reuse(batch: AttentionBatch) -> None:
    frozen = np.array(Q_START)
    frozen.flags.writeable = False
    own = AttentionBatch.build(
        q_start=frozen, context=CONTEXT, block_table=TABLE, slots=SLOTS, block_tokens=4, num_decodes=2
    )
    assert own.last_rows is None
    assert (batch.num_sequences, batch.num_tokens) == (4, 10)
    slots = np.array(SLOTS)
    copied = AttentionBatch.build(
        q_start=Q_START, context=CONTEXT, block_table=TABLE, slots=slots, block_tokens=4, num_decodes=2
    )
    slots[:] = -1
    assert copied.slots.tolist() == SLOTS.tolist()


@pytest.mark.parametrize(("first", "last", "decodes"), [(0, 2, 2), (2, 4, 0), (1, 3, 1), (3, 4, 0)])
def test_a_part_is_a_batch_of_its_own(batch: AttentionBatch, first: int, last: int, decodes: int) -> None:
    part = batch.select(first, last)
    rows = slice(int(Q_START[first]), int(Q_START[last]))
    expected = (Q_START[first : last + 1] - Q_START[first]).tolist()
    assert part.q_start.tolist() == part.host_q_start.tolist() == expected
    assert part.context.tolist() == part.host_context.tolist() == CONTEXT[first:last].tolist()
    assert part.block_table.tolist() == part.host_block_table.tolist() == TABLE[first:last].tolist()
    assert part.slots.tolist() == SLOTS[rows].tolist()
    assert (part.num_decodes, part.last_rows) == (decodes, None)
    assert part.num_tokens == rows.stop - rows.start
    assert batch.select(first, last) is part


def test_all_of_a_batch_is_the_batch(batch: AttentionBatch) -> None:
    assert batch.select(0, 4) is batch


def test_derived_values_are_made_once(batch: AttentionBatch) -> None:
    made: list[int] = []
    for _ in range(3):
        assert batch.derived("key", lambda: made.append(1) or len(made)) == 1
    assert batch.derived("other", lambda: 7) == 7
