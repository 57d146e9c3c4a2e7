# SPDX-License-Identifier: Apache-2.0
"""A request of the protocol as one of Generate. All of it is understood, or it is refused by name."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from twinpool.errors import TwinpoolError
from twinpool.router.bodies import parse_object, refusal
from twinpool.router.kserve.answer import ALL_OUTPUTS, LOGPROB_OUTPUTS, OPTIONAL_OUTPUTS
from twinpool.router.kserve.parameters import ALIASES, INPUTS, Parameters, meant
from twinpool.router.kserve.tensors import elements, path, text_of
from twinpool.router.utf8 import refuse_unknown_fields
from twinpool.router.validate import shown
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1.kserve import open_inference_pb2 as kserve

MAX_ID_CHARS: Final = 128
"""Longest id, which comes back with each response."""
VERSION: Final = "1"
"""The one version of every model."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of Generate, and how the answer is to look."""

    request: pb.GenerateRequest
    outputs: tuple[str, ...]
    raw: bool
    stream: bool
    timeout_seconds: float | None
    id: str
    echo: str = ""
    """What comes before the text of an answer."""


def is_version(version: str) -> bool:
    """Whether a model has this version."""
    return version in ("", VERSION)


def check_version(version: str, field: str) -> None:
    """Raises MODEL_NOT_FOUND for a version that no model has."""
    if not is_version(version):
        raise TwinpoolError(
            "MODEL_NOT_FOUND", f"{field} is {shown(version)}; the limit is {VERSION!r} or none", field=field
        )


def read_request(request: kserve.ModelInferRequest) -> Asked:
    """Raises TwinpoolError for the first thing that cannot be served as it was meant."""
    refuse_unknown_fields(request)
    check_version(request.model_version, "model_version")
    if len(request.id) > MAX_ID_CHARS:
        raise TwinpoolError(
            "INVALID_REQUEST_ID",
            f"id has {len(request.id)} characters; the limit is {MAX_ID_CHARS}",
            field="id",
        )
    given = _Given()
    for name, parameter in request.parameters.items():
        given.add("parameters", name, _value(name, parameter))
    prompt: dict[str, Any] = {}
    for name, values in _inputs(request):
        if name == "text_input":
            prompt["text"] = text_of(values[0], path("inputs", name))
        elif name == "input_ids":
            prompt["token_ids"] = values
        elif name == "sampling_parameters":
            for key, value in parse_object(values[0], path("inputs", name)).items():
                given.add(path("inputs", name), key, value)
        else:
            given.add("inputs", name, _scalar(name, values))
    parameters = given.checked()
    made = pb.GenerateRequest(model=request.model_name)
    parameters.fill(made)
    _put_prompt(made, prompt)
    outputs = _outputs(request, parameters, made)
    return Asked(
        made,
        outputs,
        bool(request.raw_input_contents),
        parameters.stream or False,
        parameters.timeout / 1e6 if parameters.timeout else None,
        request.id,
        _echo(parameters, made),
    )


class _Given:
    """Parameters by name, with where each was given."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._where: dict[str, str] = {}

    def add(self, kind: str, name: str, value: Any) -> None:
        """Takes one. A client may say the same in two places, but not two things."""
        field, known = path(kind, name), ALIASES.get(name, name)
        value = meant(known, value)
        if known in self._values and self._values[known] != value:
            raise TwinpoolError(
                "INVALID_ARGUMENT",
                f"{field} differs from {self._where[known]}; the limit is one value",
                field=field,
            )
        self._values[known], self._where[known] = value, field

    def checked(self) -> Parameters:
        """All of them. Raises UNSUPPORTED_FIELD for an unknown one, INVALID_ARGUMENT for one of a wrong kind."""
        try:
            return Parameters.model_validate(self._values)
        except ValidationError as error:
            raise refusal(error, self._where) from None


def _value(name: str, parameter: kserve.InferParameter) -> Any:
    field = path("parameters", name)
    refuse_unknown_fields(parameter, field)
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise TwinpoolError("INVALID_ARGUMENT", f"{field} has no value; the limit is one", field=field)
    return getattr(parameter, kind)


def _inputs(request: kserve.ModelInferRequest) -> Iterator[tuple[str, list[Any]]]:
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise TwinpoolError(
            "INVALID_ARGUMENT",
            f"raw_input_contents has {len(raw)} entries; the limit is one for each of {len(request.inputs)} inputs",
            field="raw_input_contents",
        )
    seen: set[str] = set()
    for at, tensor in enumerate(request.inputs):
        field, spec = path("inputs", tensor.name), INPUTS.get(tensor.name)
        if spec is None:
            raise TwinpoolError("UNSUPPORTED_FIELD", f"{field} is not supported", field=field)
        if tensor.name in seen:
            raise TwinpoolError("INVALID_ARGUMENT", f"{field} is given twice; the limit is once", field=field)
        seen.add(tensor.name)
        yield tensor.name, elements(tensor, raw[at] if raw else None, spec)


def _scalar(name: str, values: list[Any]) -> Any:
    """The value of a parameter that came as a tensor."""
    if INPUTS[name].datatypes == ("BYTES",):
        values = [text_of(value, path("inputs", name)) for value in values]
    return values if INPUTS[name].many else values[0]


def _put_prompt(made: pb.GenerateRequest, prompt: dict[str, Any]) -> None:
    if len(prompt) != 1:
        found = "both" if prompt else "none"
        raise TwinpoolError(
            "INVALID_ARGUMENT" if prompt else "EMPTY_PROMPT",
            f"inputs has {found} of text_input and input_ids; the limit is one of them",
            field="inputs",
        )
    if "text" in prompt:
        made.text = prompt["text"]
        return
    tokens: list[int] = prompt["token_ids"]
    made.token_ids.SetInParent()
    # There may be a million of them: which one is at fault is looked for only if one is.
    if tokens and not (min(tokens) >= 0 and max(tokens) < 1 << 32):
        at = next(at for at, token in enumerate(tokens) if not 0 <= token < 1 << 32)
        field = f"inputs.input_ids[{at}]"
        raise TwinpoolError(
            "TOKEN_OUT_OF_VOCABULARY", f"{field} is {tokens[at]}; no vocabulary has this id", field=field
        )
    made.token_ids.ids.extend(tokens)


def _outputs(
    request: kserve.ModelInferRequest, parameters: Parameters, made: pb.GenerateRequest
) -> tuple[str, ...]:
    """Which outputs are to be sent. One that needs log-probabilities asks for them."""
    if not request.outputs:
        left_out = {output for output, flag in OPTIONAL_OUTPUTS.items() if getattr(parameters, flag) is False}
        if not made.HasField("logprobs"):
            left_out |= LOGPROB_OUTPUTS
        return tuple(output for output in ALL_OUTPUTS if output not in left_out)
    names: list[str] = []
    for output in request.outputs:
        field = path("outputs", output.name)
        refuse_unknown_fields(output, field)
        if output.name not in ALL_OUTPUTS:
            raise TwinpoolError("UNSUPPORTED_FIELD", f"{field} is not supported", field=field)
        if output.name in names:
            raise TwinpoolError("INVALID_ARGUMENT", f"{field} is named twice; the limit is once", field=field)
        for name in output.parameters:
            own = path(f"{field}.parameters", name)
            raise TwinpoolError("UNSUPPORTED_FIELD", f"{own} is not supported", field=own)
        names.append(output.name)
    if not LOGPROB_OUTPUTS.isdisjoint(names) and not made.HasField("logprobs"):
        made.logprobs = 0
    return tuple(names)


def _echo(parameters: Parameters, made: pb.GenerateRequest) -> str:
    if parameters.exclude_input_in_output is not False:
        return ""
    if parameters.stream or made.WhichOneof("prompt") != "text":
        raise TwinpoolError(
            "UNSUPPORTED_FIELD",
            "exclude_input_in_output is false; the limit is a whole answer to text_input",
            field="exclude_input_in_output",
        )
    return made.text
