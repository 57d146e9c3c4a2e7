# SPDX-License-Identifier: Apache-2.0
"""A client that takes nothing is waited for so long and no longer."""

import asyncio

import pytest

from twinpool.errors import TwinpoolError
from twinpool.router.patience import patient
from twinpool.v1 import inference_pb2 as pb


async def test_a_write_that_does_not_end_is_given_up_with_the_limit() -> None:
    cancelled = asyncio.Event()

    async def write(event: pb.GenerateResponse) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(TwinpoolError) as caught:
        await patient(write, 0.01)(pb.GenerateResponse())
    assert caught.value.reason == "CLIENT_TOO_SLOW"
    assert caught.value.metadata == {"limit_seconds": "0.01"}
    assert cancelled.is_set()


async def test_events_and_errors_pass() -> None:
    written: list[pb.GenerateResponse] = []

    async def write(event: pb.GenerateResponse) -> None:
        written.append(event)
        if len(written) > 1:
            raise TwinpoolError("CANCELLED")

    bounded = patient(write, 60.0)
    event = pb.GenerateResponse(tokens=pb.GenerateTokens(token_ids=[1]))
    await bounded(event)
    assert written == [event]
    with pytest.raises(TwinpoolError, match="cancelled"):
        await bounded(event)


async def test_a_write_that_waits_gets_what_it_waits_for() -> None:
    ready, heard = asyncio.get_running_loop().create_future(), []

    async def write(event: pb.GenerateResponse) -> None:
        for waited in (ready, asyncio.sleep(0, "again")):
            heard.append(await waited)

    writing = asyncio.ensure_future(patient(write, 60.0)(pb.GenerateResponse()))
    await asyncio.sleep(0)
    ready.set_result("taken")
    await writing
    assert heard == ["taken", "again"]


async def test_who_cancels_a_write_that_waits_ends_it_with_its_own_cancel() -> None:
    waits, ended = asyncio.Event(), asyncio.Event()

    async def write(event: pb.GenerateResponse) -> None:
        waits.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    writing = asyncio.ensure_future(patient(write, 60.0)(pb.GenerateResponse()))
    await waits.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert ended.is_set()


async def test_a_write_that_is_taken_at_once_starts_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(seconds: float) -> None:
        raise AssertionError(f"a timer of {seconds} s")

    monkeypatch.setattr(asyncio, "timeout", refuse)
    written: list[pb.GenerateResponse] = []

    async def write(event: pb.GenerateResponse) -> None:
        written.append(event)

    await patient(write, 60.0)(pb.GenerateResponse())
    assert len(written) == 1
