# SPDX-License-Identifier: Apache-2.0
"""A stream's queue: order, end, and a peer that does not read."""

import asyncio

from twinpool.errors import TwinpoolError
from twinpool.worker.streams import MessageQueue


async def _all(queue: MessageQueue[int]) -> list[int]:
    return [message async for message in queue.messages()]


async def test_messages_come_in_order_and_end_with_close() -> None:
    queue: MessageQueue[int] = MessageQueue()
    for number in range(5):
        assert queue.send(number)
    queue.close()
    assert not queue.send(99)
    assert await _all(queue) == [0, 1, 2, 3, 4]


async def test_an_error_comes_after_what_is_queued() -> None:
    queue: MessageQueue[int] = MessageQueue()
    queue.send(1)
    error = TwinpoolError("DRAINING")
    queue.close(error)
    queue.close(TwinpoolError("INTERNAL"))
    assert await _all(queue) == [1]
    assert queue.error is error


async def test_drop_ends_at_once() -> None:
    queue: MessageQueue[int] = MessageQueue()
    queue.send(1)
    queue.close(drop=True)
    assert await _all(queue) == []


async def test_a_slow_peer_loses_its_stream() -> None:
    queue: MessageQueue[int] = MessageQueue(limit=3)
    assert [queue.send(number) for number in range(5)] == [True, True, True, False, False]
    assert queue.error is not None
    assert queue.error.reason == "QUEUE_FULL"
    assert await _all(queue) == []


async def test_a_waiting_reader_wakes() -> None:
    queue: MessageQueue[int] = MessageQueue()
    reader = asyncio.create_task(_all(queue))
    await asyncio.sleep(0)
    queue.send(7)
    queue.close()
    assert await asyncio.wait_for(reader, 60) == [7]
