# SPDX-License-Identifier: Apache-2.0
"""Addresses of this machine."""

import socket

import psutil
import pytest


def beside_the_loopback() -> str:
    """One of this machine's own that is not the loopback, as a pod's is; skips where it has none."""
    for several in psutil.net_if_addrs().values():
        for one in several:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return one.address
    pytest.skip("this machine has no address but the loopback")
