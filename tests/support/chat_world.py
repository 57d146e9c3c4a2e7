# SPDX-License-Identifier: Apache-2.0
"""A router over fake workers that write a given text, and a model whose chat template knows tools."""

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.byte_tokenizer import EOS, write_byte_tokenizer
from tests.support.fake_cluster import FakeCluster, fake_cluster
from tests.support.fake_pair import FakePair, fake_pair
from tests.support.fake_worker import Job, Script
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb

TEMPLATE = (
    "{% if tools %}[tools]{% for tool in tools %}{{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if think %}<think>\n{% endif %}{% endif %}"
    "{# </think> is how it ends to think #}"
)
"""In the manner of Hermes, short enough for a model with small contexts."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What the weather is.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}


def write_chat_model(directory: Path) -> Path:
    """The byte-level tokenizer with a template that knows tools."""
    write_byte_tokenizer(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = TEMPLATE
    path.write_text(json.dumps(config))
    return directory


def weather_chat(max_tokens: int = 300) -> chat.ChatRequest:
    """Asks for the weather; a tool knows it."""
    function = WEATHER["function"]
    assert isinstance(function, dict)
    tool = pb.Tool(
        name=function["name"],
        description=function["description"],
        parameters_json=json.dumps(function["parameters"]),
    )
    request = chat.ChatRequest(
        request=pb.GenerateRequest(
            chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Rain?")], tools=[tool])
        )
    )
    request.request.stop.max_tokens = max_tokens
    return request


def writes(text: str) -> "Callable[[Job, int, int], int]":
    """A script's token: this text, byte by byte, in every choice; then the end."""
    ids = [*text.encode(), EOS]

    def token(job: Job, choice: int, offset: int) -> int:
        return ids[min(offset, len(ids) - 1)]

    return token


def prompt_text(cluster: FakeCluster) -> str:
    """The text of the last prompt that a prefill worker was given."""
    token_ids = cluster.workers["p0"].prefills[-1].prompt.token_ids
    return bytes(token_ids[::4]).decode()


@asynccontextmanager
async def chat_cluster(
    model: Path, text: str, *, audit_file: str = os.devnull, **settings: object
) -> AsyncIterator[FakeCluster]:
    """A router with its HTTP API on, and workers that write ``text``."""
    script = Script(token=writes(text))
    options: dict[str, object] = {"http_port": 0} | settings
    record: dict[str, object] = {"max_context_tokens": 4096, "num_blocks": 1024}
    async with fake_cluster(
        model,
        prefill_script=script,
        decode_script=script,
        settings=options,
        audit_file=audit_file,
        **record,
    ) as cluster:
        yield cluster


@asynccontextmanager
async def chat_pair(
    model: Path, text: str, *, step_seconds: float = 0.0, settings: dict[str, object] | None = None
) -> AsyncIterator[FakePair]:
    """Two routers over workers that write ``text``, a token every ``step_seconds``."""
    async with fake_pair(
        model,
        script=Script(token=writes(text), step_seconds=step_seconds),
        prefill_script=Script(token=writes(text)),
        settings=settings,
    ) as pair:
        yield pair
