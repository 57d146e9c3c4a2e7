# SPDX-License-Identifier: Apache-2.0
"""The project's side of ``bench/core.py``: the core through its Python binding."""

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

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
from twinpool._core import (
    AdmissionConfig,
    BlockManager,
    RouterCore,
    SchedulerConfig,
    StepPlan,
    StepScheduler,
    hash_blocks,
)

ROOT = bytes(16)
ROOM = 1000
ONE = np.ones(1, np.int32)
Tokens = NDArray[np.int32]
Chain = NDArray[np.uint8]
Prepare = Callable[[int], Callable[[], object]]


def tokens_of(count: int, seed: int) -> Tokens:
    return np.array(prompt_ids(count, seed), np.int32)


def hashes_of(tokens: Tokens) -> Chain:
    return hash_blocks(ROOT, tokens, BLOCK_TOKENS)


def scheduler(blocks: int, seats: int = RUNNING, step_tokens: int = 8192) -> StepScheduler:
    pool = BlockManager(blocks, BLOCK_TOKENS, np.zeros(blocks, np.uint64))
    limits = SchedulerConfig(max_num_seqs=seats, max_batched_tokens=step_tokens, max_chunk_tokens=step_tokens)
    return StepScheduler(pool, limits)


def decode_many(core: StepScheduler, count: int, context: int, room: int = ROOM) -> None:
    """Sequences of a context length that decode."""
    for i in range(count):
        tokens = tokens_of(context, i)
        seq = core.reserve(tokens, hashes_of(tokens), ROOT, max_new_tokens=room)
        assert seq is not None
        core.start(seq, 1)


def adding(core: StepScheduler, prompts: list[Tokens], hashes: list[Chain] | None) -> Prepare:
    """For ``each_us``: adds the i-th prompt to the queue, hashing it where no hashes are given; the one before is removed."""
    added: list[int] = []

    def prepare(i: int) -> Callable[[], object]:
        tokens = prompts[i]
        if added:
            core.remove(added.pop())
        if hashes is None:
            return lambda: added.append(
                core.add(tokens, hash_blocks(ROOT, tokens, BLOCK_TOKENS), ROOT, max_new_tokens=ROOM)
            )
        known = hashes[i]
        return lambda: added.append(core.add(tokens, known, ROOT, max_new_tokens=ROOM))

    return prepare


def planning(
    core: StepScheduler, prompts: list[Tokens], hashes: Chain | None, i: int
) -> Callable[[], object]:
    """Adds one of the prompts (hashing it, where no hashes are given) and plans its prefill; the result ends it again."""
    tokens = prompts[i % len(prompts)]
    seq = core.add(tokens, hashes_of(tokens) if hashes is None else hashes, ROOT, max_new_tokens=ROOM)
    plan = core.plan(0.0)

    def end() -> None:
        core.advance(plan, ONE)
        core.remove(seq)

    return end


def turns(run: Callable[[int], Callable[[], object]]) -> Prepare:
    """For ``each_us``: run(i), after the end that run(i - 1) has returned."""
    ends: list[Callable[[], object]] = []

    def prepare(i: int) -> Callable[[], object]:
        if ends:
            ends.pop()()
        return lambda: ends.append(run(i))

    return prepare


def admit(quick: bool) -> Figures:
    """Hash and add; add alone; and through the plan of the prefill."""
    figures = {}
    calls = 30 if quick else 300
    for count in PROMPTS:
        prompts = [tokens_of(count, i) for i in range(calls)]
        size = label(count)
        figures[f"admit_{size}_us"] = each_us(calls, adding(scheduler(64), prompts, None))
        hashes = [hashes_of(tokens) for tokens in prompts]
        figures[f"admit_no_hash_{size}_us"] = each_us(calls, adding(scheduler(64), prompts, hashes))
        core = scheduler(50_000)
        figures[f"admit_plan_{size}_us"] = each_us(calls, turns(partial(planning, core, prompts, None)))
    return figures


def arrays(plan: StepPlan) -> None:
    """All that a model needs of a plan."""
    _ = (plan.seq, plan.token_ids, plan.positions, plan.q_start, plan.context)
    _ = (plan.block_table, plan.slots, plan.sample, plan.copies)


def decode(quick: bool) -> Figures:
    """A request's share of a decode step."""
    figures = {}
    for context in CONTEXTS[:2] if quick else CONTEXTS:
        count = DECODING
        core = scheduler(count * (context // BLOCK_TOKENS + 20))
        decode_many(core, count, context)
        sampled = np.full(count, 7, np.int32)

        def step(core: StepScheduler = core, sampled: Tokens = sampled) -> None:
            plan = core.plan(0.0)
            arrays(plan)
            core.advance(plan, sampled)

        figures[f"decode_{label(context)}_us"] = each_us(30 if quick else 400, lambda _: step) / count
    return figures


def plan(quick: bool) -> Figures:
    """A plan while others wait: for a seat (all are taken), and for memory (seats are free)."""
    figures = {}
    for waiting in WAITING[:1] if quick else WAITING:
        for reason, blocks, seats in (("seat", 64 * 64, RUNNING), ("memory", 64 * 17 + 70, 4 * RUNNING)):
            core = scheduler(blocks, seats)
            decode_many(core, RUNNING, 1024, 60 if reason == "memory" else ROOM)
            for i in range(waiting):
                tokens = tokens_of(256 if reason == "seat" else 1256, 1000 + i)
                core.add(tokens, hashes_of(tokens), ROOT, max_new_tokens=64, arrival=float(i))
            sampled = np.full(RUNNING, 7, np.int32)
            plans: list[StepPlan] = []

            def prepare(
                _: int,
                core: StepScheduler = core,
                plans: list[StepPlan] = plans,
                sampled: Tokens = sampled,
            ) -> Callable[[], object]:
                if plans:
                    last = plans.pop()
                    core.advance(last, np.full(len(last.seq), 7, np.int32))
                return lambda: plans.append(core.plan(0.0))

            figures[f"plan_{label(waiting)}_wait_for_{reason}_us"] = each_us(5 if quick else 30, prepare)
    return figures


def prefix_hit(quick: bool) -> Figures:
    """Admission of a prompt that is cached but for its last 32 tokens, through its plan; with its hashes, and without."""
    figures = {}
    for cached in CACHED[:1] if quick else CACHED:
        tokens = tokens_of(cached + 32, 1)
        hashes = hashes_of(tokens)
        for name, given in (("prefix_hit", hashes), ("prefix_hit_hash", None)):
            core = scheduler(2 * cached // BLOCK_TOKENS + 200)
            first = core.add(tokens, hashes, ROOT, max_new_tokens=0)
            while not (step := core.plan(0.0)).empty:
                core.advance(step, ONE)
            core.remove(first)
            hit = turns(partial(planning, core, [tokens], given))
            figures[f"{name}_{label(cached)}_us"] = each_us(10 if quick else 50, hit)
    return figures


def cluster(prefill: int, decode: int, **limits: float) -> RouterCore:
    """A core that knows so many workers, all with a load report."""
    core = RouterCore(AdmissionConfig(**{"max_queue_requests": 0, "index_max_bytes": 0, **limits}))
    for role, count in (("prefill", prefill), ("decode", decode)):
        for i in range(count):
            name = f"{role[0]}{i}"
            core.upsert_worker(0.0, name, 1, "m", role, "ready", "fp", 100_000, BLOCK_TOKENS, 1000)
            core.report_load(0.0, name, 1, i, 0, 1000 * i if role == "prefill" else 0, 90_000, 0.01)
    return core


def chains(quick: bool, seed: int = 0) -> list[Chain]:
    """Random block hashes, CHAIN_BLOCKS a chain; a million in all."""
    source = np.random.default_rng(seed)
    count = INDEXED_BLOCKS // CHAIN_BLOCKS // (16 if quick else 1)
    return [source.integers(0, 256, (CHAIN_BLOCKS, 16), dtype=np.uint8) for _ in range(count)]


def search(quick: bool) -> Figures:
    """longest_prefix of a prompt of which the workers hold 8 or 64 different lengths."""
    figures = {}
    stock = chains(quick)
    for workers in WORKERS:
        core = cluster(0, workers)
        for i, chain in enumerate(stock):
            core.index_stored(f"d{i % workers}", 1, chain)
        for worker in range(workers):
            core.index_stored(f"d{worker}", 1, stock[0][: CHAIN_BLOCKS * (worker + 1) // workers])
        figures[f"search_{workers}_workers_us"] = batch_us(
            100 if quick else 500,
            lambda: core.longest_prefix(stock[0]),  # noqa: B023
        )
    return figures


def index(quick: bool) -> Figures:
    """Updates in batches, and memory an entry."""
    core = cluster(0, 64)
    stock = chains(quick)
    parts = [
        (f"d{i % 64}", chain[at : at + BATCH_BLOCKS])
        for i, chain in enumerate(stock)
        for at in range(0, CHAIN_BLOCKS, BATCH_BLOCKS)
    ]
    entries = len(stock) * CHAIN_BLOCKS

    def store() -> None:
        for worker, part in parts:
            core.index_stored(worker, 1, part)

    def remove() -> None:
        for worker, part in parts:
            core.index_removed(worker, 1, part)

    before = resident_bytes()
    stored = rate(entries, store)
    return {
        "index_store_m_s": stored,
        "index_bytes": (resident_bytes() - before) / entries,
        "index_remove_m_s": rate(entries, remove),
    }


def recall(quick: bool) -> Figures:
    """Share of the blocks that a search for popular prompts still finds when the cap on the index's bytes is a half and a
    quarter of what all would take. Every prompt is stored once, when it is first asked for (64 workers, 256 blocks each,
    Zipf's law with exponent 1)."""
    prompts, asks = (256, 4000) if quick else (4096, 60_000)
    source = np.random.default_rng(0)
    chains = [source.integers(0, 256, (BATCH_BLOCKS, 16), dtype=np.uint8) for _ in range(prompts)]
    odds = 1 / np.arange(1, prompts + 1)
    drawn = source.choice(prompts, asks, p=odds / odds.sum()).tolist()
    whole = 36 * BATCH_BLOCKS * len(set(drawn))
    figures = {}
    for name, share in (("half", 2), ("quarter", 4)):
        core = cluster(0, 64, index_max_bytes=max(whole // share, 1 << 20))
        stored: set[int] = set()
        found = asked = 0
        for prompt in drawn:
            if prompt in stored:
                asked += BATCH_BLOCKS
                found += max((blocks for _, blocks in core.longest_prefix(chains[prompt])), default=0)
            else:
                stored.add(prompt)
                core.index_stored(f"d{prompt % 64}", 1, chains[prompt])
        figures[f"recall_{name}_cap"] = found / asked
    return figures


def churn(quick: bool) -> Figures:
    """Resident memory after all rounds of a million stores and removals, over what it was after the second."""
    core = cluster(0, 64)
    sizes = []
    for turn in range(3 if quick else 10):
        stock = chains(quick, turn)
        for i, chain in enumerate(stock):
            core.index_stored(f"d{i % 64}", 1, chain)
        for i, chain in enumerate(stock):
            core.index_removed(f"d{i % 64}", 1, chain)
        del stock
        sizes.append(resident_bytes())
    return {"churn_growth": sizes[-1] / sizes[1]}


def block_hash(quick: bool) -> Figures:
    """SHA-256 chain over a long prompt."""
    count = 1 << 18
    tokens = tokens_of(count, 0)
    return {"hash_m_tokens_s": count / each_us(3 if quick else 15, lambda _: lambda: hashes_of(tokens))}


def route(core: RouterCore, tokens: int, hashes: Chain, calls: int) -> tuple[float, float, float]:
    """Median microseconds of submit, of plan, and of all calls of a request's life in a router."""
    numbers = itertools.count()
    submits, plans, lives = [], [], []
    events = ("decode_reserved", "first_token", "handoff_done", "delivered", "finished")
    for _ in range(calls):
        name = f"r{next(numbers)}"
        start = time.perf_counter_ns()
        request = core.submit(0.0, name, "m", tokens, 100, hashes).request
        middle = time.perf_counter_ns()
        core.plan(0.0)
        end = time.perf_counter_ns()
        for event in events:
            core.advance(0.0, request, 1, event)
        core.forget(request)
        lives.append(time.perf_counter_ns() - start)
        submits.append(middle - start)
        plans.append(end - middle)
    return tuple(statistics.median(taken) / 1e3 for taken in (submits, plans, lives))  # type: ignore[return-value]


def router(quick: bool) -> Figures:
    """Admission and placement over 8 x 64 pairs with the index full; what a busy router would spend on them."""
    core = cluster(8, 64, prefill_window_tokens=0, transfer_window_requests=0)
    stock = chains(quick)
    for i, chain in enumerate(stock):
        core.index_stored(f"d{i % 64}", 1, chain)
    for worker in range(64):
        core.index_stored(f"d{worker}", 1, stock[0][: 31 * (worker + 1)])
    calls = 100 if quick else 500
    short, long = (2048, stock[1][:32]), (CHAIN_BLOCKS * BLOCK_TOKENS, stock[0])
    submit, place, short_life = route(core, *short, calls)
    long_submit, long_place, life = route(core, *long, calls)
    core.record(64 << 20)
    recorded = [route(core, *prompt, calls)[-1] for prompt in (short, long)]
    tokens = tokens_of(100_000, 1)
    hashing = each_us(calls // 10, lambda _: lambda: hashes_of(tokens))
    return {
        "route_2k_us": submit,
        "place_8x64_2k_us": place,
        "route_128k_us": long_submit,
        "place_8x64_us": long_place,
        "life_2k_us": short_life,
        "life_2k_recorded_us": recorded[0],
        "life_128k_us": life,
        "life_128k_recorded_us": recorded[1],
        "cores_at_99_requests_s_of_100k": 99 * (hashing + life) / 1e6,
    }


def router_queue(quick: bool) -> Figures:
    """A router's plan with ten thousand waiting: nothing has changed; and a load report has."""
    core = cluster(8, 64, transfer_window_requests=1, queue_ttl_seconds=3600)
    hashes = chains(True)[0][:32]
    waiting = WAITING[0] if quick else WAITING[1]
    for i in range(waiting):
        core.submit(0.0, f"r{i}", "m", 2048, 100, hashes, tenant=f"t{i % 7}")
    core.plan(0.0)
    running = itertools.cycle((1, 2))

    def changed() -> None:
        core.report_load(0.0, "d0", 1, next(running), 0, 0, 90_000, 0.01)
        core.plan(0.0)

    return {
        f"route_plan_{waiting}_waiting_us": batch_us(500, lambda: core.plan(0.0)),
        f"route_plan_{waiting}_waiting_report_us": batch_us(100, changed),
    }


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
            "recall": recall,
            "router": router,
            "router_queue": router_queue,
        }
    )
