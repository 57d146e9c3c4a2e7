# SPDX-License-Identifier: Apache-2.0
"""Readers on small samples of each format."""

import gzip
import json
from pathlib import Path

import pytest

from twinpool.control.replay.formats import read_trace
from twinpool.control.replay.trace import Trace, TraceError


def write(directory: Path, name: str, *lines: object) -> Path:
    path = directory / name
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def ids(trace: Trace) -> list[list[int]]:
    return [request.block_ids().tolist() for request in trace.requests]


def test_mooncake_counts_the_partial_block_apart(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "m.jsonl",
        {"timestamp": 0, "input_length": 1025, "output_length": 7, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 9]},
    )
    trace = read_trace(path)
    assert (trace.block_tokens, trace.closed, trace.seconds) == (512, False, 3.0)
    assert ids(trace) == [[0, 1], [0, 9]]
    assert [request.tail_id for request in trace.requests] == [2, -1]
    assert [request.listed_blocks for request in trace.requests] == [3, 2]
    assert trace.requests[1].output_length == 1


@pytest.mark.parametrize("hash_ids", [[0], [0, 1, 2, 3]])
def test_mooncake_refuses_ids_that_do_not_fit_the_length(tmp_path: Path, hash_ids: list[int]) -> None:
    line = {"timestamp": 0, "input_length": 1025, "output_length": 7, "hash_ids": hash_ids}
    with pytest.raises(TraceError, match=r"line 1: .* block ids for 1025 tokens"):
        read_trace(write(tmp_path, "m.jsonl", line))


def test_scaled_closes_the_loop(tmp_path: Path) -> None:
    common = {"session": "a", "turn": 1, "kind": "text", "output_length": 5}
    path = write(
        tmp_path,
        "s.jsonl",
        common
        | {"id": 7, "timestamp": 1000, "after": None, "think_ms": 0, "input_length": 33, "hash_ids": [0, 1]},
        "",
        common
        | {
            "id": 8,
            "timestamp": 9000,
            "after": 7,
            "think_ms": 1500,
            "input_length": 48,
            "hash_ids": [0, 1, 5],
        },
    )
    first, second = read_trace(path).requests
    assert (first.after, second.after, second.think) == (None, 0, 1.5)
    assert (first.session, second.arrival) == ("a", 9.0)


def test_scaled_refuses_to_wait_for_what_is_not_there(tmp_path: Path) -> None:
    line = {
        "id": 1,
        "timestamp": 0,
        "after": 5,
        "think_ms": 0,
        "input_length": 3,
        "output_length": 1,
        "hash_ids": [],
    }
    with pytest.raises(TraceError, match="line 1: waits for 5"):
        read_trace(write(tmp_path, "s.jsonl", line))


def test_taubench_chains_the_turns_of_a_session(tmp_path: Path) -> None:
    def line(at: int, session: int) -> dict[str, object]:
        return {
            "timestamp": at,
            "input_length": 20,
            "output_length": 2,
            "hash_ids": [3, 4],
            "session_id": session,
            "turn": 1,
            "type": "text",
        }

    trace = read_trace(write(tmp_path, "t.jsonl", line(0, 1), line(500, 2), line(2500, 1)))
    assert [(request.after, request.think) for request in trace.requests] == [
        (None, 0.0),
        (None, 0.0),
        (0, 2.5),
    ]
    assert trace.requests[0].tail_id == 4


def test_azure_knows_no_prefixes(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.0319600,3180,0",
    )
    trace = read_trace(path)
    assert (trace.block_tokens, len(trace.requests)) == (0, 2)
    assert trace.requests[1].arrival == pytest.approx(0.052)
    assert (trace.requests[1].output_length, trace.requests[1].full_blocks) == (1, 0)


def entry(t: float, runs: list[list[int]], **more: object) -> dict[str, object]:
    tokens = 64 * sum(count for _, count in runs) + 5
    return {"t": t, "type": "n", "in": tokens, "out": 9, "runs": runs, "api_time": 2.0} | more


def session(name: str, *requests: dict[str, object]) -> dict[str, object]:
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": list(requests)}


def test_agents_nest_sub_agents_and_drop_sessions_recorded_twice(tmp_path: Path) -> None:
    helper = {
        "t": 12.0,
        "type": "subagent",
        "requests": [entry(0.0, [[50, 2]]), entry(6.0, [[50, 3]], think_time=4.0)],
    }
    work = (
        entry(0.0, [[1, 2]], think_time=0.0),
        entry(10.0, [[1, 2], [7, 1]], think_time=8.0),
        helper,
        entry(40.0, [[1, 2], [7, 2]]),
    )
    trace = read_trace(
        write(tmp_path, "g.jsonl.gz", session("a", *work), session("b", *work), session("c", work[0]))
    )
    assert (trace.block_tokens, len(trace.requests)) == (64, 6)
    assert ids(trace)[:5] == [[1, 2], [1, 2, 7], [50, 51], [50, 51, 52], [1, 2, 7, 8]]
    # The sub-agent starts after the parent's second request; so does the parent's next one, by the recorded pause.
    assert [request.after for request in trace.requests] == [None, 0, 1, 2, 1, None]
    assert [request.think for request in trace.requests] == [0.0, 8.0, 0.0, 4.0, 28.0, 0.0]
    assert [request.arrival for request in trace.requests] == [0.0, 10.0, 12.0, 18.0, 40.0, 0.0]
    assert {request.namespace for request in trace.requests[:5]} != {trace.requests[5].namespace}


def test_agents_refuse_runs_that_do_not_fit_the_length(tmp_path: Path) -> None:
    bad = entry(0.0, [[1, 2]]) | {"in": 300}
    with pytest.raises(TraceError, match="line 1: 2 block ids for 300 tokens"):
        read_trace(write(tmp_path, "g.jsonl", session("a", bad)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "line 1: neither a JSON object"),
        ('{"a": 1}', "of no known format"),
        ('{"timestamp": 0, "hash_ids": [], "input_length": "x", "output_length": 1}', "line 1: "),
        ("", "line 1"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, "x.jsonl", text))


def test_unknown_format_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="unknown format 'x'; known: mooncake"):
        read_trace(write(tmp_path, "x.jsonl", "{}"), "x")
    with pytest.raises(TraceError, match="missing"):
        read_trace(tmp_path / "missing")
