# SPDX-License-Identifier: Apache-2.0
"""Doctor's checks of the machine, each under a condition that is really there."""

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
from twinpool.control.doctor import machine, ports, software
from twinpool.control.doctor.finding import Finding, Status
from twinpool.engine.tiny import write_tiny

Only = Callable[[Iterable[Finding], str], Finding]
NOBODY = 65534


def config(**sections: dict[str, object]) -> TwinpoolConfig:
    return TwinpoolConfig.model_validate(sections)


def in_child(code: str, **options: object) -> dict[str, str]:
    """The row that a child prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, **options  # type: ignore[call-overload]
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_etcd_is_looked_for_in_the_path_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = software.check_etcd()
    assert (missing.status, missing.detail) == (Status.WARNING, "no etcd binary in PATH")
    assert "embedded store" in missing.matters
    assert "etcd-server" in missing.remedy
    binary = tmp_path / "etcd"
    binary.write_text("#!/bin/sh\necho cannot run >&2\nexit 7\n")
    binary.chmod(0o755)
    broken = software.check_etcd()
    assert broken.status is Status.FAILED
    assert "ends with 7: cannot run" in broken.detail


def test_a_taken_port_names_its_owner(only: Only) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        of = config(
            router={"port": port}, worker={"host": "127.0.0.1", "port": 0}, kv_events={"port": port - 1}
        )
        named = list(ports.named_ports(of, ("router", "worker")))
        assert [key for key, _, _ in named] == ["router.port", "kv_events.port", "kv_events.port + 1"]
        found = ports.check_port(*named[0])
        assert found.status is Status.FAILED
        assert f"router.port: 127.0.0.1:{port} is taken by process {os.getpid()} of " in found.detail
        assert "set router.port to another port" in found.remedy
        second = ports.check_port(*named[2])
        assert second.status is Status.FAILED
        assert "set kv_events.port to" in second.remedy
    assert ports.check_port("router.port", "127.0.0.1", port).status is Status.OK


def test_an_address_of_another_machine_is_told_from_a_taken_port() -> None:
    found = ports.check_port("control.port", "192.0.2.1", 50053)
    assert found.status is Status.FAILED
    assert "192.0.2.1 is no address of this machine" in found.detail
    assert "set control.host" in found.remedy


def test_shared_memory_has_room_for_what_starts_here() -> None:
    assert machine.check_shm(config(), ray=False).status is Status.OK
    large = config(pools={"ray_object_store_bytes": 1 << 40})
    assert machine.check_shm(large, ray=False).status is Status.OK
    short = machine.check_shm(large, ray=True)
    assert short.status is Status.FAILED
    assert "1048640 MiB needed" in short.detail
    assert "--shm-size" in short.remedy


def test_a_small_dev_shm() -> None:
    code = (
        "import json\nfrom twinpool.config import TwinpoolConfig\nfrom twinpool.control.doctor import machine\n"
        "print(json.dumps(machine.check_shm(TwinpoolConfig(), ray=False).row()))"
    )
    mount = "mount -t tmpfs -o size=8m none /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("only who may mount can make one")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, code],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    row = json.loads(done.stdout)
    assert (row["status"], row["detail"]) == ("failed", "8 MiB free in /dev/shm, 64 MiB needed")


@pytest.mark.parametrize(("limit", "status"), [(512, "failed"), (2048, "warning"), (8192, "ok")])
def test_the_limit_of_open_files(limit: int, status: str) -> None:
    code = "import json\nfrom twinpool.control.doctor import machine\nprint(json.dumps(machine.check_files().row()))"
    row = in_child(code, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)))
    assert row["status"] == status
    assert f"may open {limit} files" in row["detail"]
    assert status == "ok" or "ulimit -n" in row["remedy"]


def test_a_card_without_a_cuda_torch(tmp_path: Path, only: Only) -> None:
    """torch is this machine's own; whether there is a card is what the directory of devices says."""
    torch = pytest.importorskip("torch")
    if torch.version.cuda:
        pytest.skip("torch is a CUDA build here")
    (tmp_path / "nvidia0").touch()
    found = only(software.check_torch(config(), tmp_path), "gpu")
    assert found.status is Status.WARNING
    assert f"nvidia0 present, but torch {torch.__version__} is a CPU build" in found.detail
    told = software.torch_told()
    assert isinstance(told, dict)
    wanted = software.check_gpu(told, ["nvidia0"], "cuda:0")
    assert wanted.status is Status.FAILED
    assert "worker.device is cuda:0" in wanted.detail
    assert software.check_gpu(told, [], "cpu").status is Status.OK
    absent = software.check_gpu(told, [], "cuda")
    assert absent.status is Status.FAILED
    assert absent.detail.startswith("no GPU")


def test_a_checkpoint_is_read_as_a_worker_reads_it(tmp_path: Path, only: Only) -> None:
    assert machine.check_model(config())[0].status is Status.OK
    path = tmp_path / "model"
    write_tiny(path, "llama", seed=1)
    whole = machine.check_model(config(model={"path": str(path)}))
    assert [one.status for one in whole] == [Status.OK, Status.OK]
    assert "bytes of KV a token" in whole[0].detail
    gone = only(machine.check_model(config(model={"path": str(tmp_path / "none")})), "model")
    assert gone.detail == f"{tmp_path / 'none'}: No such file or directory"
    weights = next(path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    cut = only(machine.check_model(config(model={"path": str(path)})), "model")
    assert cut.status is Status.FAILED
    assert weights.name in cut.detail
    weights.unlink()
    weights.symlink_to(tmp_path / "nowhere")
    dangling = only(machine.check_model(config(model={"path": str(path)})), "model")
    assert dangling.detail == f"{weights}: a link to nowhere"


@pytest.mark.skipif(
    os.getuid() != 0, reason="only root can become another user, and only root reads what others may not"
)
def test_a_checkpoint_that_the_user_may_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    path.chmod(0o700)
    code = (
        "import os, sys, json\nfrom twinpool.config import TwinpoolConfig\nfrom twinpool.control.doctor import machine\n"
        f"os.setuid({NOBODY})\nconfig = TwinpoolConfig.model_validate({{'model': {{'path': {str(path)!r}}}}})\n"
        "print(json.dumps(machine.check_model(config)[0].row()))"
    )
    row = in_child(code)
    assert row["status"] == "failed"
    assert row["detail"] == f"{path}: Permission denied"
    assert "let the user" in row["remedy"]


def test_the_host_tier_has_to_fit_in_memory(tmp_path: Path) -> None:
    small = machine.check_memory(config(kv={"num_blocks": 4, "host_blocks": 4}), 1024)
    assert small.status is Status.OK
    host = machine.check_memory(config(kv={"num_blocks": 4, "host_blocks": 1 << 24}), 70_272)
    assert host.status is Status.FAILED
    assert "75453.99 GB of the host tier" in host.detail
    assert "kv.host_blocks" in host.remedy
    on_gpu = config(kv={"num_blocks": 1 << 24}, worker={"device": "cuda"})
    assert machine.check_memory(on_gpu, 70_272).status is Status.OK, "its pool lies on the GPU"
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert machine.available_memory(tmp_path) == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_memory(tmp_path) > 2000


def test_disk_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINPOOL_HOME", str(tmp_path / "deep" / "er"))
    assert str(tmp_path) in machine.check_disk().detail
    monkeypatch.setenv("TWINPOOL_HOME", "/proc/none")
    found = machine.check_disk()
    assert found.status is Status.FAILED
    assert "TWINPOOL_HOME" in found.remedy
