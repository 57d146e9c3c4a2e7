# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/completions``: the request."""

from collections.abc import Sequence

from pydantic import StrictBool, StrictInt

from twinpool.errors import TwinpoolError
from twinpool.router.bodies import Uint32
from twinpool.router.openai.fields import Sampled
from twinpool.v1 import inference_pb2 as pb

MAX_PROMPTS = 128
"""Prompts of one request; each of them is a request of its own to the cluster."""


class Completion(Sampled):
    """The body of the request."""

    prompt: str | list[StrictInt] | list[str] | list[list[StrictInt]]
    logprobs: Uint32 | None = None
    echo: StrictBool | None = None
    best_of: Uint32 | None = None
    suffix: None = None

    @property
    def echo_only(self) -> bool:
        """Whether nothing but the prompt is to come back."""
        return bool(self.echo) and self.max_tokens == 0

    def requests(self) -> list[pb.GenerateRequest]:
        """One request a prompt. Raises for what is not supported."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise TwinpoolError(
                "UNSUPPORTED_FIELD", "best_of is not supported; n returns every choice", field="best_of"
            )
        prompts = self._prompts()
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise TwinpoolError(
                "EMPTY_PROMPT" if not prompts else "UNSUPPORTED_FIELD",
                f"prompt holds {len(prompts)} prompts; the limit is 1 to {MAX_PROMPTS}",
                field="prompt",
            )
        if len(prompts) > 1 and self.request_id:
            raise TwinpoolError(
                "INVALID_REQUEST_ID", "request_id names one request; prompt holds several", field="request_id"
            )
        return [self._request(prompt) for prompt in prompts]

    def _prompts(self) -> Sequence[str | Sequence[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        return [part for part in prompt if not isinstance(part, int)]

    def _request(self, prompt: str | Sequence[int]) -> pb.GenerateRequest:
        request = pb.GenerateRequest()
        self.fill(request)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.SetInParent()
            if any(not 0 <= token < 1 << 32 for token in prompt):
                raise TwinpoolError(
                    "TOKEN_OUT_OF_VOCABULARY", "prompt holds an id that no vocabulary has", field="prompt"
                )
            request.token_ids.ids.extend(prompt)
        if self.logprobs is not None:
            request.logprobs = self.logprobs
            if self.echo:
                request.prompt_logprobs = self.logprobs
        if self.echo_only:
            # A token is drawn all the same, as the computing of a prompt ends with one.
            request.stop.max_tokens = 1
        return request
