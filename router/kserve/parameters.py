# SPDX-License-Identifier: Apache-2.0
"""What a request may say besides its prompt, by the names that servers of this protocol know.

Each may come as a parameter of the request, as an input tensor, or in the JSON object of the input ``sampling_parameters``.
"""

import json
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictBool, StrictInt

from twinpool.router.bodies import Sampling, Uint32
from twinpool.router.kserve.tensors import InputSpec
from twinpool.v1 import inference_pb2 as pb

PRIORITY_DEFAULT: Final = 101
"""What the protocol's priority is taken for where it is 0. It counts the other way round than ours: 1 goes first."""
_PRIORITY_LAST: Final = 201


class Parameters(Sampling):
    """All of it. ``None`` is as good as absent everywhere."""

    top_k: Annotated[StrictInt, Field(ge=-1, le=(1 << 32) - 1)] | None = None
    """-1 keeps all tokens, as 0 does."""
    logprobs: Uint32 | None = None
    beam_width: Literal[1] | None = None
    """Answers are drawn, not searched for: 1 is what there is."""

    priority: Annotated[StrictInt, Field(ge=0, le=_PRIORITY_LAST)] | None = None
    """As the protocol has it: 1 goes first, 0 is the default."""
    timeout: Annotated[StrictInt, Field(ge=0, lt=1 << 63)] | None = None
    """Microseconds; 0: none."""
    tenant: str | None = None
    adapter: str | None = None
    idempotency_key: str | None = None
    repeated: StrictBool | None = None

    stream: StrictBool | None = None
    exclude_input_in_output: StrictBool | None = None
    return_finish_reason: StrictBool | None = None
    return_num_input_tokens: StrictBool | None = None
    return_num_output_tokens: StrictBool | None = None
    return_cumulative_logprob: StrictBool | None = None
    return_logprobs: StrictBool | None = None
    triton_enable_empty_final_response: StrictBool | None = None
    """A stream's last response is sent in any case."""

    def fill(self, request: pb.GenerateRequest) -> None:
        """Puts all that Generate knows into ``request``."""
        own = self.model_copy(update={"top_k": 0}) if self.top_k == -1 else self
        Sampling.fill(own, request)
        request.priority = PRIORITY_DEFAULT - self.priority if self.priority else 0
        request.tenant = self.tenant or ""
        request.adapter = self.adapter or ""
        request.idempotency_key = self.idempotency_key or ""
        request.repeated = self.repeated or False
        if self.logprobs is not None:
            request.logprobs = self.logprobs
        elif self.return_logprobs or self.return_cumulative_logprob:
            request.logprobs = 0


ALIASES: Final = {"streaming": "stream", "stop_words": "stop", "random_seed": "seed"}
"""Other names by which servers know some of them."""

_TEXTS: Final = frozenset({"stop", "request_id", "tenant", "adapter", "idempotency_key"})
"""Where a text is what is meant, and not a number in its digits."""

_INTEGER: Final = ("INT32", "INT64", "UINT32", "UINT64")
_REAL: Final = ("FP32", "FP64")

INPUTS: Final[dict[str, InputSpec]] = {
    "text_input": InputSpec(("BYTES",)),
    "input_ids": InputSpec(("INT64", "INT32"), many=True),
    "sampling_parameters": InputSpec(("BYTES",)),
    **dict.fromkeys(
        ("max_tokens", "min_tokens", "top_k", "seed", "random_seed", "n", "logprobs", "beam_width"),
        InputSpec(_INTEGER),
    ),
    **dict.fromkeys(
        (
            "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        ),
        InputSpec(_REAL),
    ),
    **dict.fromkeys(
        (
            "stream", "streaming", "ignore_eos", "include_stop_str_in_output", "exclude_input_in_output",
            "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens",
            "return_cumulative_logprob", "return_logprobs",
        ),
        InputSpec(("BOOL",)),
    ),
    "stop": InputSpec(("BYTES",), many=True),
    "stop_words": InputSpec(("BYTES",), many=True),
    "stop_token_ids": InputSpec(_INTEGER, many=True),
}  # fmt: skip
"""Every input. The first three make the prompt and the JSON object; all others are parameters."""


def meant(name: str, value: Any) -> Any:
    """A value as its parameter takes it: clients of this protocol write numbers, lists and yes or no as text, too."""
    if not isinstance(value, str) or name in _TEXTS:
        return value
    try:
        return json.loads(value.lower() if value in ("True", "False") else value)
    except (ValueError, RecursionError):
        # Not what the parameter takes, as whoever checks it will say.
        return value
