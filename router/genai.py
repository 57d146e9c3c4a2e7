# SPDX-License-Identifier: Apache-2.0
"""What the span of a request says by the names of OpenTelemetry's conventions for generative AI (in development; open-telemetry/
semantic-conventions-genai, as of 2026-11).

Only the request's own span has them: hops and workers' spans are parts of that one operation, and would count as others. Texts
are left out: messages, tools, stop strings.
"""

from __future__ import annotations

from typing import Final

from twinpool.router.request import Prepared
from twinpool.tracing import OFF, Attribute, Span
from twinpool.v1 import inference_pb2 as pb

PROVIDER: Final = "twinpool"
CHAT: Final = "chat"
TEXT_COMPLETION: Final = "text_completion"

_SAMPLING: Final = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
_REASONS: Final = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


def asked(span: Span, prepared: Prepared, given: pb.SamplingParams, *, chat: bool) -> None:
    """What the request wants. ``given``: how tokens are drawn, as far as its client has said."""
    if span is OFF:
        return
    operation, model = CHAT if chat else TEXT_COMPLETION, prepared.group.model
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": prepared.max_tokens,
        "gen_ai.request.stream": True,
    }
    for name in _SAMPLING:
        if given.HasField(name):
            attributes[f"gen_ai.request.{name}"] = getattr(given, name)
    if prepared.n > 1:
        attributes["gen_ai.request.choice.count"] = prepared.n
    if prepared.session_id:
        attributes["gen_ai.conversation.id"] = prepared.session_id
    span.note(attributes)


def answered(span: Span, prepared: Prepared, finished: pb.GenerateFinished) -> None:
    """What came of it."""
    if span is OFF:
        return
    usage = finished.usage
    span.note(
        {
            "gen_ai.response.id": prepared.client_id,
            "gen_ai.response.model": prepared.group.model,
            "gen_ai.response.finish_reasons": [
                _REASONS.get(choice.reason, "unknown") for choice in finished.choices
            ],
            "gen_ai.response.time_to_first_chunk": finished.timings.time_to_first_token.ToNanoseconds() / 1e9,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
    )
