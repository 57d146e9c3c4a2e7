# SPDX-License-Identifier: Apache-2.0
"""What a model's answer consists of, as a stream: reasoning, content and calls of tools."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str
    malformed: bool = False
    """Whether the model meant a call and did not write one: what it wrote is given as it is."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thinks with, without its markers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call of a tool begins."""

    index: int
    """Its position among the answer's calls, from 0."""
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; all pieces together are one JSON object, as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is complete."""

    index: int
    malformed: bool = False
    """Whether its arguments are not a JSON object: their text was given as it came."""


Event = Content | Reasoning | CallStarted | CallArguments | CallEnded
