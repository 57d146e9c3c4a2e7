# SPDX-License-Identifier: Apache-2.0
"""From events of answers to the objects of OpenAI's API for plain text: one object for all prompts of a request."""

from collections.abc import Iterable, Sequence

from twinpool.router.openai.shapes import FINISH, Head, Json, TokenBytes, usage
from twinpool.v1 import inference_pb2 as pb


class TextShape:
    """The completions of several prompts. Choice ``c`` of prompt ``p`` has the index ``p * n + c``."""

    def __init__(self, prompts: Sequence[str], n: int, token_bytes: TokenBytes, *, logprobs: bool) -> None:
        """``prompts``: the texts that come before the answers; empty ones for who did not ask for them."""
        self._n = n
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._head = Head("", "text_completion", "")
        self._texts = [prompt for prompt in prompts for _ in range(n)]
        self._offsets = [len(text) for text in self._texts]
        self._positions = [_no_logprobs() for _ in self._texts]
        self._finish: list[str | None] = [None] * len(self._texts)
        self._usage = pb.Usage()

    def chunks(self, prompt: int, response: pb.GenerateResponse) -> list[Json]:
        """The chunks that tell of an event of one prompt's answer."""
        kind = response.WhichOneof("event")
        if kind == "started":
            self._begin(response.started)
            indices = range(prompt * self._n, (prompt + 1) * self._n)
            return [self._chunk(index, self._texts[index], None) for index in indices if self._texts[index]]
        if kind == "finished":
            self._count(response.finished.usage)
            return [
                self._chunk(prompt * self._n + ended.index, "", None, FINISH.get(ended.reason))
                for ended in response.finished.choices
            ]
        tokens = response.tokens
        index = prompt * self._n + tokens.index
        return [self._chunk(index, tokens.text, self._logprobs_of(index, tokens))]

    def usage_chunk(self) -> Json:
        """The chunk behind the last one, for who asked for it."""
        return self._head.object([], usage=usage(self._usage))

    def add(self, prompt: int, response: pb.GenerateResponse) -> None:
        """Gathers an event of one prompt's answer."""
        kind = response.WhichOneof("event")
        if kind == "started":
            self._begin(response.started)
        elif kind == "finished":
            self._count(response.finished.usage)
            for ended in response.finished.choices:
                self._finish[prompt * self._n + ended.index] = FINISH.get(ended.reason)
        else:
            tokens = response.tokens
            index = prompt * self._n + tokens.index
            for name, values in (self._logprobs_of(index, tokens) or {}).items():
                self._positions[index][name] += values
            self._texts[index] += tokens.text

    def whole(self) -> Json:
        """The object, once the last event of every prompt was added."""
        choices = [
            {
                "index": index,
                "text": text,
                "logprobs": self._positions[index] if self._logprobs else None,
                "finish_reason": self._finish[index],
            }
            for index, text in enumerate(self._texts)
        ]
        return self._head.object(choices, usage=usage(self._usage))

    # --- inside ---------------------------------------------------------------------------

    def _begin(self, started: pb.GenerateStarted) -> None:
        if not self._head.id:
            self._head = Head(f"cmpl-{started.request_id}", "text_completion", started.model)

    def _count(self, found: pb.Usage) -> None:
        self._usage.prompt_tokens += found.prompt_tokens
        self._usage.completion_tokens += found.completion_tokens
        self._usage.cached_tokens += max(found.cached_tokens, found.decode_cached_tokens)

    def _chunk(self, index: int, text: str, logprobs: Json | None, finish: str | None = None) -> Json:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return self._head.object([choice])

    def _logprobs_of(self, index: int, tokens: pb.GenerateTokens) -> Json | None:
        if not self._logprobs:
            return None
        out = _no_logprobs()
        for position in tokens.logprobs:
            text = self._text(position.chosen)
            out["tokens"].append(text)
            out["token_logprobs"].append(position.chosen.logprob)
            out["top_logprobs"].append(self._top(position.top))
            out["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(text)
        return out

    def _top(self, tokens: Iterable[pb.TokenLogprob]) -> dict[str, float]:
        # Two tokens may have one text: the likelier one, which comes first, stands for it.
        found: dict[str, float] = {}
        for token in tokens:
            found.setdefault(self._text(token), token.logprob)
        return found

    def _text(self, token: pb.TokenLogprob) -> str:
        return self._token_bytes(token.token_id).decode(errors="replace")


def _no_logprobs() -> Json:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
