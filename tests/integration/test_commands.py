# SPDX-License-Identifier: Apache-2.0
"""The commands that a newcomer types, as processes: demo, up, get, generate, down; and Ctrl-C in the middle."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.integration

COMMAND = [sys.executable, "-m", "twinpool.control.cli.main"]
SMALL = ["--set", "kv.block_tokens=16", "--set", "kv.num_blocks=128"]
LIMIT_SECONDS = 180


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TWINPOOL_")}
    return kept | {"TWINPOOL_HOME": str(tmp_path / "home")}


def run(env: dict[str, str], *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [*COMMAND, *arguments], env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert result.returncode == code, f"{arguments}: {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive, f"left behind: {[process.cmdline() for process in alive]}"


@pytest.mark.parametrize("store", [[], ["--embedded-store"]], ids=["etcd", "embedded"])
def test_the_demo_answers_three_times(
    env: dict[str, str], checkpoints: dict[str, Path], store: list[str]
) -> None:
    process = subprocess.Popen(
        [
            *COMMAND,
            "demo",
            "--model",
            str(checkpoints["deepseek_v2"]),
            "--max-tokens",
            "8",
            "-o",
            "json",
            *SMALL,
            *store,
        ],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    seen: dict[int, psutil.Process] = {}
    while process.poll() is None:
        seen |= {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
        time.sleep(0.05)
    assert process.stdout is not None
    rows = json.loads(process.stdout.read())
    assert process.returncode == 0
    assert [row["prompt"] for row in rows] == ["a question", "a long prompt", "its second turn"]
    assert all(row["output_tokens"] > 0 and row["ttft_ms"] > 0 and row["kv_mb"] > 0 for row in rows)
    assert rows[0]["cached_tokens"] == rows[1]["cached_tokens"] == 0
    assert rows[2]["cached_tokens"] >= 16
    assert len(seen) >= 4, "etcd or the embedded store, Ray, two workers, a router"
    assert_gone(list(seen.values()))


@pytest.mark.parametrize("stage", ["Starting Ray", "Loading the workers"])
def test_ctrl_c_leaves_nothing(
    env: dict[str, str], checkpoints: dict[str, Path], tmp_path: Path, stage: str
) -> None:
    """The signal goes to the whole foreground group, as a terminal sends it."""
    with (tmp_path / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [*COMMAND, "demo", "--model", str(checkpoints["llama"]), *SMALL],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
    deadline = time.monotonic() + LIMIT_SECONDS
    while stage not in (tmp_path / "stderr").read_text():
        assert process.poll() is None, (tmp_path / "stderr").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) != 0
    assert_gone(children)


def test_up_serves_until_down(env: dict[str, str], checkpoints: dict[str, Path]) -> None:
    up = run(env, "up", "--model", str(checkpoints["qwen3"]), "--set", "cluster.name=one", *SMALL)
    assert "console: http://127.0.0.1:" in up.stderr
    try:
        workers = json.loads(run(env, "get", "workers", "--cluster", "one", "-o", "json").stdout)
        assert {worker["role"] for worker in workers} == {"prefill", "decode"}
        assert all(worker["state"] == "ready" for worker in workers)
        answer = json.loads(
            run(env, "generate", "--cluster", "one", "hello there", "--max-tokens", "5", "-o", "json").stdout
        )
        assert 1 <= len(answer["choices"][0]["token_ids"]) <= 5
        run(env, "generate", "--cluster", "one", "", code=2)
        run(env, "up", "--model", str(checkpoints["qwen3"]), "--cluster", "one", *SMALL, code=1)
        pid = json.loads((Path(env["TWINPOOL_HOME"]) / "one" / "state.json").read_text())["pid"]
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    finally:
        run(env, "down", "--cluster", "one")
    assert_gone(family)
    run(env, "down", "--cluster", "one", code=3)


def test_a_pool_is_looked_at_scaled_and_described(env: dict[str, str], checkpoints: dict[str, Path]) -> None:
    model = str(checkpoints["llama"])
    run(env, "up", "--model", model, *SMALL, "--set", "pools.decode_most=2")
    try:
        (pool,) = json.loads(run(env, "get", "pools", "-o", "json").stdout)
        assert (pool["name"], pool["managed"], pool["waiting"]) == ("default", True, "")
        assert pool["decode"] == {"desired": 1, "least": 0, "most": 2, "ready": 1}
        refused = run(env, "scale", "default", "--decode", "3", "--yes", code=2)
        assert "POOL_BOUNDS: 3 decode workers of default are not within 0 and 2" in refused.stderr
        assert "--yes" in run(env, "scale", "default", "--decode", "2", code=2).stderr
        assert "--prefill N" in run(env, "scale", "default", "--yes", code=2).stderr
        done = run(
            env, "scale", "default", "--decode", "2", "--yes", "--wait", "--reason", "noon", "-o", "json"
        )
        assert json.loads(done.stdout)["state"] == "succeeded"
        name = "default-decode-1"
        run(env, "cordon", name)
        (worker,) = (
            each
            for each in json.loads(run(env, "get", "workers", "-o", "json").stdout)
            if each["name"] == name
        )
        found = json.loads(run(env, "describe", "worker", name, "-o", "json").stdout)
        assert found["incarnation"] == worker["incarnation"]
        assert found["replica"]["phase"] == "ready"
        assert found["counts"]["total_blocks"] == 128
        assert [event["reason"] for event in found["events"]][:2] == ["WorkerStarting", "WorkerReady"]
        assert len(found["log"]) == 5
        described = json.loads(run(env, "describe", "pool", "default", "-o", "json").stdout)
        assert {"kind": "scale", "reason": "noon", "decode": 2}.items() <= described["operations"][0].items()
        events = json.loads(run(env, "events", "--since", "1h", "--subject", name, "-o", "json").stdout)
        assert events[-1]["reason"] == "WorkerCordoned"
        assert run(env, "get", "events", "--warning", "-o", "name").stdout == ""
        assert "10m" in run(env, "get", "events", "--since", "soon", code=2).stderr
        run(env, "uncordon", name)
        assert "WORKER_NOT_FOUND" in run(env, "cordon", "nobody", code=2).stderr
        # What people read: every table has its rows, and nothing is left out of it.
        for arguments in (("get", "pools"), ("describe", "pool", "default"), ("describe", "worker", name)):
            assert name in (text := run(env, *arguments).stdout) or "default" in text
    finally:
        run(env, "down")


def test_a_bad_checkpoint_is_named_and_nothing_stays(
    env: dict[str, str], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for source in checkpoints["llama"].iterdir():
        content = source.read_bytes()
        (broken / source.name).write_bytes(content[:-100] if source.suffix == ".safetensors" else content)
    result = run(env, "up", "--model", str(broken), "--cluster", "bad", *SMALL, code=1)
    assert "safetensors" in result.stderr
    assert not (Path(env["TWINPOOL_HOME"]) / "bad" / "state.json").exists()
    run(env, "get", "workers", "--cluster", "bad", code=3)
