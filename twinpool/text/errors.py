# SPDX-License-Identifier: Apache-2.0
"""What can go wrong between text and tokens."""


class TextError(Exception):
    """Base of all errors of this package."""


class TokenizerLoadError(TextError):
    """A checkpoint's tokenizer files are missing, broken or of an unsupported kind. Names the file."""


class ChatTemplateError(TextError):
    """The model has no chat template, or its template refused these messages."""


class UnknownTokenError(TextError):
    """A token id that the tokenizer does not know: wrong tokenizer files, or a broken worker."""

    def __init__(self, token_id: int, vocab_size: int) -> None:
        super().__init__(f"token id {token_id} is not in the tokenizer's vocabulary of {vocab_size}")
        self.token_id = token_id
        self.vocab_size = vocab_size
