# SPDX-License-Identifier: Apache-2.0
"""The peers' side of ``bench/core.py``: TokenSpeed's scheduler and Dynamo's radix tree, each through its own Python API.

Runs under the bench-only venv's Python; see ``bench/core.py`` for how to make it.
"""

import importlib
import itertools
import json
import random
from collections.abc import Callable
from typing import Any

from bench._core_work import (
    BATCH_BLOCKS,
    BLOCK_TOKENS,
    CACHED,
    CHAIN_BLOCKS,
    CONTEXTS,
    DECODING,
    INDEXED_BLOCKS,
    PROMPTS,
    RUNNING,
    WAITING,
    WORKERS,
    Figures,
    batch_us,
    each_us,
    label,
    prompt_ids,
    rate,
    resident_bytes,
    serve,
)

ROOM = 1000
"""Tokens that a request may generate."""


class Peer:
    """A TokenSpeed scheduler and what an engine does with its plans."""

    def __init__(self, pages: int, batch: int = RUNNING, step_tokens: int = 8192) -> None:
        self.api: Any = importlib.import_module("tokenspeed_scheduler")
        config = self.api.SchedulerConfig()
        config.max_batch_size = batch
        config.max_scheduled_tokens = step_tokens
        config.num_device_pages = pages
        config.prefix_granularity = BLOCK_TOKENS
        config.enable_mixed_prefill_decode = True
        config.disable_l2_cache = True
        config.num_snapshot_pages = config.num_host_pages = 1
        config.cache_groups = [self.api.CacheGroupConfig("kv", BLOCK_TOKENS, pages, self.api.AttnKind.Full)]
        self.core = self.api.Scheduler(config)

    def spec(self, name: str, tokens: list[int], room: int = ROOM) -> Any:
        """A request as its API takes it."""
        spec = self.api.RequestSpec()
        spec.request_id = name
        spec.tokens = tokens
        spec.max_new_tokens = room
        return spec

    def submit(self, name: str, tokens: list[int], room: int = ROOM) -> None:
        self.core.submit_requests([self.spec(name, tokens, room)])

    def advance(self, plan: Any) -> None:
        """One token for each request whose prompt is through."""
        event = self.api.ExecutionEvent()
        for batch in plan.forward:
            extends = batch.num_extends()
            before, now, all_of = batch.extend_prefix_lens, batch.input_lengths, batch.prefill_lengths
            for i, name in enumerate(batch.request_ids):
                result = self.api.ForwardEvent.ExtendResult()
                result.request_id = name
                result.tokens = [] if i < extends and before[i] + now[i] < all_of[i] else [7]
                event.add_event(result)
        self.core.advance(event)

    def step(self) -> None:
        """What an engine needs of a step: the plan, its arrays, the result."""
        plan = self.core.next_execution_plan()
        for batch in plan.forward:
            batch.input_ids, batch.request_pool_indices, batch.block_tables_arrays()
        self.advance(plan)

    def finish(self, name: str) -> None:
        done = self.api.ForwardEvent.Finish()
        done.request_id = name
        event = self.api.ExecutionEvent()
        event.add_event(done)
        self.core.advance(event)

    def decode(self, count: int, context: int, room: int = ROOM) -> None:
        """Brings so many requests of a context length to decoding."""
        for i in range(count):
            self.submit(f"d{i}", prompt_ids(context, i), room)
        while self.core.decoding_size() < count:
            self.step()


def one_at_a_time(peer: Peer, prompt: Callable[[int], list[int]]) -> Callable[[int], Callable[[], object]]:
    """For ``each_us``: from the i-th prompt to the plan of its prefill; the request before is ended first."""
    last: list[tuple[str, Any]] = []

    def prepare(i: int) -> Callable[[], object]:
        tokens = prompt(i)
        if last:
            name, planned = last.pop()
            peer.advance(planned)
            peer.finish(name)

        def call() -> None:
            peer.submit(f"a{i}", tokens)
            last.append((f"a{i}", peer.core.next_execution_plan()))

        return call

    return prepare


def admit(quick: bool) -> Figures:
    """From a list of token ids to the plan of the prefill."""
    figures = {}
    for count in PROMPTS:
        figures[f"admit_plan_{label(count)}_us"] = each_us(
            30 if quick else 200,
            one_at_a_time(Peer(50_000), lambda i: prompt_ids(count, i)),  # noqa: B023
        )
    return figures


def decode(quick: bool) -> Figures:
    """A request's share of a decode step."""
    figures = {}
    for context in CONTEXTS[:2] if quick else CONTEXTS:
        count = DECODING
        peer = Peer(count * (context // BLOCK_TOKENS + 20) + 100)
        peer.decode(count, context)
        figures[f"decode_{label(context)}_us"] = (
            each_us(30 if quick else 200, lambda _: peer.step) / count  # noqa: B023
        )
    return figures


def plan(quick: bool) -> Figures:
    """A plan while others wait: for a seat (all are taken), and for memory (seats are free)."""
    figures = {}
    for waiting in WAITING[:1] if quick else WAITING:
        for reason, pages, seats in (("seat", 64 * 64, RUNNING), ("memory", 64 * 17 + 70, 4 * RUNNING)):
            peer = Peer(pages, seats)
            peer.decode(RUNNING, 1024, 60 if reason == "memory" else ROOM)
            for i in range(waiting):
                peer.submit(f"w{i}", prompt_ids(256 if reason == "seat" else 1256, 1000 + i), 64)
            plans: list[Any] = []

            def prepare(_: int, peer: Peer = peer, plans: list[Any] = plans) -> Any:
                if plans:
                    peer.advance(plans.pop())
                return lambda: plans.append(peer.core.next_execution_plan())

            figures[f"plan_{label(waiting)}_wait_for_{reason}_us"] = each_us(5 if quick else 15, prepare)
    return figures


def prefix_hit(quick: bool) -> Figures:
    """Admission of a prompt that is cached but for its last 32 tokens, through its plan."""
    figures = {}
    for cached in CACHED[:1] if quick else CACHED:
        peer = Peer(2 * cached // BLOCK_TOKENS + 200)
        tokens = prompt_ids(cached + 32, 1)
        peer.submit("first", tokens, 4)
        while peer.core.decoding_size() == 0:
            peer.step()
        peer.finish("first")
        figures[f"prefix_hit_hash_{label(cached)}_us"] = each_us(
            10 if quick else 30,
            one_at_a_time(peer, lambda _: tokens),  # noqa: B023
        )
    return figures


class Tree:
    """Dynamo's radix tree, fed with events as its API takes them (JSON)."""

    def __init__(self) -> None:
        api = importlib.import_module("dynamo._core")
        self.core: Any = api.RadixTree()
        self.events = itertools.count()

    def stored(self, blocks: list[int], parent: int | None = None) -> bytes:
        listed = [{"block_hash": block, "tokens_hash": block} for block in blocks]
        return self.event({"stored": {"parent_hash": parent, "blocks": listed}})

    def removed(self, blocks: list[int]) -> bytes:
        return self.event({"removed": {"block_hashes": blocks}})

    def event(self, data: object) -> bytes:
        return json.dumps({"event_id": next(self.events), "data": data}).encode()

    def settle(self, chain: list[int]) -> None:
        """Its thread has done what it was given: a search waits for it."""
        self.core.find_matches(chain[:1])


def chains(count: int, seed: int = 0) -> list[list[int]]:
    """Random block hashes, CHAIN_BLOCKS a chain."""
    source = random.Random(seed)
    return [[source.getrandbits(63) for _ in range(CHAIN_BLOCKS)] for _ in range(count)]


def batches(chain: list[int]) -> list[tuple[int | None, list[int]]]:
    """A chain in batches, each with its parent."""
    starts = range(0, CHAIN_BLOCKS, BATCH_BLOCKS)
    return [(chain[at - 1] if at else None, chain[at : at + BATCH_BLOCKS]) for at in starts]


def indexed(quick: bool) -> int:
    """Chains that make up the index."""
    return INDEXED_BLOCKS // CHAIN_BLOCKS // (16 if quick else 1)


def search(quick: bool) -> Figures:
    """find_matches of a prompt of which the workers hold 8 or 64 different lengths."""
    figures = {}
    for workers in WORKERS:
        tree = Tree()
        stock = chains(indexed(quick))
        for i, chain in enumerate(stock):
            tree.core.apply_event(i % workers, tree.stored(chain))
        shared = stock[0]
        for worker in range(workers):
            tree.core.apply_event(worker, tree.stored(shared[: CHAIN_BLOCKS * (worker + 1) // workers]))
        tree.settle(shared)
        figures[f"search_{workers}_workers_us"] = batch_us(
            20 if quick else 100,
            lambda: tree.core.find_matches(shared),  # noqa: B023
        )
    return figures


def index(quick: bool) -> Figures:
    """Updates in batches, and memory an entry."""
    tree = Tree()
    stock = chains(indexed(quick))
    stores = [(i % 64, tree.stored(part, parent)) for i, c in enumerate(stock) for parent, part in batches(c)]
    # Leaves first, as workers evict: the tree forgets what hangs below a removed block.
    removals = [(i % 64, tree.removed(part)) for i, c in enumerate(stock) for _, part in reversed(batches(c))]
    entries = len(stock) * CHAIN_BLOCKS

    def apply(events: list[tuple[int, bytes]]) -> None:
        for worker, event in events:
            tree.core.apply_event(worker, event)
        tree.settle(stock[0])

    before = resident_bytes()
    stored = rate(entries, lambda: apply(stores))
    held = resident_bytes() - before
    return {
        "index_store_m_s": stored,
        "index_bytes": held / entries,
        "index_remove_m_s": rate(entries, lambda: apply(removals)),
    }


def churn(quick: bool) -> Figures:
    """Resident memory after all rounds of a million stores and removals, over what it was after the second."""
    tree = Tree()
    sizes = []
    for turn in range(3 if quick else 10):
        stock = chains(indexed(quick), turn)
        for i, chain in enumerate(stock):
            tree.core.apply_event(i % 64, tree.stored(chain))
        for i, chain in enumerate(stock):
            tree.core.apply_event(i % 64, tree.removed(chain))
        tree.settle(stock[0])
        del stock
        sizes.append(resident_bytes())
    return {"churn_growth": sizes[-1] / sizes[1]}


def block_hash(quick: bool) -> Figures:
    """Dynamo's block hash of a long prompt."""
    api: Any = importlib.import_module("dynamo._core")
    count = 1 << 18
    tokens = prompt_ids(count, 0)
    taken = each_us(
        3 if quick else 15, lambda _: lambda: api.compute_block_hash_for_seq(tokens, BLOCK_TOKENS)
    )
    return {"hash_m_tokens_s": count / taken}


if __name__ == "__main__":
    serve(
        {
            "admit": admit,
            "decode": decode,
            "plan": plan,
            "prefix_hit": prefix_hit,
            "search": search,
            "index": index,
            "churn": churn,
            "block_hash": block_hash,
        }
    )
