# SPDX-License-Identifier: Apache-2.0
"""What the machine has to offer: shared memory, files, memory, disk, and the checkpoint."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

from twinpool.config import TwinpoolConfig
from twinpool.control import state
from twinpool.control.doctor.finding import Finding, failed, judged, ok, warning
from twinpool.errors import CheckpointError, ConfigError

MIB: Final = 1 << 20
SHM_WORKER_BYTES: Final = 64 * MIB
"""What is wanted of /dev/shm besides Ray's store, and what container runtimes give. Two small workers and a Ray that is idle took 8 MiB
together; with 8 MiB in all UCX has no posix transport."""

FILES_LEAST: Final = 1024
"""Descriptors below which a router of a few hundred clients and workers runs out."""

FILES_GOOD: Final = 4096
"""As many as one connection may have calls; Ray asks for more on large machines."""

DISK_LEAST_BYTES: Final = 2_000_000_000
"""Room for a small converted checkpoint, etcd's data and logs."""


def check_shm(config: TwinpoolConfig, *, ray: bool, path: Path = Path("/dev/shm")) -> Finding:
    """Free shared memory. ``ray``: whether a Ray starts here, which keeps its object store there."""
    if not path.is_dir():
        return failed(
            "shm", f"there is no {path}", "UCX and Ray share memory there", "mount a tmpfs on /dev/shm"
        )
    free = shutil.disk_usage(path).free
    need = SHM_WORKER_BYTES + (config.pools.ray_object_store_bytes if ray else 0)
    detail = f"{free // MIB} MiB free in {path}, {need // MIB} MiB needed"
    if free >= need:
        return ok("shm", detail)
    remedy = "docker run --shm-size=1g; in Kubernetes the value sharedMemory; else mount -o remount,size=1g /dev/shm"
    return failed("shm", detail, "UCX cannot share memory, and Ray puts its object store on disk", remedy)


def check_files() -> Finding:
    """The limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "unlimited" if hard == resource.RLIM_INFINITY else hard
    detail = f"a process may open {soft} files (hard limit {shown})"
    if soft >= FILES_GOOD:
        return ok("files", detail)
    remedy = f"ulimit -n 65536, or LimitNOFILE=65536 of the service; {FILES_GOOD} are enough for most"
    return judged(
        soft < FILES_LEAST, "files", detail, "each client, worker and stream between them takes one", remedy
    )


def check_disk() -> Finding:
    """Room for models and cluster state."""
    path = state.home()
    there = next(part for part in (path, *path.parents) if part.exists())
    free = shutil.disk_usage(there).free
    detail = f"{free / 1e9:.1f} GB free for {path}"
    if not os.access(there, os.W_OK):
        detail = f"{there} cannot be written"
    elif free >= DISK_LEAST_BYTES:
        return ok("disk", detail)
    remedy = f"free {DISK_LEAST_BYTES / 1e9:g} GB, or set TWINPOOL_HOME to a larger disk"
    return failed("disk", detail, "converted models, etcd's data and logs lie there", remedy)


def check_model(config: TwinpoolConfig) -> list[Finding]:
    """The checkpoint that the configuration names: read as a worker reads it, without the weights themselves."""
    path = config.model.path
    if not path:
        return [ok("model", "model.path is empty: no worker is configured here")]
    matters = "a worker ends at its start"
    directory = Path(path)
    if (blocked := _unreadable(directory)) is not None:
        return [
            failed("model", blocked, matters, "mount the checkpoint, and let the user of the worker read it")
        ]
    try:
        # Both need torch, which not every machine has.
        from twinpool.engine.checkpoint import Checkpoint
        from twinpool.worker.stack import describe

        facts = describe(config)
        tensors = len(Checkpoint(directory).tensors)
    except (CheckpointError, ConfigError) as error:
        return [failed("model", f"{directory}: {error.message}", matters, error.spec.user_action)]
    except ImportError as error:
        return [
            warning(
                "model",
                f"{directory} is readable; it cannot be looked into: {error}",
                matters,
                "install torch",
            )
        ]
    made = ok(
        "model", f"{facts.served_name}: {tensors} tensors, {facts.kv_bytes_per_token} bytes of KV a token"
    )
    return [made, check_memory(config, facts.kv_bytes_per_token)]


def _unreadable(directory: Path) -> str | None:
    """What keeps the directory, or a file in it, from being read; None: nothing."""
    try:
        entries = sorted(directory.iterdir())
    except OSError as error:
        return f"{directory}: {error.strerror}"
    for entry in entries:
        try:
            if entry.is_file():
                entry.open("rb").close()
            elif not entry.exists():
                return f"{entry}: a link to nowhere"
        except OSError as error:
            return f"{entry}: {error.strerror}"
    return None


def check_memory(
    config: TwinpoolConfig, kv_bytes_per_token: int, free: Callable[[], int] | None = None
) -> Finding:
    """Room for the pool of KV blocks on a CPU, and for the host tier. Both are allocated at a worker's start."""
    block = config.kv.block_tokens * kv_bytes_per_token
    host = config.kv.host_blocks * block
    pool = 0 if config.worker.device.startswith("cuda") else config.kv.num_blocks * block
    available = free() if free is not None else available_memory()
    parts = f"{pool / 1e9:.2f} GB of KV blocks and {host / 1e9:.2f} GB of the host tier"
    detail = f"{available / 1e9:.2f} GB of memory available; a worker allocates {parts}"
    if pool + host <= available:
        return ok("memory", detail)
    remedy = "lower kv.host_blocks or kv.num_blocks, or give the machine more memory"
    return failed("memory", detail, "a worker fails at its start, or is killed", remedy)


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that may be allocated: the machine's, or those of the container if that has fewer."""
    machine = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return machine
    return machine if limit == "max" else min(machine, max(0, int(limit) - used))
