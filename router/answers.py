# SPDX-License-Identifier: Apache-2.0
"""Makes the answer of a request, with its text side."""

from collections.abc import Callable

from twinpool.config import RouterSection
from twinpool.router.models import ModelTable
from twinpool.router.request import Prepared
from twinpool.router.stream import Answer, AnswerSpec
from twinpool.text import TextStream


class AnswerMaker:
    """One a router."""

    def __init__(self, models: ModelTable, limits: RouterSection) -> None:
        self._models = models
        self._limits = limits

    def text(self, prepared: Prepared) -> Callable[[], TextStream]:
        """Makes the text side of a choice."""
        tokenizer = self._models.tokenizer(prepared.group)
        return lambda: TextStream(
            tokenizer.detokenizer(keep=prepared.kept_tokens),
            prepared.stop_strings,
            min_tokens=prepared.min_tokens,
            include_stop=prepared.include_stop,
        )

    def make(self, prepared: Prepared) -> Answer:
        """An answer of which nothing was drawn."""
        spec = AnswerSpec(
            n=prepared.n,
            logprobs=prepared.logprobs is not None,
            max_buffered_tokens=self._limits.max_buffered_tokens,
        )
        return Answer(spec, self.text(prepared))
