# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys

import pytest
from google.protobuf.duration_pb2 import Duration

from twinpool import rpc
from twinpool.rpc import Deadline


class Context:
    def __init__(self, left: float | None) -> None:
        self.left = left

    def time_remaining(self) -> float | None:
        return self.left


def test_no_deadline_never_expires() -> None:
    none = Deadline()
    assert (none.remaining(), none.expired, none.to_proto()) == (None, False, None)
    assert Deadline.from_proto(None) == none
    assert Deadline.after(None) == none


@pytest.mark.parametrize("left", [None, 1e12, float("inf")])
def test_calls_without_deadline_have_none(left: float | None) -> None:
    assert Deadline.of_call(Context(left)) == Deadline()  # type: ignore[arg-type]


def test_what_is_left_travels() -> None:
    sent = Deadline.of_call(Context(1000.0))  # type: ignore[arg-type]
    left = sent.to_proto()
    assert left is not None
    got = Deadline.from_proto(left).remaining()
    assert got is not None
    assert 900 < got <= 1000


def test_an_expired_deadline_stays_expired_on_the_wire() -> None:
    gone = Deadline.after(-3)
    assert gone.expired
    assert gone.remaining() == 0
    left = gone.to_proto()
    assert left == Duration()
    assert Deadline.from_proto(left).expired


def test_earlier_takes_the_sooner_one() -> None:
    assert (Deadline.after(100).earlier(1).remaining() or 0) <= 1
    assert (Deadline().earlier(1).remaining() or 0) <= 1
    assert (Deadline.after(0.5).earlier(100).remaining() or 0) <= 0.5


def test_run_returns_the_result_on_uvloop() -> None:
    async def main() -> str:
        import asyncio

        return type(asyncio.get_running_loop()).__module__

    assert rpc.run(main()).startswith("uvloop")


SCRIPT = """
from twinpool import rpc
async def main():
    stop = rpc.stop_event()
    print("ready", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    if {hang}:
        import asyncio
        await asyncio.Event().wait()
rpc.run(main())
print("clean", flush=True)
"""


def start(hang: bool) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(hang=hang)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_stop_event(number: signal.Signals) -> None:
    process = start(hang=False)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("stopping\nclean\n", 0)


def test_a_second_signal_ends_a_hanging_stop() -> None:
    process = start(hang=True)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "stopping\n"
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    assert process.returncode == -signal.SIGTERM
