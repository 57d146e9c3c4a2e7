# SPDX-License-Identifier: Apache-2.0
"""OpenAI's agent framework, run by a Python that has it: ``python agents_client.py BASE_URL``."""

import asyncio
import json
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def weather(town: str) -> str:
    """What the weather is."""
    return f"Dry in {town}."


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=sys.argv[1], api_key="none")
    model = OpenAIChatCompletionsModel(model="fake", openai_client=client)
    agent = Agent(name="office", instructions="Be brief.", tools=[weather], model=model)
    result = await Runner.run(agent, "Rain in Bern?")
    streamed = Runner.run_streamed(agent, "Rain in Bern?")
    kinds = {event.type async for event in streamed.stream_events()}
    items = [type(item).__name__ for item in result.new_items]
    print(
        json.dumps(
            {
                "answer": result.final_output,
                "items": items,
                "streamed": streamed.final_output,
                "kinds": sorted(kinds),
            }
        )
    )


asyncio.run(main())
