# SPDX-License-Identifier: Apache-2.0
"""NIXL, UCX and what it needs to move KV: an agent is really made, and memory of another process really read."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from twinpool.config import TwinpoolConfig
from twinpool.control.doctor.finding import Finding, failed, judged, ok, warning

PROBE_SECONDS: Final = 120.0
"""Longest time of one probe: the first import of torch's and UCX's libraries may read a gigabyte."""

_MATTERS: Final = "workers move KV by NIXL over UCX; without it none starts"
_INSTALL: Final = "pip install 'twinpool[worker]' (nixl-cu12 works without CUDA, too)"
_LIKE: Final = {
    "sm": ("posix", "sysv", "cma", "xpmem"),
    "shm": ("posix", "sysv"),
    "mm": ("posix", "sysv"),
    "rc": ("rc_verbs", "rc_mlx5"),
    "rc_x": ("rc_mlx5",),
    "ud": ("ud_verbs", "ud_mlx5"),
    "dc": ("dc_mlx5",),
    "ib": ("rc_verbs", "rc_mlx5", "ud_verbs", "ud_mlx5", "dc_mlx5"),
    "cuda": ("cuda_copy", "cuda_ipc"),
}
"""UCX's names for several transports."""

_REMEDIES: Final = {
    "rc": "pass the RDMA device in (/dev/infiniband), raise the memlock limit, or take rc out of transfer.ucx_tls",
    "cuda_copy": "install the driver and pass the GPU in, or take cuda_copy out of transfer.ucx_tls",
    "cuda_ipc": "install the driver and pass the GPU in, or take cuda_ipc out of transfer.ucx_tls",
    "tcp": "look at the machine's network devices (`ip address`) and at UCX_NET_DEVICES",
    "sm": "mount /dev/shm, larger than it is, or take sm out of transfer.ucx_tls",
}
_OWNER: Final = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1 & (2**64 - 1)), 0, 0, 0)
kept = ctypes.create_string_buffer(b"twinpool")
print(os.getpid(), ctypes.addressof(kept), flush=True)
sys.stdin.read()
"""
_READER: Final = """
import ctypes, os, sys
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
into = ctypes.create_string_buffer(8)
here, there = Part(ctypes.addressof(into), 8), Part(int(sys.argv[2]), 8)
libc = ctypes.CDLL(None, use_errno=True)
count = libc.process_vm_readv(int(sys.argv[1]), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
print("read" if count == 8 and into.raw == b"twinpool" else os.strerror(ctypes.get_errno()))
"""


def check_transfers(config: TwinpoolConfig) -> list[Finding]:
    """NIXL and the transports of UCX. Takes seconds."""
    told, ended = _probe()
    made = _nixl(told, ended)
    if "module" not in told:
        return [made]
    found = told.get("transports")
    if found is None:
        unknown = warning(
            "ucx", "its transports cannot be listed", "what is missing shows at a worker's start", ""
        )
        return [made, unknown]
    names = [str(name) for name, _ in found]
    return [made, *_transports(names, found, config), *_rdma(names), *_cma(names, config)]


def _probe() -> tuple[dict[str, Any], str]:
    """What the child said last, and how it ended if not well."""
    command = [sys.executable, "-m", "twinpool.control.doctor.nixl_probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        return _last(said), f"it hung for {PROBE_SECONDS:g} s"
    ended = "" if done.returncode == 0 else f"it ended with {done.returncode}: {_tail(done.stderr)}"
    return _last(done.stdout), ended


def _last(stdout: str) -> dict[str, Any]:
    lines = [line for line in stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return found


def _tail(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1][-300:]


def _nixl(told: dict[str, Any], ended: str) -> Finding:
    stage = told.get("stage")
    if "module" not in told:
        detail = f"NIXL cannot be imported: {told.get('error') or ended or 'it is not installed'}"
        return failed("nixl", detail, _MATTERS, _INSTALL)
    if stage == "made":
        return ok("nixl", f"{told['module']}; an agent was made over UCX")
    why = str(told.get("error") or ended)
    if fault := told.get("plugin"):
        detail = f"{told['module']} is there, but its UCX plug-in does not load: {fault}"
        remedy = "unset NIXL_PLUGIN_DIR and LD_LIBRARY_PATH, which may lead to other libraries, or install nixl anew"
        return failed("nixl", detail, _MATTERS, remedy)
    where = "UCX cannot be started" if stage == "ucx" else "no agent can be made"
    return failed(
        "nixl",
        f"{told['module']} is there, but {where}: {why}",
        _MATTERS,
        "see UCX_LOG_LEVEL=info; look at UCX_TLS",
    )


def _transports(names: list[str], pairs: Iterable[tuple[str, str]], config: TwinpoolConfig) -> list[Finding]:
    shown = ", ".join(sorted({f"{name}/{device}" for name, device in pairs}))
    wanted = [one for one in config.transfer.ucx_tls.split(",") if one not in ("", "all", "self")]
    missing = [one for one in wanted if not set(_LIKE.get(one, (one,))) & set(names)]
    if not missing:
        return [ok("ucx", f"transports: {shown}")]
    return [
        judged(
            one == "tcp",
            "ucx",
            f"transfer.ucx_tls names {one}, which UCX does not have here; it has {shown}",
            "no two workers connect without tcp" if one == "tcp" else "KV moves by a slower transport",
            _REMEDIES.get(one, f"take {one} out of transfer.ucx_tls"),
        )
        for one in missing
    ]


def _rdma(names: list[str]) -> list[Finding]:
    root = Path("/sys/class/infiniband")
    devices = sorted(one.name for one in root.iterdir()) if root.is_dir() else []
    if not devices:
        return [ok("rdma", "no RDMA device")]
    if not {"rc_verbs", "rc_mlx5"} & set(names):
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        locked = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        verbs = "is" if Path("/dev/infiniband").is_dir() else "is not"
        detail = f"{', '.join(devices)}, but UCX cannot use them: /dev/infiniband {verbs} here, memlock limit {locked}"
        remedy = "pass /dev/infiniband in, `ulimit -l unlimited` (in a container: IPC_LOCK)"
        return [warning("rdma", detail, "KV moves over TCP, at a tenth of the rate or less", remedy)]
    return [ok("rdma", f"{', '.join(devices)}; UCX can use them")]


def _cma(names: list[str], config: TwinpoolConfig) -> list[Finding]:
    """Two siblings, as workers of one machine are: one reads the other's memory."""
    if "cma" not in names or not {"sm", "all", "cma"} & set(config.transfer.ucx_tls.split(",")):
        return []
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        line = owner.stdout.readline().split()
        reader = [sys.executable, "-c", _READER, *line]
        read = subprocess.run(
            reader, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        ).stdout.strip()
    finally:
        owner.kill()
        owner.communicate()
    if read == "read":
        return [ok("cma", "a process of this user can read the memory of another one")]
    detail = f"a process of this user cannot read the memory of another one: {read or 'it said nothing'}"
    remedy = "sysctl kernel.yama.ptrace_scope=0; in a container the capability SYS_PTRACE and one user for all workers"
    return [
        warning(
            "cma", detail, "workers of this machine move KV through shared memory, with one more copy", remedy
        )
    ]
