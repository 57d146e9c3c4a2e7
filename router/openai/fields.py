# SPDX-License-Identifier: Apache-2.0
"""What both kinds of completion requests may contain, as pydantic models. A field that is not here is refused by name."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt

from twinpool.v1 import inference_pb2 as pb

Number = StrictFloat | StrictInt
Uint32 = Annotated[StrictInt, Field(ge=0, le=(1 << 32) - 1)]


class Body(BaseModel):
    """A JSON object without unknown keys."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Ignored(Body):
    """What changes nothing in an answer and is taken and ignored."""

    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class StreamOptions(Body):
    """How an answer is streamed."""

    include_usage: StrictBool = False
    include_obfuscation: StrictBool | None = None
    """Padding against guesses by length; none is added."""


class Sampled(Ignored):
    """What the requests for chats and for plain text share. ``None`` is as good as absent everywhere.

    What is below ``top_k`` is what OpenAI's own API does not have.
    """

    model: str = ""
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Uint32 | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    seed: StrictInt | None = None
    stop: str | list[str] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=(1 << 32) - 1)] | None = None

    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Number] | None = None

    top_k: Uint32 | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Uint32 | None = None
    stop_token_ids: list[Uint32] | None = None
    ignore_eos: StrictBool | None = None
    include_stop_str_in_output: StrictBool | None = None
    priority: Annotated[StrictInt, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    preemptible: StrictBool | None = None
    request_id: str | None = None

    def fill(self, request: pb.GenerateRequest) -> None:
        """Puts all of it but prompt and log-probabilities into ``request``."""
        request.model = self.model
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_k", "min_p"):
            if (value := getattr(self, name)) is not None:
                setattr(request.sampling, name, value)
        if self.repetition_penalty is not None:
            request.sampling.repetition_penalty = self.repetition_penalty
        for token, bias in (self.logit_bias or {}).items():
            request.sampling.logit_bias.add(token_id=min(int(token), (1 << 32) - 1), bias=bias)
        if self.seed is not None:
            # The API allows negative ones; which numbers a seed gives is ours to say.
            request.sampling.seed = self.seed % (1 << 64)
        if self.max_tokens is not None:
            request.stop.max_tokens = self.max_tokens
        request.stop.min_tokens = self.min_tokens or 0
        request.stop.stop_strings.extend([self.stop] if isinstance(self.stop, str) else self.stop or ())
        request.stop.stop_token_ids.extend(self.stop_token_ids or ())
        request.stop.ignore_eos = self.ignore_eos or False
        request.stop.include_stop = self.include_stop_str_in_output or False
        request.n = 1 if self.n is None else self.n
        request.priority = self.priority or 0
        if self.preemptible is not None:
            request.preemptible = self.preemptible
        request.request_id = self.request_id or ""

    @property
    def wants_usage(self) -> bool:
        """Whether the last chunk of a stream is to hold the counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class Function(Body):
    """What a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None
    """Whether arguments must follow the schema."""


class Tool(Body):
    """A tool; only functions are known."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """A tool by its name."""

    type: Literal["function"]
    function: NamedFunction
