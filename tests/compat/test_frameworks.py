# SPDX-License-Identifier: Apache-2.0
"""Agent frameworks against the OpenAI-compatible API, as their users point them at it.

They live in an environment of their own, whose Python TWINPOOL_COMPAT names:
``pip install langchain-openai langgraph openai-agents``.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.byte_tokenizer import EOS
from tests.support.chat_world import chat_cluster, write_chat_model
from tests.support.fake_worker import Job

PYTHON = os.environ.get("TWINPOOL_COMPAT", "")
HERE = Path(__file__).parent
CALL = '<tool_call>{"name": "weather", "arguments": {"town": "Bern"}}</tool_call>'

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="TWINPOOL_COMPAT names no Python with the frameworks"),
]


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


async def run(script: str, tmp_path: Path) -> dict[str, Any]:
    model = write_chat_model(tmp_path / "model")
    async with chat_cluster(model, "") as cluster:
        for made in cluster.workers.values():
            made.script.token = office
        process = await asyncio.create_subprocess_exec(
            PYTHON, str(HERE / script), f"http://{cluster.router.apis.http_endpoint}/v1",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        printed, complaints = await asyncio.wait_for(process.communicate(), 240)
        assert process.returncode == 0, complaints.decode()
        await cluster.assert_quiescent()
        found: dict[str, Any] = json.loads(printed.decode().splitlines()[-1])
        return found


async def test_langchain_and_langgraph(tmp_path: Path) -> None:
    assert await run("langchain_client.py", tmp_path) == {
        "agent": ["HumanMessage", "AIMessage", "ToolMessage", "AIMessage"],
        "tool": "Dry in Bern.",
        "answer": "It is dry.",
        "streamed": [["weather", {"town": "Bern"}]],
        "usage": True,
        "form": {"town": "Bern", "dry": True},
    }


async def test_openai_agents(tmp_path: Path) -> None:
    found = await run("agents_client.py", tmp_path)
    assert found["answer"] == found["streamed"] == "It is dry."
    assert found["items"] == ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]
    assert "raw_response_event" in found["kinds"]
