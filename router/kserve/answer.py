# SPDX-License-Identifier: Apache-2.0
"""From events of an answer to responses of the protocol: one for all of it, or one a delta."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from twinpool.router.kserve.tensors import Output, write
from twinpool.text import Tokenizer
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1.kserve import open_inference_pb2 as kserve

FINAL: Final = "triton_final_response"
"""The parameter of a stream's responses that says whether its request has ended."""
OUTPUTS: Final = {
    "text_output": ("BYTES", (-1,)),
    "output_ids": ("INT64", (-1, -1)),
    "finish_reason": ("BYTES", (-1,)),
    "num_input_tokens": ("UINT32", (1,)),
    "num_output_tokens": ("UINT32", (-1,)),
    "cumulative_logprob": ("FP32", (-1,)),
    "logprobs": ("BYTES", (-1,)),
}
"""Every output with its datatype and its shape; -1 is the number of choices, and of ``output_ids`` the most tokens of one."""
ALL_OUTPUTS: Final = tuple(OUTPUTS)
OPTIONAL_OUTPUTS: Final = {
    "finish_reason": "return_finish_reason",
    "num_input_tokens": "return_num_input_tokens",
    "num_output_tokens": "return_num_output_tokens",
    "cumulative_logprob": "return_cumulative_logprob",
    "logprobs": "return_logprobs",
}
"""Outputs that a request may leave out by a parameter."""
LOGPROB_OUTPUTS: Final = frozenset({"cumulative_logprob", "logprobs"})

PADDING: Final = -1
"""Fills the rows of ``output_ids`` up to the longest one."""
_FINISH: Final = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}

"""The bytes that a token adds to the text."""


class Wanted(Protocol):
    """How the answer of a request is to look."""

    @property
    def request(self) -> pb.GenerateRequest: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def raw(self) -> bool: ...
    @property
    def id(self) -> str: ...
    @property
    def echo(self) -> str: ...


@dataclass(slots=True)
class _Choice:
    """What a response holds of one choice."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: list[pb.PositionLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    """From the beginning of the answer."""

    def clear(self) -> None:
        self.finish_reason = ""
        self.texts.clear()
        self.token_ids.clear()
        self.logprobs.clear()


class Answer:
    """The answer to one request. Either ``whole`` is called at its end, or ``piece`` after each event."""

    def __init__(self, wanted: Wanted, tokenizer: Callable[[str], Tokenizer]) -> None:
        """``tokenizer``: of a model, looked up once it answers."""
        self._wanted = wanted
        self._tokenizer = tokenizer
        self._choices = [_Choice([wanted.echo]) for _ in range(wanted.request.n)]
        self._started = pb.GenerateStarted()
        self._usage = pb.Usage()

    def add(self, event: pb.GenerateResponse) -> None:
        """Takes the next event."""
        kind = event.WhichOneof("event")
        if kind == "started":
            self._started = event.started
        elif kind == "finished":
            self._usage = event.finished.usage
            for ended in event.finished.choices:
                self._choices[ended.index].finish_reason = _FINISH.get(ended.reason, "")
        else:
            choice = self._choices[event.tokens.index]
            choice.texts.append(event.tokens.text)
            choice.token_ids += event.tokens.token_ids
            choice.logprobs += event.tokens.logprobs
            choice.cumulative_logprob += sum(position.chosen.logprob for position in event.tokens.logprobs)

    def whole(self) -> kserve.ModelInferResponse:
        """The response, once the last event was added."""
        response = self._response()
        self._count(response)
        return response

    def piece(self, event: pb.GenerateResponse) -> kserve.ModelInferResponse | None:
        """The response that tells of an event, if one does. The last one has counts and nothing new of the text."""
        kind = event.WhichOneof("event")
        self.add(event)
        if kind == "started":
            return None
        response = self._response()
        response.parameters[FINAL].bool_param = kind == "finished"
        if kind == "finished":
            self._count(response)
        for choice in self._choices:
            choice.clear()
        return response

    # --- inside ---------------------------------------------------------------------------

    def _response(self) -> kserve.ModelInferResponse:
        response = kserve.ModelInferResponse(
            model_name=self._started.model, model_version="1", id=self._wanted.id
        )
        write(response, [self._output(name) for name in self._wanted.outputs], self._wanted.raw)
        return response

    def _count(self, response: kserve.ModelInferResponse) -> None:
        usage, parameters = self._usage, response.parameters
        parameters["request_id"].string_param = self._started.request_id
        parameters["prompt_tokens"].int64_param = usage.prompt_tokens
        parameters["completion_tokens"].int64_param = usage.completion_tokens
        parameters["cached_tokens"].int64_param = max(usage.cached_tokens, usage.decode_cached_tokens)

    def _output(self, name: str) -> Output:
        choices = self._choices
        datatype, shape = OUTPUTS[name]
        if name == "output_ids":
            width = max(len(choice.token_ids) for choice in choices)
            rows = [choice.token_ids + [PADDING] * (width - len(choice.token_ids)) for choice in choices]
            return Output(name, datatype, (len(choices), width), [token for row in rows for token in row])
        if name == "num_input_tokens":
            return Output(name, datatype, shape, [self._started.prompt_tokens])
        return Output(name, datatype, (len(choices),), list(self._column(name)))

    def _column(self, name: str) -> Iterable[Any]:
        """An output that has an element a choice."""
        for choice in self._choices:
            if name == "text_output":
                yield "".join(choice.texts).encode()
            elif name == "finish_reason":
                yield choice.finish_reason.encode()
            elif name == "num_output_tokens":
                yield len(choice.token_ids)
            elif name == "cumulative_logprob":
                yield choice.cumulative_logprob
            else:
                yield json.dumps([self._position(position) for position in choice.logprobs]).encode()

    def _position(self, position: pb.PositionLogprobs) -> dict[str, Any]:
        """The drawn token and the likeliest ones, by id."""
        token_bytes = self._tokenizer(self._started.model).token_bytes
        return {
            str(token.token_id): {
                "logprob": token.logprob,
                "decoded_token": token_bytes(token.token_id).decode(errors="replace"),
            }
            for token in (position.chosen, *position.top)
        }
