# SPDX-License-Identifier: Apache-2.0
"""From events of answers to the objects of OpenAI's API for plain text: one object for all prompts of a request."""

from collections.abc import Iterable, Sequence

from twinpool.errors import TwinpoolError
from twinpool.router.openai.shapes import FINISH, Head, Json, usage
from twinpool.text import Tokenizer, UnknownTokenError
from twinpool.v1 import inference_pb2 as pb

Prompt = str | Sequence[int]


class _Tokens:
    """The tokens of one text, in their order: what each adds to it, and where."""

    def __init__(self, tokenizer: Tokenizer, begin: int = 0) -> None:
        """``begin``: characters of the whole text that come before them."""
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._at = begin

    def text(self, token_id: int) -> str:
        """A token by itself."""
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def offset(self, token_id: int) -> int:
        """Where the next token begins in the text; for one inside a character, where that does."""
        at = self._at
        self._at += len(self._push(token_id))
        return at

    def whole(self, token_ids: Iterable[int]) -> str:
        """The text of all of them."""
        return "".join([*map(self._push, token_ids), self._detokenizer.flush()])

    def _push(self, token_id: int) -> str:
        try:
            return self._detokenizer.push((token_id,))
        except UnknownTokenError:
            return ""


class TextShape:
    """The completions of several prompts. Choice ``c`` of prompt ``p`` has the index ``p * n + c``."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        n: int,
        tokenizer: Tokenizer,
        *,
        logprobs: bool,
        echo_only: bool = False,
        max_scored_tokens: int = 1 << 15,
    ) -> None:
        """``prompts``: what comes before the answers, as text or token ids; empty for who did not ask for it. ``logprobs``: whether
        each token has its log-probability, those of such prompts included. ``echo_only``: nothing comes behind them.
        ``max_scored_tokens``: most tokens of prompts with log-probabilities in an object that is not streamed, over all choices."""
        self._n = n
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._echo_only = echo_only
        self._max_scored_tokens = max_scored_tokens
        self._head = Head("", "text_completion", "")
        self._prompts = list(prompts)
        self._echoed = [""] * len(self._prompts)
        self._read: list[_Tokens] = [_Tokens(tokenizer) for _ in self._prompts]
        self._scores = [_no_logprobs() for _ in self._prompts]
        self._scored_tokens = 0
        count = len(self._prompts) * n
        self._texts = [""] * count
        self._written: list[_Tokens | None] = [None] * count
        self._positions = [_no_logprobs() for _ in range(count)]
        self._finish: list[str | None] = [None] * count
        self._usage = pb.Usage()

    def chunks(self, prompt: int, response: pb.GenerateResponse) -> list[Json]:
        """The chunks that tell of an event of one prompt's answer."""
        kind, indices = response.WhichOneof("event"), range(prompt * self._n, (prompt + 1) * self._n)
        if kind == "started":
            self._begin(prompt, response.started)
            # With log-probabilities it comes together with the first of them.
            text = "" if self._logprobs else self._echoed[prompt]
            return [self._chunk(index, text, None) for index in indices if text]
        if kind == "prompt_logprobs":
            part = response.prompt_logprobs
            text, scores = self._echoed[prompt] if part.offset == 1 else "", self._scores_of(prompt, part)
            return [self._chunk(index, text, scores) for index in indices]
        if kind == "finished":
            self._count(response.finished.usage)
            return [
                self._chunk(prompt * self._n + ended.index, "", None, self._reason(ended))
                for ended in response.finished.choices
            ]
        if self._echo_only:
            return []
        tokens = response.tokens
        index = prompt * self._n + tokens.index
        return [self._chunk(index, tokens.text, self._logprobs_of(index, tokens))]

    def usage_chunk(self) -> Json:
        """The chunk behind the last one, for who asked for it."""
        return self._head.object([], usage=usage(self._usage))

    def add(self, prompt: int, response: pb.GenerateResponse) -> None:
        """Gathers an event of one prompt's answer. Raises PROMPT_TOO_LONG if the prompts together are."""
        kind = response.WhichOneof("event")
        if kind == "started":
            self._begin(prompt, response.started)
            self._check_scored(prompt, response.started)
        elif kind == "prompt_logprobs":
            _append(self._scores[prompt], self._scores_of(prompt, response.prompt_logprobs))
        elif kind == "finished":
            self._count(response.finished.usage)
            for ended in response.finished.choices:
                self._finish[prompt * self._n + ended.index] = self._reason(ended)
        elif not self._echo_only:
            tokens = response.tokens
            index = prompt * self._n + tokens.index
            _append(self._positions[index], self._logprobs_of(index, tokens) or {})
            self._texts[index] += tokens.text

    def whole(self) -> Json:
        """The object, once the last event of every prompt was added."""
        choices = [
            {
                "index": index,
                "text": self._echoed[index // self._n] + text,
                "logprobs": self._merged(index) if self._logprobs else None,
                "finish_reason": self._finish[index],
            }
            for index, text in enumerate(self._texts)
        ]
        return self._head.object(choices, usage=usage(self._usage))

    # --- inside ---------------------------------------------------------------------------

    def _begin(self, prompt: int, started: pb.GenerateStarted) -> None:
        if not self._head.id:
            self._head = Head(f"cmpl-{started.request_id}", "text_completion", started.model)
        # Only now it is known to be a prompt that the model can have.
        given = self._prompts[prompt]
        text = given if isinstance(given, str) else _Tokens(self._tokenizer).whole(given)
        self._echoed[prompt] = text
        for index in range(prompt * self._n, (prompt + 1) * self._n):
            self._written[index] = _Tokens(self._tokenizer, len(text))

    def _check_scored(self, prompt: int, started: pb.GenerateStarted) -> None:
        if not self._logprobs or not self._prompts[prompt]:
            return
        self._scored_tokens += started.prompt_tokens * self._n
        if self._scored_tokens > self._max_scored_tokens:
            raise TwinpoolError(
                "PROMPT_TOO_LONG",
                f"prompt, echo and logprobs make {self._scored_tokens} tokens of prompts over all choices;"
                f" the limit is {self._max_scored_tokens}, of what is not streamed",
                field="prompt",
                metadata={"limit": self._max_scored_tokens},
            )

    def _count(self, found: pb.Usage) -> None:
        self._usage.prompt_tokens += found.prompt_tokens
        self._usage.completion_tokens += 0 if self._echo_only else found.completion_tokens
        self._usage.cached_tokens += max(found.cached_tokens, found.decode_cached_tokens)

    def _reason(self, ended: pb.ChoiceFinish) -> str | None:
        return "length" if self._echo_only else FINISH.get(ended.reason)

    def _chunk(self, index: int, text: str, logprobs: Json | None, finish: str | None = None) -> Json:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return self._head.object([choice])

    def _merged(self, index: int) -> Json:
        before, own = self._scores[index // self._n], self._positions[index]
        return {name: before[name] + own[name] for name in own}

    def _scores_of(self, prompt: int, part: pb.PromptLogprobs) -> Json:
        read, out = self._read[prompt], _no_logprobs()
        if part.HasField("first_token_id"):
            out["tokens"].append(read.text(part.first_token_id))
            out["token_logprobs"].append(None)
            out["top_logprobs"].append(None)
            out["text_offset"].append(read.offset(part.first_token_id))
        _fill(out, read, part.positions)
        return out

    def _logprobs_of(self, index: int, tokens: pb.GenerateTokens) -> Json | None:
        written = self._written[index]
        if not self._logprobs or written is None:
            return None
        out = _no_logprobs()
        _fill(out, written, tokens.logprobs)
        return out


def _fill(out: Json, tokens: _Tokens, positions: Iterable[pb.PositionLogprobs]) -> None:
    for position in positions:
        chosen = position.chosen
        out["tokens"].append(tokens.text(chosen.token_id))
        out["token_logprobs"].append(chosen.logprob)
        # Two tokens may have one text: the likelier one, which comes first, stands for it.
        found: dict[str, float] = {}
        for token in position.top:
            found.setdefault(tokens.text(token.token_id), token.logprob)
        out["top_logprobs"].append(found)
        out["text_offset"].append(tokens.offset(chosen.token_id))


def _append(positions: Json, more: Json) -> None:
    for name, values in more.items():
        positions[name] += values


def _no_logprobs() -> Json:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
