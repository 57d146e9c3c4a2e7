# SPDX-License-Identifier: Apache-2.0
"""A request's span by OpenTelemetry's conventions for generative AI: what was asked, what came of it, and no text."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.fake_cluster import fake_cluster, generate, prompt
from tests.support.waiting import until
from twinpool import tracing
from twinpool.v1 import inference_pb2 as pb


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.use(None)


async def test_a_chat_says_what_it_wants_and_what_it_got(
    model_path: Path, spans: InMemorySpanExporter
) -> None:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="a secret")])
    sampling = pb.SamplingParams(temperature=0.5, top_k=7, seed=11)
    request = generate(chat=chat, sampling=sampling, n=2, session_id="conversation-7", request_id="mine")
    request.stop.stop_strings.append("another secret")
    async with fake_cluster(model_path) as cluster:
        answer = await cluster.ask(request)
    assert answer.error is None
    await until(lambda: roots(spans))
    (root,) = roots(spans)
    given = {name: value for name, value in (root.attributes or {}).items() if name.startswith("gen_ai.")}
    assert given.pop("gen_ai.response.time_to_first_chunk") > 0
    assert given == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "twinpool",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 11,
        "gen_ai.request.choice.count": 2,
        "gen_ai.conversation.id": "conversation-7",
        "gen_ai.response.id": "mine",
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": answer.finished.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    assert "secret" not in str([dict(span.attributes or {}) for span in spans.get_finished_spans()])


async def test_a_refused_request_has_no_usage(model_path: Path, spans: InMemorySpanExporter) -> None:
    async with fake_cluster(model_path) as cluster:
        answer = await cluster.ask(generate(prompt(5000)))
    assert answer.reason == "PROMPT_TOO_LONG"
    (root,) = roots(spans)
    assert root.attributes is not None
    assert root.attributes["error.type"] == "PROMPT_TOO_LONG"
    assert not any(name.startswith("gen_ai.usage") for name in root.attributes)


def roots(spans: InMemorySpanExporter) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == "generate"]
