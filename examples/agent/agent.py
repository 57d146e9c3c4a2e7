# SPDX-License-Identifier: Apache-2.0
"""A small agent: it plans, calls two tools, and answers, over OpenAI's API or over gRPC.

    python examples/agent/agent.py --http 127.0.0.1:8000
    python examples/agent/agent.py --grpc 127.0.0.1:50051

Each turn sends the whole conversation again; the last column shows how much of it the cluster had cached. Any model whose chat
template shows tools will do. A turn that has to call a tool is held to the tool's schema, so the loop works with small models too.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from twinpool.client import Client
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb


def town_schema(**more: Any) -> dict[str, Any]:
    """Arguments with a town."""
    properties = {"town": {"type": "string", "maxLength": 20}, **more}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


@dataclass
class Tool:
    """Something that the agent can do."""

    name: str
    description: str
    parameters: dict[str, Any]
    run: Callable[[dict[str, Any]], str]


TOOLS = [
    Tool(
        "weather",
        "Says what the weather is in a town.",
        town_schema(),
        lambda a: f"Rain in {a['town']}, 12 degrees.",
    ),
    Tool(
        "trains",
        "Finds the next train to a town.",
        town_schema(hour={"type": "integer", "minimum": 0, "maximum": 23}),
        lambda a: f"The next train to {a['town']} leaves at {a['hour']}:32.",
    ),
]
PLAN = "You plan a day out. First look up the weather, then a train, then answer in one sentence."


@dataclass
class Turn:
    """What a turn cost and brought."""

    text: str
    calls: list[dict[str, Any]]
    prompt_tokens: int
    cached_tokens: int
    first_seconds: float


class OverHttp:
    """Asks by OpenAI's client."""

    def __init__(self, address: str, key: str) -> None:
        self._client = AsyncOpenAI(base_url=f"http://{address}/v1", api_key=key or "none")

    async def ask(self, messages: list[Any], tool: Tool | None) -> Turn:
        """The next turn; with ``tool`` it must call that one."""
        model = (await self._client.models.list()).data[0].id
        tools: Any = [
            {
                "type": "function",
                "function": {"name": t.name, "description": t.description, "parameters": t.parameters},
            }
            for t in TOOLS
        ]
        choice: Any = {"type": "function", "function": {"name": tool.name}} if tool else "auto"
        began, first = time.monotonic(), 0.0
        async with self._client.chat.completions.stream(
            model=model, messages=messages, tools=tools, tool_choice=choice, temperature=0, max_tokens=60,
            stream_options={"include_usage": True},
        ) as stream:  # fmt: skip
            async for _ in stream:
                first = first or time.monotonic() - began
            done = await stream.get_final_completion()
        message, usage = done.choices[0].message, done.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls or ()
        ]
        cached = usage.prompt_tokens_details.cached_tokens or 0
        return Turn(message.content or "", calls, usage.prompt_tokens, cached, first)


class OverGrpc:
    """Asks by Twinpool's own client."""

    def __init__(self, address: str, key: str) -> None:
        self._client = Client(address, key=key)

    async def ask(self, messages: list[Any], tool: Tool | None) -> Turn:
        """The next turn; with ``tool`` it must call that one."""
        request = chat.ChatRequest()
        request.request.sampling.temperature = 0
        request.request.stop.max_tokens = 60
        conversation = request.request.chat
        for message in messages:
            conversation.messages.append(_message(message))
        for t in TOOLS:
            conversation.tools.add(
                name=t.name, description=t.description, parameters_json=json.dumps(t.parameters)
            )
        request.tool_name = tool.name if tool is not None else ""
        text, calls, usage = "", dict[int, dict[str, Any]](), pb.Usage()
        began, first = time.monotonic(), 0.0
        async for event in self._client.chat(request):
            if event.HasField("finished"):
                usage = event.finished.usage
            elif event.HasField("delta"):
                first = first or time.monotonic() - began
                text += event.delta.content
                for part in event.delta.tool_calls:
                    call = calls.setdefault(
                        part.index, {"id": part.id, "function": {"name": part.name, "arguments": ""}}
                    )
                    call["function"]["arguments"] += part.arguments_json
        return Turn(text, list(calls.values()), usage.prompt_tokens, usage.cached_tokens, first)


def _message(message: dict[str, Any]) -> pb.ChatMessage:
    made = pb.ChatMessage(
        role=message["role"],
        content=message.get("content") or "",
        tool_call_id=message.get("tool_call_id", ""),
    )
    for call in message.get("tool_calls", ()):
        function = call["function"]
        made.tool_calls.add(id=call["id"], name=function["name"], arguments_json=function["arguments"])
    return made


async def run(options: argparse.Namespace) -> None:
    """The whole loop; prints a line a turn."""
    asked = OverHttp(options.http, options.key) if options.http else OverGrpc(options.grpc, options.key)
    messages: list[Any] = [{"role": "system", "content": PLAN}, {"role": "user", "content": options.question}]
    # The tools stay in every prompt, the last one included: another beginning would be computed anew.
    for tool in (*TOOLS, None):
        turn = await asked.ask(messages, tool)
        said = " ".join(turn.text.split()) or ", ".join(
            f"{call['function']['name']}({call['function']['arguments']})" for call in turn.calls
        )
        print(
            f"{turn.first_seconds * 1000:6.0f} ms  {turn.cached_tokens:4d} of {turn.prompt_tokens:4d} cached  {said}"
        )
        messages.append({"role": "assistant", "content": turn.text or None, "tool_calls": turn.calls})
        for call in turn.calls:
            known = next(t for t in TOOLS if t.name == call["function"]["name"])
            result = known.run(json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def main() -> None:
    """Reads the command line and runs the agent."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--http", help="host:port of a router's HTTP API")
    way.add_argument("--grpc", help="host:port of a router's gRPC API")
    parser.add_argument("--key", default="", help="API key, if the cluster has tenants")
    parser.add_argument("--question", default="Can I go to Bern today?")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
