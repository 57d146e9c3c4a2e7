# SPDX-License-Identifier: Apache-2.0
"""What has to be installed, and the accelerator."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from twinpool.config import TwinpoolConfig
from twinpool.control.doctor.finding import Finding, failed, judged, ok, warning

PYTHON_LEAST: Final = (3, 11)
PROBE_SECONDS: Final = 120.0
_WORKER: Final = "pip install 'twinpool[worker]'"

# CUDA may take a process down, too.
_TORCH_PROBE: Final = """
import json, torch
told = {"version": torch.__version__, "cuda": torch.version.cuda, "devices": [], "error": ""}
if torch.version.cuda:
    try:
        torch.cuda.init()
        told["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except Exception as error:
        told["error"] = str(error).splitlines()[0]
print(json.dumps(told))
"""


def check_python() -> Finding:
    """The interpreter."""
    text = sys.version.split()[0]
    if sys.version_info >= PYTHON_LEAST:
        return ok("python", text)
    return failed("python", text, "the code needs 3.11", "install Python 3.11 or later")


def check_core() -> Finding:
    """The C++ core."""
    try:
        core = importlib.import_module("twinpool._core")
    except ImportError as error:
        return failed(
            "core",
            str(error),
            "no process starts without the C++ core",
            "make install (needs g++ and libssl-dev)",
        )
    return ok("core", str(core.__file__))


def check_ray() -> Finding:
    """Ray."""
    if importlib.util.find_spec("ray") is None:
        return failed(
            "ray", "not installed", "Ray starts and restarts the workers of a local cluster", _WORKER
        )
    return ok("ray", str(importlib.import_module("ray").__version__))


def check_etcd() -> Finding:
    """The etcd binary, which only clusters of one machine start."""
    path = shutil.which("etcd")
    if path is None:
        return warning(
            "etcd",
            "no etcd binary in PATH",
            "local clusters use the embedded store instead; a cluster of several machines needs an etcd somewhere",
            "apt-get install etcd-server",
        )
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return failed(
            "etcd", f"{path} does not run: {error}", "a local cluster would start it", "install etcd anew"
        )
    if done.returncode or not done.stdout:
        detail = f"{path} ends with {done.returncode}: {done.stderr.strip()[-200:]}"
        return failed("etcd", detail, "a local cluster would start it", "install etcd anew")
    return ok("etcd", f"{done.stdout.splitlines()[0]} ({path})")


def check_torch(config: TwinpoolConfig, devices: Path = Path("/dev")) -> list[Finding]:
    """torch, and the GPUs that it sees. ``devices``: where the driver's device files are."""
    cards = sorted(one.name for one in devices.glob("nvidia[0-9]*"))
    if importlib.util.find_spec("torch") is None:
        remedy = f"install torch for your hardware, then {_WORKER}"
        return [failed("torch", "not installed", "workers compute with it", remedy)]
    told = torch_told()
    if isinstance(told, str):
        return [
            failed("torch", f"it cannot be imported: {told}", "workers compute with it", "install torch anew")
        ]
    build = f"CUDA {told['cuda']}" if told["cuda"] else "a CPU build"
    return [ok("torch", f"{told['version']}, {build}"), check_gpu(told, cards, config.worker.device)]


def torch_told() -> dict[str, Any] | str:
    """What torch says of itself in a child, or why it cannot be imported."""
    command = [sys.executable, "-c", _TORCH_PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"that took more than {PROBE_SECONDS:g} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"the child ended with {done.returncode}"])[-1]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def check_gpu(told: dict[str, Any], cards: list[str], device: str) -> Finding:
    """``told``: of torch. ``cards``: device files of GPUs. ``device``: worker.device."""
    wanted = device.startswith("cuda")
    asked = f"; worker.device is {device}" if wanted else ""
    seen, matters = told["devices"], "workers would run on the CPU" if not wanted else "no worker starts"
    if seen:
        index = int(device.partition(":")[2] or 0) if wanted else 0
        if index >= len(seen):
            detail = f"{len(seen)} GPUs{asked}, which is beyond the last one"
            return failed("gpu", detail, matters, f"worker.device from cuda:0 to cuda:{len(seen) - 1}")
        return ok("gpu", ", ".join(seen))
    if cards and not told["cuda"]:
        detail = f"{', '.join(cards)} present, but torch {told['version']} is a CPU build{asked}"
        remedy = "install a CUDA build of torch: pip install torch --index-url https://download.pytorch.org/whl/cu128"
        return judged(wanted, "gpu", detail, matters, remedy)
    if cards:
        detail = f"{', '.join(cards)} present, but torch cannot use it: {told['error']}{asked}"
        remedy = f"a driver for CUDA {told['cuda']} or later (`nvidia-smi` shows what the driver has), or an older torch"
        return judged(wanted, "gpu", detail, matters, remedy)
    if wanted:
        return failed(
            "gpu", f"no GPU{asked}", matters, "worker.device: cpu, or pass the GPU in (/dev/nvidia0)"
        )
    return ok("gpu", "none; workers run on the CPU")
