# SPDX-License-Identifier: Apache-2.0
"""NIXL and UCX as doctor sees them: a real agent, no NIXL at all, and one whose plug-in cannot be loaded."""

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from twinpool.config import TwinpoolConfig
from twinpool.control.doctor.finding import Finding, Status
from twinpool.control.doctor.transfers import check_transfers

Only = Callable[[Iterable[Finding], str], Finding]

BLOCK = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("nixl", "nixl_cu12", "nixl_cu13"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Without())
"""
"""As in a venv without NIXL."""


def has_nixl() -> bool:
    code = "import twinpool.transfer.nixl_backend as b; b.load_api()"
    return (
        subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=False).returncode
        == 0
    )


@pytest.fixture
def without(tmp_path: Path) -> str:
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    return str(tmp_path)


def test_without_nixl(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", without)
    (found,) = check_transfers(TwinpoolConfig())
    assert (found.name, found.status) == ("nixl", Status.FAILED)
    assert "NIXL cannot be imported" in found.detail
    assert "pip install 'twinpool[worker]'" in found.remedy


@pytest.mark.parametrize("broken", [False, True], ids=["no plug-ins", "a broken plug-in"])
def test_a_plug_in_that_does_not_load(
    broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: Only
) -> None:
    if not has_nixl():
        pytest.skip("there is no NIXL here")
    if broken:
        (tmp_path / "libplugin_UCX.so").write_bytes(b"no library")
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    found = only(check_transfers(TwinpoolConfig()), "nixl")
    assert found.status is Status.FAILED
    assert "its UCX plug-in does not load" in found.detail
    assert str(tmp_path / "libplugin_UCX.so") in found.detail
    assert "NIXL_PLUGIN_DIR" in found.remedy


def test_an_agent_is_made_and_transports_are_told(only: Only) -> None:
    if not has_nixl():
        pytest.skip("there is no NIXL here")
    found = check_transfers(TwinpoolConfig())
    assert only(found, "nixl").status is Status.OK
    ucx = only(found, "ucx")
    assert ucx.status is Status.OK
    assert "tcp/" in ucx.detail
    assert "posix/memory" in ucx.detail
    if not Path("/sys/class/infiniband").exists():
        wants = TwinpoolConfig.model_validate({"transfer": {"ucx_tls": "tcp,sm,self,rc"}})
        missing = only(check_transfers(wants), "ucx")
        assert missing.status is Status.WARNING
        assert "names rc, which UCX does not have here" in missing.detail
        assert "/dev/infiniband" in missing.remedy


@pytest.mark.slow
def test_the_command_says_all_at_once(without: str, tmp_path: Path) -> None:
    """A machine without etcd and NIXL, with a port that is taken, few files and a checkpoint that is not there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file = tmp_path / "config.yaml"
        file.write_text(f"router: {{port: {port}}}\nmodel: {{path: {tmp_path / 'none'}}}\n")
        kept = {key: value for key, value in os.environ.items() if not key.startswith("TWINPOOL_")}
        env = kept | {"PATH": str(tmp_path), "PYTHONPATH": without, "TWINPOOL_HOME": str(tmp_path / "home")}
        done = subprocess.run(
            [sys.executable, "-m", "twinpool.control.cli.main", "doctor", "-c", str(file), "-o", "json"],
            env=env, capture_output=True, text=True, timeout=240, check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512)),
        )  # fmt: skip
    assert done.returncode == 3, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert {name for name, row in rows.items() if row["status"] == "failed"} == {
        "nixl",
        "files",
        "model",
        f"port {port}",
    }
    assert rows["etcd"]["status"] == "warning"
    assert f"taken by process {os.getpid()}" in rows[f"port {port}"]["detail"]
    assert all(row["status"] == "ok" or (row["matters"] and row["remedy"]) for row in rows.values())
    quiet = subprocess.run(
        [sys.executable, "-m", "twinpool.control.cli.main", "doctor", "--for", "router", "-o", "name"],
        env=kept | {"TWINPOOL_HOME": str(tmp_path / "home")}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (quiet.returncode, quiet.stdout.split()) == (0, ["python", "core", "files"])
