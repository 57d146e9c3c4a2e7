# SPDX-License-Identifier: Apache-2.0
"""What both kinds of completion requests may contain, as pydantic models. A field that is not here is refused by name."""

from typing import Any, Literal

from pydantic import StrictBool

from twinpool.router.bodies import Body, Sampling
from twinpool.v1 import inference_pb2 as pb


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


class Sampled(Ignored, Sampling):
    """What the requests for chats and for plain text share."""

    model: str = ""
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None

    def fill(self, request: pb.GenerateRequest) -> None:
        """Puts all of it but prompt and log-probabilities into ``request``."""
        super().fill(request)
        request.model = self.model

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
