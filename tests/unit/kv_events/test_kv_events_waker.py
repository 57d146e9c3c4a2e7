# SPDX-License-Identifier: Apache-2.0
"""No wake is lost, whenever it comes."""

import select
import socket

from twinpool.kv_events.waker import Waker


def woken(waker: Waker) -> bool:
    return bool(select.select([waker], [], [], 0)[0])


class Late:
    """The receiving end of a waker, with a wake that comes in the middle of ``clear``."""

    def __init__(self, waker: Waker) -> None:
        self.waker = waker
        self.inner: socket.socket = waker._receiver

    def recv(self, size: int) -> bytes:
        self.waker.wake()
        return self.inner.recv(size)


def test_a_wake_is_seen_until_it_is_cleared() -> None:
    waker = Waker()
    assert not woken(waker)
    waker.wake()
    waker.wake()
    assert woken(waker)
    waker.clear()
    assert not woken(waker)
    waker.wake()
    assert woken(waker)
    waker.close()
    waker.wake()


def test_a_wake_in_the_middle_of_clear_does_not_silence_the_next() -> None:
    waker = Waker()
    waker.wake()
    receiver = waker._receiver
    waker._receiver = Late(waker)  # type: ignore[assignment]
    waker.clear()
    waker._receiver = receiver
    waker.wake()
    assert woken(waker)
    waker.close()
