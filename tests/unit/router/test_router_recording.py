# SPDX-License-Identifier: Apache-2.0
"""A running router's core is recorded, its log fetched, and the same decisions come out of it elsewhere."""

import asyncio
import ctypes
import ctypes.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from tests.support.fake_cluster import FakeCluster, fake_cluster, generate, prompt
from tests.support.fake_worker import FIRST_TOKEN, Script
from tests.unit.router.test_router_resume import kill_under
from twinpool._core import replay_log
from twinpool.control.cli.main import app
from twinpool.errors import TwinpoolError
from twinpool.router_client import RouterClient
from twinpool.v1 import inference_pb2
from twinpool.v1 import worker_pb2 as worker

HEAD_BYTES = 25  # a mark, a checksum, the size and the codec
STATE_BYTES = 16384
"""More than the saved state of a core with a few workers and nothing indexed."""


async def cli(*arguments: str) -> Result:
    """A command as it is typed, on a thread of its own."""
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments))


def printed(result: Result) -> dict[str, Any]:
    """The object that a command printed. What the router logs meanwhile lands in the same place here."""
    text = result.stdout
    found: dict[str, Any] = json.loads(text[text.index("{\n") : text.rindex("\n}") + 2])
    return found


def unpacked(log: bytes) -> bytes:
    """What is in a log."""
    if log[HEAD_BYTES - 1] == 0:
        return log[HEAD_BYTES:]
    zstd = ctypes.CDLL(ctypes.util.find_library("zstd") or "libzstd.so.1")
    zstd.ZSTD_decompress.restype = ctypes.c_size_t
    size = int.from_bytes(log[16:24], "little")
    raw, body = ctypes.create_string_buffer(size), log[HEAD_BYTES:]
    got = zstd.ZSTD_decompress(raw, ctypes.c_size_t(size), ctypes.c_char_p(body), ctypes.c_size_t(len(body)))
    assert got == size
    return raw.raw


async def fetched(cluster: FakeCluster) -> bytes:
    async with RouterClient(cluster.router.endpoint) as client:
        return b"".join([piece.data async for piece in client.recording()])


async def test_failures_and_a_resumed_answer_are_decided_again(model_path: Path, tmp_path: Path) -> None:
    settings: dict[str, object] = {"record_bytes": 1 << 20}
    script = Script(step_seconds=0.01)
    async with fake_cluster(
        model_path, prefill=2, decode=2, decode_script=script, settings=settings
    ) as cluster:
        broken = Script(fail_prefill=worker.FAILURE_REASON_TRANSFER)
        cluster.workers["p0"].script = cluster.workers["p1"].script = broken
        assert (await cluster.ask(generate(prompt(40)))).error is not None
        cluster.workers["p0"].script = cluster.workers["p1"].script = Script()
        resumed = await kill_under(cluster, generate(prompt(40), max_tokens=60))
        assert (resumed.error, resumed.finished.attempts) == (None, 2)
        endpoint, log = cluster.router.endpoint, tmp_path / "core.log"
        made = await cli("core", "record", "--endpoint", endpoint, "--output", str(log))
        assert made.exit_code == 0, made.output
        assert f"{log.stat().st_size} bytes" in made.stdout
        assert os.listdir(tmp_path) == ["core.log"]
        again = await cli("core", "record", "--endpoint", endpoint, "--output", str(log), "-o", "json")
        row = printed(again)
        assert (row["router"], row["log"], row["bytes"]) == (endpoint, str(log), log.stat().st_size)
    replayed = await cli("core", "replay", str(log), "--lines")
    assert replayed.exit_code == 0, replayed.output
    assert "all decisions are equal" in replayed.stdout
    # Three placements that failed, one that was lost, one that ended the answer.
    assert " 5 placements" in replayed.stdout
    for event in ("TRANSFER:prefill", "worker_lost", "extend", "requeue", "finished"):
        assert event in replayed.stdout
    report = printed(await cli("core", "replay", str(log), "-o", "json"))
    assert (report["equal"], report["mismatch"]) == (True, "")
    assert report["calls"] > 30


async def test_the_log_holds_no_prompt_and_no_answer(model_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog, again and again."
    async with fake_cluster(model_path, settings={"record_bytes": 1 << 20}) as cluster:
        answer = await cluster.ask(
            inference_pb2.GenerateRequest(text=text, tenant="somebody", request_id="named-by-client")
        )
        ids = await cluster.ask(generate(prompt(40, seed=5), max_tokens=20))
        raw = unpacked(await fetched(cluster))
        hashes = {bytes(block) for made in cluster.workers.values() for block in _hashes(made.prefills)}
    # It can be read at all: names and hashes are there.
    assert ids.started.request_id.encode() in raw
    assert b"somebody" in raw
    assert hashes
    assert all(one in raw for one in hashes)
    assert not [word for word in text.split() if len(word) > 4 and word.encode() in raw]
    assert b"named-by-client" not in raw
    assert not [word for word in (answer.text(), ids.text()) if word.encode() in raw]
    drawn = [FIRST_TOKEN + at for at in range(4)]
    for tokens in (prompt(40, seed=5)[:4], drawn):
        for kind in (np.int32, np.int64, np.uint16):
            assert np.array(tokens, kind).tobytes() not in raw


def _hashes(commands: list[worker.PrefillCommand]) -> list[bytes]:
    chains = [command.prompt.block_hashes for command in commands]
    return [chain[at : at + 16] for chain in chains for at in range(0, len(chain), 16)]


async def test_the_oldest_calls_go_first_and_the_rest_replays(model_path: Path) -> None:
    most = 16384
    settings: dict[str, object] = {"record_bytes": most, "max_message_bytes": 1024}
    async with fake_cluster(model_path, settings=settings) as cluster:
        oldest = (await cluster.ask(generate())).started.request_id
        assert oldest.encode() in unpacked(await fetched(cluster))
        # One after the other: a state holds the requests that are under way.
        for number in range(60):
            await cluster.ask(generate(prompt(60, number), request_id=f"r{number}"))
        await cluster.assert_quiescent()
        # A piece fits in the router's message, so the log comes in several.
        async with RouterClient(cluster.router.endpoint) as client:
            pieces = [piece async for piece in client.recording()]
    log = b"".join(piece.data for piece in pieces)
    assert len(pieces) > 1
    assert {piece.total_bytes for piece in pieces} == {len(log)}
    raw = unpacked(log)
    assert most / 2 < len(raw) < most + STATE_BYTES
    assert oldest.encode() not in raw
    lines: list[str] = []
    report = replay_log(log, lines.append)
    assert report.equal, report.mismatch
    assert report.calls == len(lines) > 20
    assert any(" submit " in line for line in lines)


async def test_without_recording_the_router_says_so(model_path: Path, tmp_path: Path) -> None:
    async with fake_cluster(model_path) as cluster:
        await cluster.ask(generate())
        with pytest.raises(TwinpoolError) as caught:
            await fetched(cluster)
        assert caught.value.reason == "RECORDING_OFF"
        log = tmp_path / "core.log"
        made = await cli("core", "record", "--endpoint", cluster.router.endpoint, "--output", str(log))
        assert made.exit_code == 1
        assert "RECORDING_OFF" in made.stderr
        assert "router.record_bytes" in made.stderr
        assert not os.listdir(tmp_path)


async def test_a_file_that_cannot_be_written_is_named(model_path: Path, tmp_path: Path) -> None:
    async with fake_cluster(model_path, settings={"record_bytes": 1 << 20}) as cluster:
        log = str(tmp_path / "nowhere" / "core.log")
        made = await cli("core", "record", "--endpoint", cluster.router.endpoint, "--output", log)
        assert made.exit_code == 2
        assert "core.log: No such file" in made.stderr
