# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back: tokenizer, chat template, detokenizer, stop strings."""

from twinpool.text.chat_style import ChatStyle
from twinpool.text.detokenizer import Detokenizer
from twinpool.text.errors import ChatTemplateError, TextError, TokenizerLoadError, UnknownTokenError
from twinpool.text.stop_strings import StopStringHit, StopStringMatcher
from twinpool.text.stream import TextDelta, TextStream
from twinpool.text.token_cache import TokenCache
from twinpool.text.tokenizer import Tokenizer

__all__ = [
    "ChatStyle",
    "ChatTemplateError",
    "Detokenizer",
    "StopStringHit",
    "StopStringMatcher",
    "TextDelta",
    "TextError",
    "TextStream",
    "TokenCache",
    "Tokenizer",
    "TokenizerLoadError",
    "UnknownTokenError",
]
