# SPDX-License-Identifier: Apache-2.0
"""Which pool a request goes to: by its model, then by the length of its prompt, then by its priority.

Of the pools that take a request the one with the narrowest class of lengths answers, of those the one with the narrowest range of
priorities. A request whose own pools have no pair of workers that is ready goes to a pool that takes what overflows, if there is
one; without one it waits in the queue of its own. Queues, KV and fairness are each pool's own, so no pool holds up another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from twinpool.config import PoolKeys, TwinpoolConfig, pool_config, pool_keys, served_name, served_pools


@dataclass(frozen=True, slots=True)
class Takes:
    """Which requests of its model a pool takes: closed ranges of prompt tokens and of priorities. ``overflow``: also those whose
    own pools are not ready."""

    prompt_tokens: tuple[int, int]
    priorities: tuple[int, int]
    overflow: bool = False

    @classmethod
    def of(cls, keys: PoolKeys) -> Takes:
        """What is configured."""
        return cls(
            (keys.prompt_tokens_least, keys.prompt_tokens_most),
            (keys.priority_least, keys.priority_most),
            keys.overflow,
        )

    def suits(self, prompt_tokens: int, priority: int) -> bool:
        """Whether a request is of its class."""
        return (
            self.prompt_tokens[0] <= prompt_tokens <= self.prompt_tokens[1]
            and self.priorities[0] <= priority <= self.priorities[1]
        )

    @property
    def width(self) -> tuple[int, int]:
        """The narrower, the more is the pool meant for the requests that it takes."""
        lengths, priorities = self.prompt_tokens, self.priorities
        return lengths[1] - lengths[0], priorities[1] - priorities[0]

    def __str__(self) -> str:
        parts = []
        if self.prompt_tokens != EVERYTHING.prompt_tokens:
            parts.append(f"prompts of {self.prompt_tokens[0]} to {self.prompt_tokens[1]} tokens")
        if self.priorities != EVERYTHING.priorities:
            parts.append(f"priorities {self.priorities[0]} to {self.priorities[1]}")
        return ", ".join(parts) or "all requests"


EVERYTHING: Final = Takes.of(PoolKeys())
"""What a pool takes of which nothing is configured."""


@dataclass(frozen=True, slots=True)
class PoolRule:
    """What a router is told of a pool. ``model``: how clients call its model; "": its workers say it. ``model_path``: where a
    tokenizer is that the router can read."""

    takes: Takes = EVERYTHING
    model: str = ""
    model_path: str = ""


def rules_of(config: TwinpoolConfig) -> dict[str, PoolRule]:
    """By name, the pools that a router serves."""
    rules = {}
    for pool in served_pools(config):
        keys = pool_keys(config, pool)
        if keys is None:
            # It is configured elsewhere; its model may well be the shared one.
            rules[pool] = PoolRule(model_path=config.model.path)
            continue
        own = pool_config(config, pool)
        rules[pool] = PoolRule(Takes.of(keys), served_name(own), own.model.path)
    return rules


@dataclass(frozen=True, slots=True)
class Offer:
    """A group of workers that may serve a request. ``ready``: whether it has a pair of workers that takes work."""

    pool: str
    takes: Takes
    ready: bool
    workers: int


def choose(offers: Sequence[Offer], prompt_tokens: int, priority: int) -> tuple[int, str] | None:
    """The index of the offer that a request goes to, and why, for people; None: there is none that takes it."""
    suited = [at for at, offer in enumerate(offers) if offer.takes.suits(prompt_tokens, priority)]

    def best(among: Sequence[int]) -> int:
        return min(among, key=lambda at: (offers[at].takes.width, -offers[at].workers, offers[at].pool))

    ready = [at for at in suited if offers[at].ready]
    if ready:
        at = best(ready)
        return at, f"takes {offers[at].takes}"
    spare = [at for at, offer in enumerate(offers) if offer.ready and offer.takes.overflow]
    if spare:
        at = best(spare)
        own = ", ".join(sorted({offers[one].pool for one in suited}))
        return at, f"takes what overflows: {f'{own} is not ready' if own else 'its own pool has no workers'}"
    if suited:
        at = best(suited)
        return at, f"takes {offers[at].takes}; it is not ready"
    return None
