# SPDX-License-Identifier: Apache-2.0
"""Typed stub of the C++ core (``twinpool._core``).

The core does no I/O and reads no clock: ``now`` is seconds, passed in. Hashes are
16-byte values; arrays of them are ``uint8[n, 16]``, C-contiguous. Token ids are ``int32``.
Everything that the core returns as an array is a fresh array unless it says "view".
"""

from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint8]  # [n, 16]
Tokens = NDArray[np.int32]
Blocks = NDArray[np.int32]

# --- hash ---------------------------------------------------------------------------------

def root_hash(fingerprint: bytes, tenant_salt: bytes, adapter: bytes) -> bytes:
    """128-bit root of a namespace: SHA-256 over typed, length-prefixed fields, first 16 bytes."""

def hash_blocks(parent: bytes, tokens: Tokens, block_tokens: int) -> Hashes:
    """Chained hashes of the *full* blocks of ``tokens``; a partial last block has none."""

def block_digest(data: int, stride_bytes: int, length_bytes: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64-bit digest of each of ``n`` CPU blocks at address ``data + i * stride_bytes``."""

# --- blocks -------------------------------------------------------------------------------

class CoreError(Exception):
    """A caller broke a rule of the core. The message names the rule; the core is unchanged."""

@final
class BlockManager:
    """Owns the physical blocks of one KV pool: free list, prefix cache, pins, quarantine.

    ``generations`` is kept by reference and raised in place whenever a block is given to new
    content; the caller registers that memory with NIXL. A block is in exactly one of these
    states: free, held (reference count > 0 by sequences or pins), cached (content, no
    reference, evictable leaves first by LRU), quarantined.
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
    def lookup(self, hashes: Hashes) -> int:
        """Number of leading hashes that are cached or held. Does not change the LRU order."""
    def acquire_prefix(self, hashes: Hashes) -> Blocks:
        """Takes one reference on each block of the longest cached prefix and returns them."""
    def allocate(self, count: int) -> Blocks | None:
        """Takes ``count`` new blocks (reference 1, generation raised), evicting if needed; None and no change if it can't."""
    def reference(self, blocks: Blocks) -> None:
        """One more reference on each (sharing between choices)."""
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
        """Blocks whose content ended (freed or evicted) since the last call; tests poison them."""
    def drain_events(self) -> list[tuple[str, Hashes, bytes]]:
        """Cache events since the last call: ``("stored", hashes, parent)`` or ``("removed", hashes, b"")``."""
    def reset_cache(self) -> int:
        """Evicts every unreferenced cached block; returns how many."""
    def check(self) -> None:
        """Raises CoreError if an invariant does not hold."""

# --- step scheduler -----------------------------------------------------------------------

@final
class SchedulerConfig:
    """Limits of a step. ``policy`` is "fcfs" or "priority"."""
    def __init__(self, *, max_num_seqs: int = 64, max_batched_tokens: int = 2048, max_chunk_tokens: int = 512, policy: str = "fcfs") -> None: ...
    max_num_seqs: int
    max_batched_tokens: int
    max_chunk_tokens: int
    policy: str

@final
class StepPlan:
    """What the next step runs, as flat arrays. Sequences are ordered decodes first.

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
        """Sequences that lost their blocks in this plan; they wait again and are recomputed."""
    @property
    def copies(self) -> NDArray[np.int32]:
        """``[m, 2]`` (source block, destination block) copies to do before the step (copy on write)."""

@final
class StepScheduler:
    """Plans steps over a BlockManager. Sequences are identified by handles that ``add`` returns.

    A sequence starts either *waiting* (its prompt is to be computed here: prefill role, or recompute)
    or *remote* (its KV arrives by transfer: ``reserve`` then ``start``).
    """
    def __init__(self, blocks: BlockManager, config: SchedulerConfig) -> None: ...
    def add(self, tokens: Tokens, hashes: Hashes, root: bytes, *, max_new_tokens: int, priority: int = 0, arrival: float = 0.0) -> int:
        """A sequence whose prompt is computed here. Its longest cached prefix is taken when it is first planned
        (at least the last prompt token is always computed). ``max_new_tokens`` 0: prefill only, the sequence becomes
        *done* after its sampled token and keeps its blocks until ``remove``."""
    def reserve(self, tokens: Tokens, hashes: Hashes, root: bytes, *, max_new_tokens: int, priority: int = 0, arrival: float = 0.0) -> int | None:
        """A sequence whose prompt KV arrives from elsewhere. Takes the cached prefix and allocates the rest of the prompt
        (its last, partial block included) plus one block of head-room; None and no change if there is no room or ``max_num_seqs`` is reached."""
    def start(self, seq: int, first_token: int) -> None:
        """The prompt's KV is here and valid: commits the prompt's full blocks and lets the sequence decode from ``first_token``."""
    def fork(self, seq: int, first_token: int, *, max_new_tokens: int) -> int | None:
        """Another choice over the same prompt: full blocks shared, the partial one copied (see ``StepPlan.copies``). Call before ``start`` or right after."""
    def plan(self, now: float) -> StepPlan: ...
    def advance(self, plan: StepPlan, sampled: Tokens) -> None:
        """The step ran; ``sampled[i]`` is the token of ``plan.seq[i]`` (ignored where ``sample`` is 0). Appends tokens, commits blocks that became full."""
    def abort_plan(self, plan: StepPlan) -> None:
        """The step did not run: nothing of it counts."""
    def remove(self, seq: int) -> None:
        """Ends a sequence in any state between plans and gives its blocks back (cached where committed)."""
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
    def waiting_tokens(self) -> int: ...

# --- router core --------------------------------------------------------------------------

@final
class AdmissionConfig:
    """Limits of admission. Zero means no limit where it says so."""
    def __init__(self, **limits: float | int) -> None: ...
    max_queue_requests: int
    max_queue_tokens: int
    max_queue_bytes: int
    queue_ttl_seconds: float
    max_attempts: int
    ageing_seconds: float
    prefill_window_tokens: int
    transfer_window_requests: int

@final
class RouterCore:
    """Admission, placement and prefix index of one router: events and time in, actions out."""

    STATES: ClassVar[list[str]]
    EVENTS: ClassVar[list[str]]

    def __init__(self, config: AdmissionConfig) -> None: ...
    # cluster view
    def upsert_worker(self, now: float, name: str, incarnation: int, pool: str, role: str, state: str, fingerprint: str, num_blocks: int, block_tokens: int, max_num_seqs: int) -> None:
        """Adds or updates a worker. Another incarnation replaces the old one as if it had been removed. role: "prefill"|"decode"; state: "starting"|"ready"|"draining"|"flipping"."""
    def remove_worker(self, now: float, name: str, incarnation: int) -> None: ...
    def report_load(self, now: float, name: str, incarnation: int, running: int, waiting: int, waiting_prefill_tokens: int, available_blocks: int, step_seconds: float) -> None: ...
    def quarantine(self, now: float, name: str, incarnation: int, until: float) -> None: ...
    def workers(self) -> list[dict[str, object]]: ...
    # prefix index
    def index_stored(self, name: str, incarnation: int, hashes: Hashes) -> None: ...
    def index_removed(self, name: str, incarnation: int, hashes: Hashes) -> None: ...
    def index_cleared(self, name: str, incarnation: int) -> None: ...
    def longest_prefix(self, hashes: Hashes) -> list[tuple[str, int]]: ...
    # requests
    def submit(self, now: float, request_id: str, pool: str, prompt_tokens: int, max_new_tokens: int, hashes: Hashes, *, n: int = 1, priority: int = 0, tenant: str = "", deadline: float = 0.0, bytes: int = 0) -> "Submission": ...
    def plan(self, now: float) -> list["Action"]:
        """Places what can be placed, expires what must expire. Call after submit, after advance and on a timer."""
    def next_wake(self, now: float) -> float | None:
        """When ``plan`` has something to do with no new event; None if never."""
    def advance(self, now: float, request: int, attempt: int, event: str, detail: str = "") -> "Transition":
        """Applies an event; see EVENTS and docs/lifecycle.md. An event of an older attempt is ignored (``applied`` False)."""
    def forget(self, request: int) -> None:
        """Drops a request in a terminal state."""
    def state(self, request: int) -> str: ...
    def stats(self) -> dict[str, int]:
        """queued, queued_tokens, in_flight per state, reservations, workers, index_blocks."""
    def explain(self, request: int) -> dict[str, object]:
        """Why the last placement was made: cost terms of the chosen pair and of the best others."""

@final
class Submission:
    @property
    def accepted(self) -> bool: ...
    @property
    def request(self) -> int: ...
    @property
    def reason(self) -> str:
        """UPPER_SNAKE reason of a refusal (see docs/errors.md); empty if accepted."""
    @property
    def limit(self) -> str: ...
    @property
    def retry_after(self) -> float: ...

@final
class Action:
    """``kind`` is "place" (prefill, decode, attempt are set) or "end" (the request reached a terminal state with ``cause``)."""
    @property
    def kind(self) -> str: ...
    @property
    def request(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def prefill(self) -> tuple[str, int]: ...
    @property
    def decode(self) -> tuple[str, int]: ...
    @property
    def predicted_cached_blocks(self) -> int: ...
    @property
    def predicted_ttft_seconds(self) -> float: ...
    @property
    def cause(self) -> str: ...
    @property
    def retry_after(self) -> float: ...

@final
class Transition:
    @property
    def applied(self) -> bool: ...
    @property
    def state(self) -> str: ...
    @property
    def terminal(self) -> bool: ...
    @property
    def cause(self) -> str: ...
