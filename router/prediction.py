# SPDX-License-Identifier: Apache-2.0
"""What was known of a prompt in the workers' caches when it was placed."""

from dataclasses import dataclass


@dataclass(slots=True)
class Prediction:
    """In tokens of the prompt that can be found in a cache: never the last token, which is always computed.

    ``best``: on the worker, of any role, that held most; ``selected``: what the chosen prefill worker was expected to find,
    a fetch included; ``actual``: what it found; None: it has not said.
    """

    query: int
    best: int
    selected: int
    actual: int | None = None
