# SPDX-License-Identifier: Apache-2.0
"""What a request may contain: the limits that a router checks before anything else."""

from __future__ import annotations

from pydantic import Field

from twinpool.config.base import RELOADABLE, Section

MiB = 1 << 20


class RequestLimits(Section):
    """Limits of one request; a part of the router's section."""

    max_message_bytes: int = Field(
        default=16 * MiB,
        ge=1024,
        le=1 << 30,
        description="Largest request of a client, in bytes. Bounds memory a request.",
    )
    max_prompt_tokens: int = Field(
        default=1 << 20,
        ge=1,
        le=1 << 26,
        description="Longest prompt in tokens, whatever the model's context limit is.",
        json_schema_extra=RELOADABLE,
    )
    max_prompt_chars: int = Field(
        default=8 * MiB,
        ge=1,
        le=1 << 28,
        description="Longest prompt in characters, checked before it is tokenised.",
        json_schema_extra=RELOADABLE,
    )
    max_output_tokens: int = Field(
        default=1 << 17,
        ge=1,
        le=1 << 26,
        description="Largest max_tokens of a request.",
        json_schema_extra=RELOADABLE,
    )
    max_choices: int = Field(
        default=16,
        ge=1,
        le=16,
        description="Largest n. Each choice holds its own blocks.",
        json_schema_extra=RELOADABLE,
    )
    max_logprobs: int = Field(
        default=20, ge=0, le=20, description="Most alternatives a token.", json_schema_extra=RELOADABLE
    )
    max_scored_prompt_tokens: int = Field(
        default=1 << 15,
        ge=1,
        le=1 << 26,
        description="Longest prompt with prompt_logprobs, in tokens: each takes up to 300 bytes on its way, and a journal or an "
        "answer by HTTP that is not streamed holds all of them.",
        json_schema_extra=RELOADABLE,
    )
    max_stop_strings: int = Field(
        default=16,
        ge=0,
        le=256,
        description="Most stop strings; each is searched in every answer.",
        json_schema_extra=RELOADABLE,
    )
    max_stop_string_chars: int = Field(
        default=256,
        ge=1,
        le=4096,
        description="Longest stop string in characters; so much text may be held back.",
        json_schema_extra=RELOADABLE,
    )
    max_stop_token_ids: int = Field(
        default=64, ge=0, le=4096, description="Most stop token ids.", json_schema_extra=RELOADABLE
    )
    max_logit_biases: int = Field(
        default=1024,
        ge=0,
        le=4096,
        description="Most tokens of a request whose logits are changed.",
        json_schema_extra=RELOADABLE,
    )
    max_chat_messages: int = Field(
        default=4096,
        ge=1,
        le=1 << 20,
        description="Most turns of a conversation.",
        json_schema_extra=RELOADABLE,
    )
    max_grammar_bytes: int = Field(
        default=256 * 1024,
        ge=1,
        le=1 << 26,
        description="Largest grammar of an answer's form, in bytes.",
        json_schema_extra=RELOADABLE,
    )
    max_tools: int = Field(
        default=512,
        ge=0,
        le=1 << 16,
        description="Most tools of a conversation.",
        json_schema_extra=RELOADABLE,
    )
    max_tenant_chars: int = Field(
        default=64,
        ge=1,
        le=256,
        description="Longest tenant name in characters.",
        json_schema_extra=RELOADABLE,
    )
    resume_grace_seconds: float = Field(
        default=30.0,
        gt=0,
        le=86400,
        description="How long an answer with an idempotency key goes on and is kept without a client, if its request does not say.",
        json_schema_extra=RELOADABLE,
    )
    max_resume_grace_seconds: float = Field(
        default=300.0,
        ge=0,
        le=86400,
        description="Longest resume_grace of a request, in seconds.",
        json_schema_extra=RELOADABLE,
    )
    max_stream_requests: int = Field(
        default=128,
        ge=1,
        le=1 << 16,
        description="Most requests of one ModelStreamInfer stream at a time; the next is read when one of them has ended.",
    )
