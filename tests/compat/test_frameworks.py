# SPDX-License-Identifier: Apache-2.0
"""Clients of others: agent frameworks against the OpenAI-compatible API and Triton's client, as their users point them at it.

They live in an environment of their own, whose Python TWINPOOL_COMPAT names:
``pip install langchain-openai langgraph openai-agents tritonclient[grpc]``. And a client in JavaScript, made of the proto files alone:
TWINPOOL_COMPAT_NODE names a directory in which ``npm install @grpc/grpc-js @grpc/proto-loader`` was run.
"""

import asyncio
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.byte_tokenizer import EOS
from tests.support.chat_world import chat_cluster, write_chat_model
from tests.support.fake_worker import Job
from twinpool.v1.kserve import open_inference_pb2 as kserve

PYTHON = os.environ.get("TWINPOOL_COMPAT", "")
NODE = os.environ.get("TWINPOOL_COMPAT_NODE", "")
HERE = Path(__file__).parent
CALL = '<tool_call>{"name": "weather", "arguments": {"town": "Bern"}}</tool_call>'

pytestmark = pytest.mark.slow
needs_python = pytest.mark.skipif(not PYTHON, reason="TWINPOOL_COMPAT names no Python with the frameworks")
needs_node = pytest.mark.skipif(
    not NODE, reason="TWINPOOL_COMPAT_NODE names no directory with gRPC for Node.js"
)


def office(job: Job, choice: int, offset: int) -> int:
    """A model that calls the tool once, then answers; and that writes JSON where it is asked to."""
    prompt = bytes(job.prompt.astype("uint8")).decode()
    text = CALL
    if "[tool]" in prompt:
        text = "It is dry."
    elif "as JSON" in prompt:
        text = '{"town": "Bern", "dry": true}'
    ids = [*text.encode(), EOS]
    return ids[min(offset, len(ids) - 1)]


async def run(tmp_path: Path, *command: str, directory: str | None = None) -> dict[str, Any]:
    """Runs a client; {http} and {grpc} in its command are where the router listens."""
    model = write_chat_model(tmp_path / "model")
    async with chat_cluster(model, "") as cluster:
        for made in cluster.workers.values():
            made.script.token = office
        where = {"http": f"http://{cluster.router.apis.http_endpoint}/v1", "grpc": cluster.router.endpoint}
        process = await asyncio.create_subprocess_exec(
            *(part.format(**where) for part in command),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=directory,
        )  # fmt: skip
        printed, complaints = await asyncio.wait_for(process.communicate(), 240)
        assert process.returncode == 0, complaints.decode()
        await cluster.assert_quiescent()
        found: dict[str, Any] = json.loads(printed.decode().splitlines()[-1])
        return found


@needs_python
async def test_langchain_and_langgraph(tmp_path: Path) -> None:
    assert await run(tmp_path, PYTHON, str(HERE / "langchain_client.py"), "{http}") == {
        "agent": ["HumanMessage", "AIMessage", "ToolMessage", "AIMessage"],
        "tool": "Dry in Bern.",
        "answer": "It is dry.",
        "streamed": [["weather", {"town": "Bern"}]],
        "usage": True,
        "form": {"town": "Bern", "dry": True},
    }


@needs_python
async def test_openai_agents(tmp_path: Path) -> None:
    found = await run(tmp_path, PYTHON, str(HERE / "agents_client.py"), "{http}")
    assert found["answer"] == found["streamed"] == "It is dry."
    assert found["items"] == ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]
    assert "raw_response_event" in found["kinds"]


@needs_python
async def test_triton(tmp_path: Path) -> None:
    found = await run(tmp_path, PYTHON, str(HERE / "triton_client.py"), "{grpc}")
    theirs = found.pop("numbers")
    assert found == {
        "live": [True, True],
        "models": [True, False],
        "server": "twinpool",
        "inputs": ["beam_width", "exclude_input_in_output", "frequency_penalty"],
        "whole": {
            "text": CALL[:8],
            "ids": [list(CALL[:8].encode())],
            "finish": "length",
            "counts": [5, 8],
            "id": "whole",
        },
        "streamed": {
            "texts": {"one": CALL, "two": CALL},
            "errors": ["MODEL_NOT_FOUND: model is 'other'; the limit is one of fake"],
        },
        "sample": {"0": CALL, "1": CALL},
    }
    for name, fields in messages(kserve.DESCRIPTOR.message_types_by_name.values()):
        assert fields == theirs[name], name


def messages(of: Iterable[Any]) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """The messages of the protocol, nested ones too: number and type of each field."""
    for message in of:
        yield message.full_name, {field.name: [field.number, field.type] for field in message.fields}
        yield from messages(message.nested_types)


@needs_node
async def test_javascript(tmp_path: Path) -> None:
    command = ("node", str(HERE / "node_client.mjs"), str(HERE.parents[1] / "proto"), "{grpc}")
    assert await run(tmp_path, *command, directory=NODE) == {
        "text": CALL[:20],
        "finish": "FINISH_REASON_LENGTH",
        "name": "weather",
        "arguments": '{"town": "Bern"}',
        "turn": "FINISH_REASON_TOOL_CALLS",
        "refused": True,
    }
