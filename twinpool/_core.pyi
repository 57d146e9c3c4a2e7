# SPDX-License-Identifier: Apache-2.0
"""Typed stub of the C++ core (``twinpool._core``).

The core does no I/O and reads no clock: ``now`` is seconds, passed in. Hashes are
16-byte values; arrays of them are ``uint8[n, 16]``, C-contiguous. Token ids are ``int32``.
Everything that the core returns as an array is a fresh array unless it says "view".
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint8]  # [n, 16]
Tokens = NDArray[np.int32]
Blocks = NDArray[np.int32]

# --- hash ---------------------------------------------------------------------------------

def root_hash(fingerprint: bytes, tenant_salt: bytes | None, adapter: bytes | None) -> bytes:
    """128-bit root of a namespace: SHA-256 over typed, length-prefixed fields, first 16 bytes.

    None is an absent field, which is not the same as an empty one."""

def hash_blocks(parent: bytes, tokens: Tokens, block_tokens: int) -> Hashes:
    """Chained hashes of the *full* blocks of ``tokens``; a partial last block has none."""

def block_digest(data: int, stride_bytes: int, length_bytes: NDArray[np.int64]) -> NDArray[np.uint64]:
    """XXH64 of the first ``length_bytes[i]`` bytes at ``data + i * stride_bytes``, for each of ``n`` blocks in CPU memory."""

# --- transfer -----------------------------------------------------------------------------

def cover_blocks(blocks: Blocks, gap: int) -> tuple[Blocks, NDArray[np.int64]]:
    """Ascending entries that cover ``blocks``, runs at most ``gap`` apart joined, and where in them each block is.

    ``entries[positions[i]] == blocks[i]``."""

def read_ticket(
    message: bytes, pool_blocks: int, prompt_tokens: int, block_tokens: int, lease_seconds_max: int
) -> str | tuple[int, int, Blocks, NDArray[np.uint64], tuple[int, ...], int, float]:
    """A serialised Ticket of the hand-off: transfer id, first block, blocks, generations, digests, tokens, seconds of the lease.

    A string says why it contradicts itself, the owner's pool or the prompt."""

# --- blocks -------------------------------------------------------------------------------

class CoreError(Exception):
    """A caller broke a rule of the core. The message names the rule; the core is unchanged."""

@final
class BlockManager:
    """Owns the physical blocks of one KV pool: free list, prefix cache, pins, quarantine.

    ``generations`` is kept by reference and raised in place whenever a block's content ends and
    whenever it is given to new content; the caller registers that memory with NIXL. A held block
    holds its ancestors in the cache. A block is in exactly one of these
    states: free, held (reference count > 0 by sequences or pins), cached (content, no
    reference, evictable leaves first by LRU), pinned (the same, kept from eviction by a prefix pin; counted as cached, but
    not as available), quarantined.
    """

    def __init__(self, num_blocks: int, block_tokens: int, generations: NDArray[np.uint64]) -> None: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def cached_blocks(self) -> int: ...
    @property
    def held_blocks(self) -> int: ...
    @property
    def pinned_blocks(self) -> int: ...
    @property
    def quarantined_blocks(self) -> int: ...
    @property
    def available_blocks(self) -> int:
        """Free plus evictable."""
    @property
    def prefix_pinned_blocks(self) -> int:
        """Under a prefix pin, whether anybody needs them now or not."""
    @property
    def prefix_pins(self) -> int: ...
    def has_prefix_pin(self, pin: str) -> bool: ...
    def pin_prefix(
        self,
        pin: str,
        tenant: str,
        session: str,
        hashes: Hashes,
        expires_at: float,
        *,
        max_pins: int,
        max_blocks: int,
        max_tenant_blocks: int,
    ) -> tuple[str, int, float]:
        """Keeps a whole prefix in the cache until ``expires_at``, or makes the pin of that name longer. Returns why not, the blocks that
        the pin holds and when it ends: "" if it is pinned; "missing" if not all of it is cached (with how much is), or the limit
        that would be exceeded: "pins", "blocks" or "tenant_blocks", where each block counts once. CoreError if ``hashes`` are no
        chain from its root, or the name is that of another prefix."""
    def unpin_prefixes(
        self, tenant: str, *, pin: str = "", session: str = "", last: bytes | None = None
    ) -> tuple[int, Blocks]:
        """Ends the tenant's pins that fit all that is given (``last``: hash of the prefix's last block). How many, and their blocks."""
    def expire_prefix_pins(self, now: float) -> int:
        """Ends those whose time has passed; how many."""
    def end_next_prefix_pin(self) -> bool:
        """Ends the one that would end first; False if there is none."""
    def next_prefix_expiry(self) -> float | None: ...
    def demote(self, blocks: Blocks, generations: NDArray[np.uint64]) -> int:
        """Makes a sequence's blocks, given in its order, the next ones to be evicted: those whose generation is still the given one,
        which nobody needs or pins, and on which no other cached content is built. How many."""
    def lookup(self, hashes: Hashes) -> int:
        """Number of leading hashes that are cached or held. Does not change the LRU order."""
    def acquire_prefix(self, hashes: Hashes) -> Blocks:
        """Takes one reference on each block of the longest cached prefix and returns them."""
    def allocate(self, count: int) -> Blocks | None:
        """Takes ``count`` new blocks (reference 1, generation raised), evicting if needed; None and no change if it can't."""
    def reference(self, blocks: Blocks) -> None:
        """One more reference on each, held or cached (sharing between choices)."""
    def release(self, blocks: Blocks) -> None:
        """Drops one reference on each, last block first; at 0 a committed block becomes cached, others free."""
    def commit(self, blocks: Blocks, hashes: Hashes, parent: bytes) -> Blocks:
        """Publishes full blocks under their hashes (``parent`` is the hash before the first). Where a hash is already
        published by another block, that one stays the published copy and this block remains private. Returns the published block for each hash."""
    def pin(self, transfer_id: int, blocks: Blocks, readers: int, expires_at: float) -> None:
        """Holds blocks (reference + pin) for a transfer; a second call with the same id adds blocks."""
    def renew(self, transfer_id: int, expires_at: float) -> bool:
        """False if the transfer is not held (any more)."""
    def unpin(self, transfer_id: int, reader: int) -> bool:
        """The reader is done; the last of the expected readers frees. Duplicates do not count. False if unknown."""
    def expire(self, now: float) -> list[int]:
        """Ends all transfers whose lease has passed and returns their ids."""
    def pinned_transfers(self) -> int: ...
    def quarantine(self, blocks: Blocks) -> None:
        """Moves held blocks (reference 1, not committed) out of reach until ``unquarantine``."""
    def unquarantine(self, blocks: Blocks) -> None: ...
    def drain_freed(self) -> Blocks:
        """Free blocks whose content ended (freed or evicted) since the last call; tests poison them. A block that has been
        given out again by now is left out."""
    def drain_events(self) -> list[tuple[str, Hashes, bytes]]:
        """Cache events since the last call: ``("stored", hashes, parent)`` or ``("removed", hashes, b"")``."""
    def reset_cache(self) -> int:
        """Evicts every unreferenced cached block; returns how many."""
    def check(self) -> None:
        """Raises CoreError if an invariant does not hold."""

# --- step scheduler -----------------------------------------------------------------------

@final
class SchedulerConfig:
    """Limits of a step. ``policy`` is "fcfs", "priority" or "shortest_uncached" (fewest tokens to compute first).
    ``max_batched_tokens`` is at least ``max_num_seqs``, so that all decodes fit into a step. ``max_overtaken``: admissions
    that a waiting sequence sees at most before it goes first, whatever the policy; 0: no bound. ``host_blocks``: blocks of
    host memory that keep the KV of preempted sequences; 0: they are recomputed. The scheduler checks and copies the limits
    when it is made."""
    def __init__(
        self,
        *,
        max_num_seqs: int = 64,
        max_batched_tokens: int = 2048,
        max_chunk_tokens: int = 512,
        policy: str = "fcfs",
        max_overtaken: int = 64,
        host_blocks: int = 0,
    ) -> None: ...
    max_num_seqs: int
    max_batched_tokens: int
    max_chunk_tokens: int
    policy: str
    max_overtaken: int
    host_blocks: int

@final
class StepPlan:
    """What the next step runs, as flat arrays. Sequences are ordered decodes first. All arrays are views: no copies.
    ``block_table`` looks into the scheduler's own table (row stride >= width) and is good until the plan is advanced
    or aborted; the others are the plan's.

    ``seq[i]`` is the sequence's handle; its query tokens are ``token_ids[q_start[i]:q_start[i+1]]`` at positions
    ``start[i] ...``; ``context[i]`` is its KV length after the step; ``block_table[i, :]`` its blocks, padded with -1;
    ``sample[i]`` is 1 if the step computes the sequence's next token from its last query token.
    """
    @property
    def empty(self) -> bool: ...
    @property
    def seq(self) -> NDArray[np.int64]: ...
    @property
    def token_ids(self) -> NDArray[np.int32]: ...
    @property
    def positions(self) -> NDArray[np.int32]: ...
    @property
    def q_start(self) -> NDArray[np.int32]: ...
    @property
    def context(self) -> NDArray[np.int32]: ...
    @property
    def block_table(self) -> NDArray[np.int32]: ...
    @property
    def slots(self) -> NDArray[np.int64]:
        """For each query token, ``block * block_tokens + offset`` where its KV goes."""
    @property
    def sample(self) -> NDArray[np.uint8]: ...
    @property
    def num_decodes(self) -> int:
        """The first so many entries are decodes with one query token."""
    @property
    def preempted(self) -> NDArray[np.int64]:
        """Sequences that lost their blocks in this plan; they wait again, and are restored from host memory or recomputed."""
    @property
    def follows(self) -> NDArray[np.int32]:
        """Of a plan made by ``plan_ahead``: the index of each sequence in the plan before it, which draws its token; else empty."""
    @property
    def copies(self) -> NDArray[np.int32]:
        """``[m, 2]`` (source block, destination block) copies to do before the step (copy on write)."""
    @property
    def swap_out(self) -> NDArray[np.int32]:
        """``[m, 2]`` (block, host block) copies to do before anything is written: before freed blocks are poisoned, ``copies``
        and ``swap_in``. None of an aborted plan counts."""
    @property
    def swap_in(self) -> NDArray[np.int32]:
        """``[m, 2]`` (host block, block) copies to do before the step."""

@final
class StepScheduler:
    """Plans steps over a BlockManager. Sequences are identified by handles that ``add`` returns.

    A sequence starts either *waiting* (its prompt is to be computed here: prefill role, or recompute)
    or *remote* (its KV arrives by transfer: ``reserve`` then ``start``).
    """
    def __init__(self, blocks: BlockManager, config: SchedulerConfig) -> None: ...
    def add(
        self,
        tokens: Tokens,
        hashes: Hashes,
        root: bytes,
        *,
        max_new_tokens: int,
        priority: int = 0,
        arrival: float = 0.0,
        preemptible: bool = True,
        use_cache: bool = True,
    ) -> int:
        """A sequence whose prompt is computed here. Its longest cached prefix is taken when it is first planned
        (at least the last prompt token is always computed; without ``use_cache`` every one is, and its blocks are published as
        those of any other). ``max_new_tokens`` 0: prefill only, the sequence becomes
        *done* after its sampled token and keeps its blocks until ``remove``. One that is not ``preemptible`` gets all blocks
        that it may ever need at once, and keeps them."""
    def reserve(
        self,
        tokens: Tokens,
        hashes: Hashes,
        root: bytes,
        *,
        max_new_tokens: int,
        priority: int = 0,
        arrival: float = 0.0,
        preemptible: bool = True,
        seats: int = 1,
    ) -> int | None:
        """A sequence whose prompt KV arrives from elsewhere. Takes the cached prefix and allocates the rest of the prompt
        (its last, partial block included) plus one block of head-room; None and no change if there is no room or ``max_num_seqs`` is reached.
        ``seats``: sequences that will run of it; those beyond the first are kept for its forks until it starts."""
    def start(self, seq: int, first_token: int) -> None:
        """The prompt's KV is here and valid: commits the prompt's full blocks and lets the sequence decode from ``first_token``."""
    def fork(self, seq: int, first_token: int, *, max_new_tokens: int) -> int | None:
        """Another choice over the same prompt: full blocks shared, the partial one copied (see ``StepPlan.copies``). Call before ``start`` or right after.
        One that is made before ``start`` starts with ``seq``, and can't be forked itself until then."""
    def plan(self, now: float) -> StepPlan: ...
    def plan_ahead(self, plan: StepPlan) -> StepPlan:
        """What follows the outstanding ``plan``, made before its tokens are known (``token_ids`` are 0): one more token of each of
        its sequences that has one to come as far as is known. Empty unless ``plan`` does nothing but decode and nobody waits to be
        served. It is the outstanding plan once ``plan`` is advanced, and aborted with it. A sequence that ends with ``plan`` keeps
        its blocks until this plan is over, and what is sampled for it here is ignored."""
    def advance(self, plan: StepPlan, sampled: Tokens) -> None:
        """The step ran; ``sampled[i]`` is the token of ``plan.seq[i]`` (ignored where ``sample`` is 0). Appends tokens, commits blocks that became full.
        An empty plan need not come back."""
    def abort_plan(self, plan: StepPlan) -> None:
        """The step did not run: nothing of it counts."""
    def remove(self, seq: int) -> None:
        """Ends a sequence in any state and gives its blocks back (cached where committed). One that is part of the
        outstanding plan is unknown from now on and ends with that plan."""
    def blocks(self, seq: int) -> Blocks: ...
    def cached_tokens(self, seq: int) -> int:
        """Prompt tokens found in the cache when the sequence first got blocks."""
    def computed_tokens(self, seq: int) -> int:
        """Tokens whose KV is in the sequence's blocks."""
    def output_tokens(self, seq: int) -> Tokens: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def reserved(self) -> int: ...
    @property
    def waiting_tokens(self) -> int:
        """Tokens still to be computed by waiting and by prefilling sequences; what the cache holds of a waiting one counts in full."""
    @property
    def host_blocks_used(self) -> int:
        """Blocks of the host pool that hold the KV of preempted sequences."""
    def check(self) -> None:
        """Raises CoreError if an invariant does not hold."""

# --- router core --------------------------------------------------------------------------

@final
class AdmissionConfig:
    """Limits of admission and placement, by keyword; CoreError names a field that is unknown or out of range.

    Queue, counted for each pool; 0: no limit: ``max_queue_requests`` (4096), ``max_queue_tokens`` and ``max_queue_bytes`` (0).
    ``queue_ttl_seconds`` (60) is the longest wait. Each ``ageing_seconds`` (10) of waiting raises a request by one priority.
    ``order_stretch`` (4; 0: by arrival): a request without a deadline is due that many times its expected compute later, so that
    short ones go first. ``max_bypass`` (32): requests that may go before one that does not fit yet.
    ``max_attempts`` (3) counts placements that failed before the client had a token, ``max_resumes`` (0) those after;
    ``max_refusals`` (64) those that a decode worker refused, which is not
    asked again for ``refusal_backoff_seconds`` (0.25) unless its load report changes.
    Tenants without own settings (``set_tenant``); 0: no limit: ``max_tenant_requests``, ``tenant_tokens_per_second``,
    ``tenant_burst_tokens`` (0: ten seconds' worth), ``tenant_max_priority`` (100; higher ones are lowered to it).
    Joint reservation; 0: no limit: ``prefill_window_tokens`` (16384; an idle worker takes any prompt), ``transfer_window_requests`` (32).
    Policy: ``refuse_without_workers`` (0: wait for a worker; 1: NO_WORKERS at once where a role has none at all),
    ``early_rejection`` (1: refuse what can't meet its deadline by a measured prediction), ``preemption`` (0; 1: a higher
    priority takes the place of a lower one before its first token, after ``preemption_grace_seconds`` 0.5),
    ``expected_output_ratio`` (0.5 of max_new_tokens, until outputs were seen), ``harm_weight`` (0.1 s of delay for a second of
    slowed streams), ``prefix_fetch`` and ``local_prefill`` (0), ``prior_prefill_seconds``, ``prior_prefill_token_seconds``,
    ``prior_transfer_seconds``, ``prior_transfer_block_seconds`` (cost models until measured), ``index_max_bytes`` (256 MiB; 0: no limit),
    ``retry_after_min_seconds`` (0.05), ``retry_after_max_seconds`` (60).
    """

    FIELDS: ClassVar[list[str]]

    def __init__(self, **limits: float | int) -> None: ...
    max_queue_requests: int
    max_queue_tokens: int
    max_queue_bytes: int
    queue_ttl_seconds: float
    ageing_seconds: float
    order_stretch: float
    max_bypass: int
    max_attempts: int
    max_resumes: int
    max_refusals: int
    retry_backoff_seconds: float
    refusal_backoff_seconds: float
    max_tenant_requests: int
    tenant_tokens_per_second: float
    tenant_burst_tokens: float
    tenant_max_priority: int
    prefill_window_tokens: int
    transfer_window_requests: int
    refuse_without_workers: int
    early_rejection: int
    preemption: int
    preemption_grace_seconds: float
    expected_output_ratio: float
    harm_weight: float
    prefix_fetch: int
    local_prefill: int
    prior_prefill_seconds: float
    prior_prefill_token_seconds: float
    prior_transfer_seconds: float
    prior_transfer_block_seconds: float
    index_max_bytes: int
    retry_after_min_seconds: float
    retry_after_max_seconds: float

@final
class RouterCore:
    """Admission, placement and prefix index of one router: events and time in, actions out.

    Thread-safe; every call is short. Events for ``advance``, as ``event`` (``detail``):

    - ``decode_reserved``: the decode worker holds its blocks.
    - ``decode_refused``: it has no room. Nothing runs yet, so the request is queued again at once (attempt + 1, ahead of its
      tenant's others; no attempt is burnt); legal before ``decode_reserved`` only.
    - ``prefill_started``: optional; makes the measured prefill time exact.
    - ``first_token``: PrefillDone came. Ignored if ``handoff_done`` has overtaken it.
    - ``handoff_done``: the decode worker holds all KV.
    - ``token`` (count, "1"): optional; output tokens of all choices since the last one. Teaches the expected output.
    - ``delivered``: a token was given to the client: from now on a failure is final.
    - ``finished``: the answer is complete.
    - ``cancel``, ``deadline``: of the request, whatever its attempt; ``attempt`` is not looked at.
    - ``worker_lost`` ("prefill" | "decode" | ""): that worker of the attempt is gone. Losing the prefill worker after the
      hand-off changes nothing.
    - ``attempt_failed`` ("REASON", "REASON:prefill" or "REASON:decode"; REASON is a FailureReason of worker.proto, with or
      without its prefix).
    - ``requeue``: both legs of the failed or preempted attempt are cleared; Retrying becomes Queued, attempt + 1.

    Late events (an older attempt, a terminal or forgotten request, legs of an attempt in Retrying) are not applied. Any other
    event that is not legal in the state raises ``CoreError`` ("event=X; state=Y") and changes nothing.
    """

    STATES: ClassVar[list[str]]
    EVENTS: ClassVar[list[str]]
    TRANSITIONS: ClassVar[list[tuple[str, str, str]]]
    """(event, state, result) for all pairs; result: target states joined by " or ", "ignored" or "error"."""

    def __init__(self, config: AdmissionConfig) -> None: ...
    # cluster view
    def upsert_worker(
        self,
        now: float,
        name: str,
        incarnation: int,
        pool: str,
        role: str,
        state: str,
        fingerprint: str,
        num_blocks: int,
        block_tokens: int,
        max_num_seqs: int,
        adapters: Sequence[str] = (),
    ) -> None:
        """Adds or updates a worker. Another incarnation replaces the old one as if it had been removed. role: "prefill"|"decode"; state: "starting"|"ready"|"draining"|"flipping"."""
    def remove_worker(self, now: float, name: str, incarnation: int) -> None:
        """Its reservations and its part of the index are gone at once. Send ``worker_lost`` for ``requests_on`` it (ask before)."""
    def report_load(
        self,
        now: float,
        name: str,
        incarnation: int,
        running: int,
        waiting: int,
        waiting_prefill_tokens: int,
        available_blocks: int,
        step_seconds: float,
    ) -> None: ...
    def quarantine(
        self, now: float, name: str, incarnation: int, until: float, probation: bool = False
    ) -> None:
        """No placement before ``until``; with ``probation`` one after it, and no other before the next call of this."""
    def observe_prefill(
        self, name: str, incarnation: int, tokens: int, cached_tokens: int, seconds: float
    ) -> None:
        """A prefill worker computed ``tokens`` after ``cached_tokens`` in ``seconds``: teaches its cost model. Without any,
        the core learns from the events of requests that found the worker idle."""
    def observe_transfer(self, name: str, incarnation: int, blocks: int, seconds: float) -> None:
        """The worker pulled ``blocks`` in ``seconds``."""
    def predict_transfer(self, name: str, incarnation: int, blocks: int) -> float:
        """Seconds that a pull of ``blocks`` blocks by the worker is expected to take; 0 for an unknown incarnation."""
    def set_cost_model(
        self,
        name: str,
        incarnation: int,
        kind: str,
        base_seconds: float,
        per_unit_seconds: float,
        per_context_seconds: float = 0.0,
    ) -> None:
        """Seeds a cost model of a worker, as a calibration at its start found it. kind: "prefill" (units: uncached tokens; context:
        uncached tokens x mean context), "transfer" (units: blocks), "step" (units: sequences; context: tokens). A new worker without
        one starts from its last incarnation's model, or from the like worker that was measured most."""
    def set_tenant(
        self,
        now: float,
        tenant: str,
        *,
        weight: float = 1.0,
        max_requests: int = 0,
        tokens_per_second: float = 0.0,
        burst_tokens: float = 0.0,
        max_priority: int = 100,
    ) -> None:
        """Own limits of a tenant instead of the defaults. ``weight``: its share against other tenants of its band."""
    def configure(self, now: float, config: AdmissionConfig) -> None:
        """Other limits from now on, as if the core had begun with them; requests that wait keep the end of their time in the queue.
        CoreError for another value of a field that counts at the start alone: ``index_max_bytes``, ``expected_output_ratio`` and
        ``prior_*``."""
    def workers(self) -> list[dict[str, object]]: ...
    def requests_on(self, name: str, incarnation: int) -> list[tuple[int, int]]:
        """(request, attempt) of all attempts that need the worker now."""
    # prefix index
    def index_stored(
        self, name: str, incarnation: int, hashes: Hashes, *, tier: str = "device", counted: bool = False
    ) -> None:
        """The worker holds these blocks. Idempotent; with ``counted`` each call is one more copy, ended by as many removals. tier: "device"|"host"."""
    def index_removed(self, name: str, incarnation: int, hashes: Hashes, *, tier: str = "device") -> None: ...
    def index_cleared(self, name: str, incarnation: int) -> None: ...
    def index_hashes(self, name: str, incarnation: int, *, tier: str = "device") -> Hashes:
        """All blocks that the worker holds in the tier, in no order."""
    def longest_prefix(self, hashes: Hashes) -> list[tuple[str, int]]:
        """(worker, leading blocks) of each worker that holds the first block, in the order of their registration slots. Exact where a
        worker holds all ancestors of what it holds, as block managers that evict leaves first do."""
    # requests
    def submit(
        self,
        now: float,
        request_id: str,
        pool: str,
        prompt_tokens: int,
        max_new_tokens: int,
        hashes: Hashes,
        *,
        n: int = 1,
        priority: int = 0,
        tenant: str = "",
        deadline: float = 0.0,
        bytes: int = 0,
        preemptible: bool = True,
        adapter: str = "",
        prefer: list[tuple[str, int, int]] = ...,
    ) -> Submission:
        """``deadline`` is on the clock of ``now``; 0: none. ``preemptible`` False: no higher priority takes its place. ``adapter``: only
        workers that have it are chosen; empty: the base model. ``prefer``: name, incarnation and blocks of up to 8 workers that served
        the last turn of its session (blocks: leading ones of this prompt that they then had). CoreError for arguments out of range; a refusal is a Submission."""
    def plan(self, now: float) -> list[Action]:
        """Places what can be placed, expires what must expire. Call after submit, after advance and on a timer."""
    def next_wake(self, now: float) -> float | None:
        """When ``plan`` has something to do with no new event; None if never."""
    def advance(self, now: float, request: int, attempt: int, event: str, detail: str = "") -> Transition:
        """Applies an event; see EVENTS and docs/lifecycle.md. An event of an older attempt is ignored (``applied`` False)."""
    def extend(self, request: int, prompt_tokens: int, max_new_tokens: int, hashes: Hashes) -> bool:
        """In Retrying, of a request of which the client has tokens: they are the end of its prompt now, ``max_new_tokens`` is what is
        left to generate. CoreError in another state; False if it has ended."""
    def forget(self, request: int) -> None:
        """Drops a request in a terminal state (CoreError otherwise). Until then its request id is a duplicate."""
    def state(self, request: int) -> str: ...
    def stats(self) -> dict[str, int]:
        """queued, queued_tokens, queued_bytes, state_<State>, requests, reservations, workers, tenants, bypassed, preempted,
        index_blocks, index_bytes, index_evicted, refused_<REASON>."""
    def queues(self) -> dict[str, tuple[int, int]]:
        """By pool: requests that wait in its queue, and their prompt tokens. Pools without any are left out."""
    def explain(self, request: int) -> dict[str, object]:
        """Why the last placement was made: cost terms of the chosen pair and of the best others, or the obstacle."""

    # recording
    def record(self, max_bytes: int) -> None:
        """Starts recording anew: the state, then all calls and outcomes, the newest ``max_bytes`` or down to half of them. 0 stops.
        Half the bytes later, and so on, the state is saved again, the index with it: some 20 ms a million blocks."""
    def recorded(self) -> bytes:
        """The log so far, compressed; empty if nothing was recorded and recording is off. It holds block hashes, ids and names, no
        tokens and no text. Compressing it keeps no other call waiting."""

@final
class ReplayReport:
    """What became of a log's calls when they were made again."""
    @property
    def calls(self) -> int: ...
    @property
    def placements(self) -> int: ...
    @property
    def equal(self) -> bool: ...
    @property
    def mismatch(self) -> str:
        """The first call whose outcome differs, with both outcomes; empty if none does."""

def replay_log(log: bytes, line: Callable[[str], object] | None = None) -> ReplayReport:
    """Makes all calls of ``RouterCore.recorded`` again and compares outcomes, up to the first difference. ``line`` gets a text
    for each call. CoreError if the bytes are damaged or not a log."""

@final
class Submission:
    @property
    def accepted(self) -> bool: ...
    @property
    def request(self) -> int: ...
    @property
    def reason(self) -> str:
        """UPPER_SNAKE reason of a refusal (see docs/errors.md); empty if accepted: DUPLICATE_REQUEST, TENANT_CONCURRENCY,
        TENANT_RATE, REQUEST_EXCEEDS_CAPACITY, NO_WORKERS, DEADLINE_EXCEEDED, DEADLINE_UNREACHABLE, QUEUE_FULL."""
    @property
    def limit(self) -> str:
        """The limit that was hit with its value, such as "max_queue_requests=4096"."""
    @property
    def retry_after(self) -> float:
        """Seconds; 0 where a retry does not help."""

@final
class Action:
    """``kind`` is "place" (prefill, decode, attempt are set), "end" (the request reached a terminal state with ``cause``) or
    "preempt" (cancel both legs of the attempt, then send ``requeue``)."""
    @property
    def kind(self) -> str: ...
    @property
    def request(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def by(self) -> int:
        """Of "preempt": the request that it gives way to."""
    @property
    def prefill(self) -> tuple[str, int]: ...
    @property
    def decode(self) -> tuple[str, int]: ...
    @property
    def fetch_from(self) -> tuple[str, int] | None:
        """With ``prefix_fetch``: the worker from which the one that computes the prompt should pull its beginning first."""
    @property
    def fetch_blocks(self) -> int:
        """Leading blocks of the prompt that ``fetch_from`` should hold; 0 without."""
    @property
    def local(self) -> bool:
        """With ``local_prefill``: the decode worker computes the prompt itself; ``prefill`` is the same worker."""
    @property
    def predicted_cached_blocks(self) -> int:
        """Leading blocks of the prompt that the prefill worker should find in its cache, a fetch included."""
    @property
    def predicted_decode_cached_blocks(self) -> int: ...
    @property
    def predicted_ttft_seconds(self) -> float: ...
    @property
    def state(self) -> str:
        """State after the action."""
    @property
    def cause(self) -> str:
        """Of an end: DEADLINE_EXCEEDED, QUEUE_TIMEOUT, NO_WORKERS or DEADLINE_UNREACHABLE."""
    @property
    def retry_after(self) -> float: ...

@final
class Transition:
    @property
    def applied(self) -> bool: ...
    @property
    def state(self) -> str:
        """State after the event; "Forgotten" for a request that was dropped."""
    @property
    def terminal(self) -> bool: ...
    @property
    def cause(self) -> str:
        """Of a terminal state and of Retrying; empty otherwise, and for Finished."""
    @property
    def attempt(self) -> int:
        """The attempt that runs or comes next."""
