# SPDX-License-Identifier: Apache-2.0
"""``twinpool doctor``: says what this machine lacks and how to get it."""

import importlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import typer

from twinpool.control.cli.output import EXIT_UNAVAILABLE, Format, FormatOption, emit_rows

# NIXL loads plug-ins and may take the process down; a child pays for that.
_NIXL_PROBE = """
import importlib
api = None
for name in ("nixl._api", "nixl_cu12._api", "nixl_cu13._api"):
    try:
        api = importlib.import_module(name); break
    except ImportError:
        continue
assert api is not None, "neither nixl nor nixl_cu12 can be imported"
agent = api.nixl_agent("doctor", api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
print(name.split(".")[0])
"""


@dataclass(frozen=True)
class Finding:
    """One check's result. ``needed`` checks decide the exit code."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    needed: bool = True

    def row(self) -> dict[str, object]:
        """For printing."""
        status = "ok" if self.ok else ("missing" if self.needed else "absent")
        return {
            "name": self.name,
            "status": status,
            "detail": self.detail,
            "remedy": "" if self.ok else self.remedy,
        }


def check_python() -> Finding:
    """The interpreter."""
    return Finding(
        "python", sys.version_info >= (3, 11), sys.version.split()[0], "install Python 3.11 or later"
    )


def check_core() -> Finding:
    """The C++ core."""
    try:
        core = importlib.import_module("twinpool._core")
    except ImportError as error:
        return Finding("core", False, str(error), "make install (needs g++ and libssl-dev)")
    return Finding("core", True, str(core.__file__))


def check_etcd() -> Finding:
    """The etcd binary; without it local clusters use the embedded store."""
    path = shutil.which("etcd")
    if path is None:
        remedy = "apt-get install etcd-server (until then local clusters use the embedded store)"
        return Finding("etcd", False, "no etcd binary in PATH", remedy, needed=False)
    version = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=10, check=False
    ).stdout
    return Finding("etcd", True, version.splitlines()[0] if version else path)


def check_nixl() -> Finding:
    """NIXL and its UCX plug-in: an agent is really made."""
    probe = subprocess.run(
        [sys.executable, "-c", _NIXL_PROBE], capture_output=True, text=True, timeout=60, check=False
    )
    remedy = "pip install 'twinpool[worker]' (nixl-cu12 works without CUDA)"
    if probe.returncode != 0:
        lines = probe.stderr.strip().splitlines() or [f"the probe ended with {probe.returncode}"]
        return Finding("nixl", False, lines[-1], remedy)
    return Finding("nixl", True, f"{probe.stdout.strip().splitlines()[-1]}, UCX agent made")


def _module(name: str, remedy: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, False, "not installed", remedy)
    module = importlib.import_module(name)
    return Finding(name, True, str(getattr(module, "__version__", "installed")))


def check_torch() -> Finding:
    """torch."""
    return _module("torch", "install torch for your hardware, then pip install 'twinpool[worker]'")


def check_ray() -> Finding:
    """Ray."""
    return _module("ray", "pip install 'twinpool[worker]'")


def check_gpu() -> Finding:
    """An accelerator; workers run on the CPU without one."""
    if importlib.util.find_spec("torch") is None:
        return Finding("gpu", False, "torch is not installed", "install torch first", needed=False)
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        remedy = "none needed for CPU workers; a CUDA build of torch and a driver for GPU workers"
        return Finding("gpu", False, "no CUDA device", remedy, needed=False)
    return Finding(
        "gpu", True, ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    )


def check_ports(ports: list[int]) -> list[Finding]:
    """Ports that the caller means to use; by default the kernel gives free ones."""
    findings = []
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError as error:
                findings.append(
                    Finding(f"port {port}", False, str(error), "stop its owner or choose another port")
                )
            else:
                findings.append(Finding(f"port {port}", True, "free"))
    return findings


def check_home() -> Finding:
    """Room for models and cluster state."""
    path = Path(os.environ.get("TWINPOOL_HOME") or Path.home())
    free_gb = shutil.disk_usage(path).free / 1e9
    return Finding(
        "disk", free_gb > 2, f"{free_gb:.0f} GB free under {path}", "free 2 GB, or set TWINPOOL_HOME"
    )


CHECKS: list[Callable[[], Finding]] = [
    check_python,
    check_core,
    check_torch,
    check_nixl,
    check_ray,
    check_etcd,
    check_gpu,
    check_home,
]


def doctor(
    port: list[int] = typer.Option([], "--port", help="Also check that this port is free (repeatable)."),  # noqa: B008
    output: FormatOption = Format.TABLE,
) -> None:
    """Say what is missing on this machine and how to get it."""
    findings = [check() for check in CHECKS] + check_ports(port)
    emit_rows([finding.row() for finding in findings], ["name", "status", "detail", "remedy"], output)
    if any(finding.needed and not finding.ok for finding in findings):
        raise typer.Exit(EXIT_UNAVAILABLE)
