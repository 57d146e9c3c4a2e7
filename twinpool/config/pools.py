# SPDX-License-Identifier: Apache-2.0
"""The control process and the pools that it runs through Ray."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode

from twinpool.config.base import Name, Section, Texts, split_list

WORKERS_MAX: Final = 4096
"""Most workers of one role in a pool."""

RESOURCES_MAX: Final = 16
"""Most kinds of resources that a worker may need."""

POOLS_MAX: Final = 64
"""Most further pools."""

PROMPT_TOKENS_MAX: Final = 1 << 26
"""No prompt is longer; see router.max_prompt_tokens."""

PRIORITY_MAX: Final = 100
"""Priorities of requests are within minus and plus so much."""

Keys = dict[str, Any]


def _resources(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(value) > RESOURCES_MAX:
        raise ValueError(f"names {len(value)} resources; at most {RESOURCES_MAX}")
    names = []
    for part in value:
        name, equals, amount = part.partition("=")
        try:
            good = bool(name.strip() and equals) and 0 <= float(amount) < math.inf
        except ValueError:
            good = False
        if not good:
            raise ValueError(f"{part!r} is not NAME=AMOUNT, for instance CPU=1 or GPU=0.5")
        names.append(name.strip())
    if len(set(names)) < len(names):
        raise ValueError("names a resource twice")
    return value


Resources = Annotated[
    tuple[str, ...], BeforeValidator(split_list), NoDecode, AfterValidator(_resources), Field(max_length=16)
]
Placement = Literal["default", "spread", "group"]

_RESOURCES_HELP: Final = (
    "What Ray is to find for a {} worker, as NAME=AMOUNT: CPU, GPU, memory (bytes) and resources of your own, for instance "
    "CPU=4,GPU=1,rack-a=1. Empty: one CPU in a Ray cluster that is joined, nothing in a local one."
)
_PLACEMENT_HELP: Final = (
    "How Ray chooses the node of a {} worker. spread: away from others; group: in a placement group of its own, which keeps "
    "its resources for it while it restarts."
)


class ControlSection(Section):
    """The control process."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=0, ge=0, le=65535, description="Port of the ControlService; 0: a free one.")
    http_port: int = Field(
        default=-1,
        ge=-1,
        le=65535,
        description="Port of the console page; 0: a free one; -1: there is none. `twinpool up` takes a free one unless told otherwise.",
    )
    http_host: str = Field(
        default="", description="Address on which the console page listens; empty: that of control.host."
    )
    http_hosts: Texts = Field(
        default=(),
        max_length=16,
        description="Names by which browsers may call the console page, beside localhost and addresses: a page of another site that "
        "has its name point here is refused.",
    )
    operator_key_file: str = Field(
        default="",
        max_length=4096,
        description="File with the API key of an operator, which the control process shows routers that have tenants.",
    )
    answer_seconds: float = Field(
        default=2.0,
        ge=0.1,
        le=60,
        description="How long a worker or router may take to answer before an overview shows it as unreachable, in seconds.",
    )


class PoolKeys(Section):
    """One pool: how many workers it has, how Ray runs them, and which requests of its model it takes."""

    prefill_workers: int = Field(
        default=1,
        ge=0,
        le=WORKERS_MAX,
        description="Prefill workers of the pool at first. Changed later, it counts as a wish like `twinpool scale`.",
    )
    decode_workers: int = Field(
        default=1,
        ge=0,
        le=WORKERS_MAX,
        description="Decode workers of the pool at first. Changed later, it counts as a wish like `twinpool scale`.",
    )
    prefill_least: int = Field(default=0, ge=0, le=WORKERS_MAX, description="Fewest prefill workers.")
    prefill_most: int = Field(default=WORKERS_MAX, ge=0, le=WORKERS_MAX, description="Most prefill workers.")
    decode_least: int = Field(default=0, ge=0, le=WORKERS_MAX, description="Fewest decode workers.")
    decode_most: int = Field(default=WORKERS_MAX, ge=0, le=WORKERS_MAX, description="Most decode workers.")
    prefill_resources: Resources = Field(default=(), description=_RESOURCES_HELP.format("prefill"))
    decode_resources: Resources = Field(default=(), description=_RESOURCES_HELP.format("decode"))
    prefill_placement: Placement = Field(default="default", description=_PLACEMENT_HELP.format("prefill"))
    decode_placement: Placement = Field(default="default", description=_PLACEMENT_HELP.format("decode"))
    prompt_tokens_least: int = Field(
        default=0, ge=0, le=PROMPT_TOKENS_MAX, description="Shortest prompt that the pool takes, in tokens."
    )
    prompt_tokens_most: int = Field(
        default=PROMPT_TOKENS_MAX,
        ge=0,
        le=PROMPT_TOKENS_MAX,
        description="Longest prompt that the pool takes, in tokens.",
    )
    priority_least: int = Field(
        default=-PRIORITY_MAX,
        ge=-PRIORITY_MAX,
        le=PRIORITY_MAX,
        description="Lowest priority of a request that the pool takes.",
    )
    priority_most: int = Field(
        default=PRIORITY_MAX,
        ge=-PRIORITY_MAX,
        le=PRIORITY_MAX,
        description="Highest priority of a request that the pool takes.",
    )
    overflow: bool = Field(
        default=False,
        description="Take also requests of the model whose own pools have no pair of workers that is ready.",
    )

    def workers(self, role: str) -> int:
        """How many of a role there are at first."""
        return self.prefill_workers if role == "prefill" else self.decode_workers

    @property
    def managed(self) -> bool:
        """Whether the control process runs its workers; if it wants none at first, others do."""
        return self.prefill_workers + self.decode_workers > 0

    def bounds(self, role: str) -> tuple[int, int]:
        """(fewest, most) of a role."""
        if role == "prefill":
            return self.prefill_least, self.prefill_most
        return self.decode_least, self.decode_most

    def resources(self, role: str) -> dict[str, float]:
        """What a worker of a role needs, by Ray's names; empty: nothing is said."""
        given = self.prefill_resources if role == "prefill" else self.decode_resources
        return {part.partition("=")[0].strip(): float(part.partition("=")[2]) for part in given}

    def placement(self, role: str) -> Placement:
        """How the node of a worker of a role is chosen."""
        return self.prefill_placement if role == "prefill" else self.decode_placement


class FurtherPool(PoolKeys):
    """A pool beside the one of `worker.pool`. What it does not set is as the sections say that all pools share."""

    model: Keys = Field(
        default={}, description="Keys of `model` that differ. A path without a name gives the name, too."
    )
    kv: Keys = Field(default={}, description="Keys of `kv` that differ.")
    scheduler: Keys = Field(default={}, description="Keys of `scheduler` that differ.")
    transfer: Keys = Field(default={}, description="Keys of `transfer` that differ.")
    worker: Keys = Field(default={}, description="Keys of `worker` that differ, but for name and pool.")


def _mapping(value: object) -> object:
    """An environment variable or a flag holds it as JSON or YAML."""
    if not isinstance(value, str):
        return value
    # Not all of JSON is YAML: its escapes of characters beyond 16 bits are not.
    with contextlib.suppress(ValueError):
        return json.loads(value)
    try:
        return yaml.safe_load(value) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"is neither JSON nor YAML: {error}") from None


FurtherPools = Annotated[dict[Name, FurtherPool], BeforeValidator(_mapping), NoDecode]


class PoolsSection(PoolKeys):
    """The pool of `worker.pool`, further pools, and how Ray runs all of them."""

    further: FurtherPools = Field(
        default={},
        max_length=POOLS_MAX,
        description="Further pools by name, each with the keys of a pool (prefill_workers … overflow) and with what differs in "
        "model, kv, scheduler, transfer and worker; see docs/pools.md.",
    )
    routers: int = Field(default=1, ge=0, le=64, description="Router processes of a local cluster.")
    start_timeout_seconds: float = Field(
        default=300.0,
        gt=0,
        le=86400,
        description="Longest wait until a worker is ready, in seconds. Covers the load of its weights.",
    )
    pending_timeout_seconds: float = Field(
        default=60.0,
        gt=0,
        le=86400,
        description="How long Ray may find no place for a worker until an operation that needs it fails, in seconds.",
    )
    ray_address: str = Field(
        default="",
        description="Address of a running Ray cluster; empty: a local one is started for the control process.",
    )
    ray_object_store_bytes: int = Field(
        default=80 << 20,
        ge=78_643_200,
        le=1 << 40,
        description="Object store of the local Ray, in bytes. Ray's least: KV never passes through it.",
    )
    worker_options: Literal["control", "node"] = Field(
        default="control",
        description="Where the options of workers come from: this control process (control), or the file and the environment of the "
        "node that Ray places a worker on (node), as `twinpool serve` would read them there. Their names and pool are this process's.",
    )
    max_restarts: int = Field(
        default=-1, ge=-1, le=1 << 20, description="How often Ray restarts a worker that died; -1: always."
    )
    stop_workers: bool = Field(
        default=True,
        description="Whether the workers end with a control process that is told to stop. Off: they stay in the Ray cluster that "
        "is joined, for the control process that stands by or comes next.",
    )


def broken_pool_rules(pools: PoolsSection) -> Iterator[str]:
    """The rules between its keys that ``pools`` breaks; each message starts with the key at fault."""
    for role in ("prefill", "decode"):
        least, most = pools.bounds(role)
        if least > most:
            yield f"pools.{role}_least: {least} exceeds pools.{role}_most = {most}"
        # A control process that runs no workers has no use for bounds.
        elif pools.managed and not least <= pools.workers(role) <= most:
            yield (
                f"pools.{role}_workers: {pools.workers(role)} is not within pools.{role}_least = {least} and "
                f"pools.{role}_most = {most}"
            )
    for kind in ("prompt_tokens", "priority"):
        low, high = getattr(pools, f"{kind}_least"), getattr(pools, f"{kind}_most")
        if low > high:
            yield f"pools.{kind}_least: {low} exceeds pools.{kind}_most = {high}"
    if pools.worker_options == "node" and not pools.ray_address:
        yield "pools.worker_options: a local Ray has no nodes with options of their own; set pools.ray_address"
    if not pools.stop_workers and not pools.ray_address:
        yield "pools.stop_workers: cannot be off without pools.ray_address: a local Ray ends with its control process"
