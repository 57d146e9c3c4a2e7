# SPDX-License-Identifier: Apache-2.0
"""What is particular to NIXL: its import name, its environment, its errors and status words."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from twinpool.transfer.base import DONE, PENDING, Fault, MemoryRegion, MemoryType, ReadState, failed

GET_OVER_IPC = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"


def load_api() -> Any:
    """NIXL's Python module: the ``nixl`` meta package, or one of the backends that it would pick.

    Raises ImportError with the command to install it.
    """
    for name in ("nixl._api", "nixl_cu12._api", "nixl_cu13._api"):
        try:
            api = importlib.import_module(name)
        except ImportError:
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            # It tells of every agent on a handler of its own, beside this process's log.
            logging.getLogger("nixl").setLevel(logging.WARNING)
        return api
    raise ImportError("NIXL is not installed: pip install nixl-cu12 (or nixl-cu13 on CUDA 13)")


@contextmanager
def ucx_environment(transports: str | None, memory: MemoryType = "DRAM") -> Iterator[None]:
    """Sets what UCX reads from the environment while an agent is made. ``transports`` None leaves UCX_TLS alone.

    Shared memory alone cannot connect two processes, so a list of transports has to name ``tcp`` or a network. For a pool in VRAM
    reads over CUDA IPC are switched on: UCX drops them where it sees no NVLink, and then reads through host memory and sockets (0.4
    GB/s between two processes on one H200, against 590).
    """
    wanted = {} if transports is None else {"UCX_TLS": transports}
    if memory == "VRAM" and GET_OVER_IPC not in os.environ:
        wanted[GET_OVER_IPC] = "on"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def enter_device(region: MemoryRegion) -> None:
    """Makes the CUDA context of the region's device current on this thread; nothing for host memory.

    UCX asks the calling thread's context for the handle by which another process maps the memory. A thread without one gets none, and
    every read of the region then goes through host memory and sockets.
    """
    if region.memory_type != "VRAM":
        return
    import torch

    torch.cuda.set_device(region.device_id)
    torch.cuda.current_stream().synchronize()


# By name: a NIXL that lacks one of these classes still loads, and a new class falls to UNKNOWN.
_FAULTS = {
    "nixlRemoteDisconnectError": Fault.PEER_LOST,
    "nixlNotFoundError": Fault.PEER_UNKNOWN,
    "nixlBackendError": Fault.BACKEND,
    "nixlCancelledError": Fault.CANCELLED,
    "nixlInvalidParamError": Fault.INVALID,
    "nixlMismatchError": Fault.INVALID,
    "nixlNotAllowedError": Fault.INVALID,
    "nixlNotPostedError": Fault.INVALID,
    "nixlNotSupportedError": Fault.INVALID,
    "nixlRepostActiveError": Fault.INVALID,
    "nixlUnknownError": Fault.UNKNOWN,
}

# NIXL refuses these before it hands anything to the transport.
_REFUSED_BEFORE_POST = frozenset({Fault.INVALID, Fault.PEER_UNKNOWN})


def fault_of(error: BaseException) -> Fault:
    """Our name for what NIXL raised."""
    return _FAULTS.get(type(error).__name__, Fault.UNKNOWN)


def describe(error: BaseException) -> str:
    """NIXL's error as one line for a log."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def state_of_word(word: str, *, posting: bool) -> ReadState:
    """The state behind what ``transfer`` (posting) or ``check_xfer_state`` returned; an unknown word is a failure."""
    if word == "DONE":
        return DONE
    if word == "PROC":
        return PENDING
    fault = Fault.BACKEND if word == "ERR" else Fault.UNKNOWN
    # A post that fails midway leaves its first descriptors in flight; nothing but the agent's end stops those.
    return failed(fault, f"NIXL answered {word!r}", fenced=not posting and word == "ERR")


def state_of_error(error: BaseException, *, posting: bool) -> ReadState:
    """The state behind an exception of ``transfer`` (posting) or ``check_xfer_state``.

    A broken connection fences: all requests on it have ended. A poll that does not find its request proves nothing:
    bytes of a request whose peer was removed still land.
    """
    fault = fault_of(error)
    if fault is Fault.PEER_LOST:
        fenced = True
    elif posting:
        fenced = fault in _REFUSED_BEFORE_POST
    else:
        fenced = fault in (Fault.BACKEND, Fault.CANCELLED)
    return failed(fault, describe(error), fenced=fenced)
