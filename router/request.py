# SPDX-License-Identifier: Apache-2.0
"""A request after validation: everything that the later hops need, with all defaults filled in."""

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from twinpool.rpc import Deadline
from twinpool.tracing import OFF, Span
from twinpool.v1 import inference_pb2 as inference
from twinpool.v1.resume_pb2 import PortableRequest, TurnForm

# gRPC ends a call at its deadline by another clock than ours.
_CLOCK_SLACK_SECONDS: Final = 0.02


def passed(deadline: Deadline) -> bool:
    """Whether a call that ended now has ended by its deadline."""
    left = deadline.remaining()
    return left is not None and left <= _CLOCK_SLACK_SECONDS


def session_bytes(tenant: str, session_id: str) -> bytes:
    """16 bytes for a session: other ones for the same id of another tenant."""
    owner = tenant.encode()
    return hashlib.sha256(len(owner).to_bytes(8, "little") + owner + session_id.encode()).digest()[:16]


def group_label(pool: str, model: str, fingerprint: str) -> str:
    """What the core calls the pool of a group of workers. A pool's name has no slash, so no two groups share one."""
    return f"{pool}/{fingerprint}/{model}"


@dataclass(frozen=True, slots=True)
class Group:
    """Workers that may serve one another's requests: same pool, model and fingerprint.

    ``label`` is what the core calls the pool, so that no placement ever mixes two models or two KV formats that
    happen to share a pool's name. Limits are the smallest over the group's workers.
    """

    pool: str
    model: str
    fingerprint: str
    family: str
    vocab_size: int
    block_tokens: int
    max_context_tokens: int
    num_blocks: int
    eos_token_ids: tuple[int, ...]
    model_path: str

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into the KV pool of its smallest worker, even when that is idle."""
        return self.num_blocks * self.block_tokens

    @property
    def label(self) -> str:
        """Unique among groups."""
        return group_label(self.pool, self.model, self.fingerprint)


@dataclass(frozen=True, slots=True)
class Params:
    """What a request asks for besides its prompt, checked and complete. ``max_tokens`` 0: what the context leaves."""

    sampling: inference.SamplingParams
    max_tokens: int
    min_tokens: int
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    include_stop: bool
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    priority: int
    preemptible: bool
    tenant: str
    adapter: str
    session_id: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready for admission.

    ``request_id`` is minted by the router and unique in the cluster; ``client_id`` is what the client called it.
    ``tokens`` is int32 ``[prompt]``; ``hashes`` uint8 ``[full blocks, 16]``. ``arrival`` and ``tokenized`` are
    ``time.monotonic()`` seconds. ``stop_token_ids`` holds the model's own too, unless they are to be ignored. ``drawn``: ids at
    the prompt's end that are output already, where an answer goes on. ``include_stop``: whether a stop
    string is part of the text. ``grammar``: what the output must follow.
    ``kept_tokens``: special tokens that are part of the text. ``turn``: how it is read, where it is the turn of a conversation.
    ``portable``: what another router needs of it, if it can
    be resumed; the decode worker keeps it.
    ``prompt_logprobs``: alternatives to report a position of the prompt, by whoever computes it. ``pool_reason``: why it goes to
    the pool of its group, for people; "": the model has no other.
    """

    request_id: str
    client_id: str
    group: Group
    tokens: NDArray[np.int32]
    hashes: NDArray[np.uint8]
    root: bytes
    sampling: inference.SamplingParams
    max_tokens: int
    min_tokens: int
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    n: int
    logprobs: int | None
    priority: int
    preemptible: bool
    tenant: str
    size_bytes: int
    arrival: float
    tokenized: float
    deadline: Deadline
    drawn: int = 0
    include_stop: bool = False
    grammar: str = ""
    kept_tokens: tuple[str, ...] = ()
    turn: TurnForm | None = None
    adapter: str = ""
    span: Span = OFF
    portable: PortableRequest | None = None
    prompt_logprobs: int | None = None
    session_id: str = ""
    pool_reason: str = ""

    @property
    def session(self) -> bytes:
        """What stands for its session on workers; b"" if it has none."""
        return session_bytes(self.tenant, self.session_id) if self.session_id else b""

    @property
    def remaining_tokens(self) -> int:
        """Tokens that a choice may still have."""
        return self.max_tokens - self.drawn

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.tokens)

    @property
    def cacheable_hashes(self) -> NDArray[np.uint8]:
        """Hashes of what a cache may give the prompt: a cache holds no logits, so none where they are wanted."""
        return self.hashes if self.prompt_logprobs is None else self.hashes[:0]
