# SPDX-License-Identifier: Apache-2.0
"""LangChain's client and LangGraph's agent, run by a Python that has them: ``python langchain_client.py BASE_URL``."""

import json
import sys

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from pydantic import BaseModel


@tool
def weather(town: str) -> str:
    """What the weather is."""
    return f"Dry in {town}."


class Answer(BaseModel):
    """What is asked for."""

    town: str
    dry: bool


def main() -> None:
    model = ChatOpenAI(model="fake", base_url=sys.argv[1], api_key="none", max_tokens=200, stream_usage=True)
    found: dict[str, object] = {}
    agent = create_react_agent(model, [weather])
    messages = agent.invoke({"messages": [HumanMessage("Rain in Bern?")]})["messages"]
    found["agent"] = [type(message).__name__ for message in messages]
    found["tool"] = messages[2].content
    found["answer"] = messages[-1].content
    chunks = list(model.bind_tools([weather]).stream([HumanMessage("Rain in Bern?")]))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert isinstance(whole, AIMessage)
    found["streamed"] = [(call["name"], call["args"]) for call in whole.tool_calls]
    found["usage"] = whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] > 0
    form = model.with_structured_output(Answer, method="json_schema")
    found["form"] = form.invoke([HumanMessage("as JSON")]).model_dump()
    print(json.dumps(found))


main()
