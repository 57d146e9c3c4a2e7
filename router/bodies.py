# SPDX-License-Identifier: Apache-2.0
"""Requests that come as names and values, by whichever protocol: pydantic models of what they may contain, and their faults as
errors of the table."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, ValidationError

from twinpool.errors import TwinpoolError
from twinpool.v1 import inference_pb2 as pb

Number = StrictFloat | StrictInt
Uint32 = Annotated[StrictInt, Field(ge=0, le=(1 << 32) - 1)]

# Violations that say no more than that a key is not known.
_UNKNOWN: Final = {"extra_forbidden", "none_required"}
_MAX_NAME_CHARS: Final = 64
"""Longest name of a caller that an error repeats."""
# Names of types stand for the alternatives of a field; those of models are capitalised.
_TYPES: Final = {"bool", "float", "int", "none", "str"}


class Body(BaseModel):
    """A JSON object without unknown keys."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Sampling(Body):
    """How to draw and when to stop, by the names that the field's servers use. ``None`` is as good as absent everywhere.

    What is below ``top_k`` is what OpenAI's own API does not have.
    """

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
        """Puts all of it but log-probabilities into ``request``."""
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_k", "min_p"):
            if (value := getattr(self, name)) is not None:
                setattr(request.sampling, name, value)
        if self.repetition_penalty is not None:
            request.sampling.repetition_penalty = self.repetition_penalty
        for token, bias in (self.logit_bias or {}).items():
            request.sampling.logit_bias.add(token_id=min(int(token), (1 << 32) - 1), bias=bias)
        if self.seed is not None:
            # Clients' APIs allow negative ones; which numbers a seed gives is ours to say.
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


def refusal(error: ValidationError, given: Mapping[str, str] | None = None) -> TwinpoolError:
    """The first fault of a body. Names the field; never quotes the value, which may be a prompt. ``given``: where each field of
    the body itself was given, if it was not in one."""
    # Of a field that may have several forms, pydantic lists what is wrong for each: the deepest fault is the likeliest meant. What
    # follows from an unknown kind of thing is less telling than the kind.
    faults = error.errors(include_url=False, include_input=False)
    fault = max(faults, key=lambda fault: (len(fault["loc"]), fault["type"] == "literal_error"))
    field = _path(fault["loc"], given or {})
    if fault["type"] in _UNKNOWN:
        return TwinpoolError("UNSUPPORTED_FIELD", f"{field} is not supported", field=field)
    return TwinpoolError("INVALID_ARGUMENT", f"{field}: {fault['msg']}", field=field)


def _path(location: tuple[int | str, ...], given: Mapping[str, str]) -> str:
    path = given.get(str(location[0]), "") if location else ""
    for part in location[1:] if path else location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif len(part) > _MAX_NAME_CHARS:
            path += f".{part[:_MAX_NAME_CHARS]}…"
        elif part.isidentifier() and not part[0].isupper() and part not in _TYPES:
            path += f".{part}" if path else part
    return path or "the body"


def parse_object(raw: bytes, field: str = "the body") -> dict[str, Any]:
    """The JSON object that ``field`` holds, in UTF-8. Raises INVALID_ARGUMENT, or INVALID_TEXT for half a character."""
    try:
        text = raw.decode("utf-8-sig")
        value = json.loads(text)
        if "\\u" in text:
            # An escape may name half of a surrogate pair, which is no text.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise TwinpoolError(
            "INVALID_TEXT", f"a string of {field} holds half of a surrogate pair", field=field
        ) from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise TwinpoolError("INVALID_ARGUMENT", f"{field} is not a JSON object", field=field)
    return value
