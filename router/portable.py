# SPDX-License-Identifier: Apache-2.0
"""A request as another router can go on with it: to ``PortableState`` and back.

Everything that the tokens depend on is in it: the prompt's ids, the sampling with its seed, the limits and stop conditions of
the whole answer, and what was drawn. The text side is made anew from the tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from google.protobuf.duration_pb2 import Duration
from numpy.typing import NDArray

from twinpool._core import hash_blocks
from twinpool.errors import TwinpoolError
from twinpool.ids import new_request_id
from twinpool.kv_events import HASH_BYTES
from twinpool.router.journal import Journal
from twinpool.router.request import Group, Prepared
from twinpool.router.stream import Answer
from twinpool.rpc import Deadline
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1.resume_pb2 import PortableChoice, PortableRequest, PortableState

MOVES_MAX: Final = 1 << 20
"""More often than any answer moves; a number beyond is made up."""


def made_portable(prepared: Prepared, grace_seconds: float, key: bytes, digest: bytes) -> Prepared:
    """The request with all that another router needs of it. ``key`` and ``digest``: see the protocol."""
    grace = Duration()
    grace.FromNanoseconds(int(grace_seconds * 1e9))
    portable = PortableRequest(
        # Unique in the cluster, and kept when the request gets another id on another router.
        stream_id=prepared.request_id,
        client_id=prepared.client_id,
        tenant=prepared.tenant,
        model=prepared.group.model,
        fingerprint=prepared.group.fingerprint,
        pool=prepared.group.pool,
        sampling=prepared.sampling,
        stop=pb.StopConditions(
            max_tokens=prepared.max_tokens,
            min_tokens=prepared.min_tokens,
            stop_strings=prepared.stop_strings,
            stop_token_ids=prepared.stop_token_ids,
            ignore_eos=prepared.ignore_eos,
            include_stop=prepared.include_stop,
        ),
        n=prepared.n,
        logprobs=prepared.logprobs,
        prompt_logprobs=prepared.prompt_logprobs,
        priority=prepared.priority,
        preemptible=prepared.preemptible,
        adapter=prepared.adapter,
        grace=grace,
        key=key,
        digest=digest,
        grammar=prepared.grammar,
        kept_tokens=prepared.kept_tokens,
        root_hash=prepared.root,
        turn=prepared.turn,
        session_id=prepared.session_id,
    )
    return replace(prepared, portable=portable)


def state_of(prepared: Prepared, journal: Journal) -> PortableState:
    """The request as it stands."""
    return PortableState(
        request=prepared.portable,
        prompt=_packed(prepared.tokens),
        choices=[
            PortableChoice(token_ids=_packed(np.array(tokens, np.int32)), logprobs=logprobs)
            for tokens, logprobs in zip(journal.outputs, journal.logprobs, strict=True)
        ],
        finished=journal.finished,
        deadline=prepared.deadline.to_proto(),
        worker=journal.finished.decode_worker if journal.finished is not None else "",
    )


def prepared_of(state: PortableState, group: Group) -> Prepared:
    """The request as it arrived at its first router, with an id of its own for this one."""
    request, now = state.request, time.monotonic()
    tokens = _unpacked(state.prompt)
    sound = 1 <= request.n <= 16 and len(state.choices) in (0, request.n) and request.moves < MOVES_MAX
    sound = sound and len(request.root_hash) == HASH_BYTES
    if not len(tokens) or not sound:
        raise TwinpoolError("INTERNAL", "the state of the answer makes no sense")
    hashes = hash_blocks(request.root_hash, tokens, group.block_tokens)
    moved = PortableRequest()
    moved.CopyFrom(request)
    moved.moves += 1
    return Prepared(
        request_id=new_request_id(),
        client_id=request.client_id,
        group=group,
        tokens=tokens,
        hashes=hashes,
        root=request.root_hash,
        sampling=request.sampling,
        max_tokens=request.stop.max_tokens,
        min_tokens=request.stop.min_tokens,
        stop_strings=tuple(request.stop.stop_strings),
        stop_token_ids=tuple(request.stop.stop_token_ids),
        ignore_eos=request.stop.ignore_eos,
        include_stop=request.stop.include_stop,
        n=request.n,
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        priority=request.priority,
        preemptible=request.preemptible,
        adapter=request.adapter,
        tenant=request.tenant,
        size_bytes=tokens.nbytes + hashes.nbytes,
        arrival=now,
        tokenized=now,
        deadline=Deadline.from_proto(state.deadline if state.HasField("deadline") else None),
        grammar=request.grammar,
        kept_tokens=tuple(request.kept_tokens),
        turn=request.turn if request.HasField("turn") else None,
        portable=moved,
        session_id=request.session_id,
    )


def outputs_of(state: PortableState) -> list[NDArray[np.int32]]:
    """What was drawn, a row a choice."""
    if not state.choices:
        return [np.zeros(0, np.int32)] * state.request.n
    return [_unpacked(choice.token_ids) for choice in state.choices]


def replayed(
    answer: Answer, prepared: Prepared, state: PortableState, next_index: Sequence[int]
) -> list[pb.GenerateResponse]:
    """Fills a new answer with what was drawn, and returns the messages that this makes.

    Where log-probabilities were asked for and are not known, only as many tokens as the client has are taken: the rest is drawn
    again, with them.
    """
    messages: list[pb.GenerateResponse] = []
    for index, row in enumerate(outputs_of(state)):
        known = state.choices[index].logprobs if state.choices else ()
        if prepared.logprobs is not None and len(known) != len(row):
            row, known = row[: next_index[index] if index < len(next_index) else 0], ()
        tokens = row.tolist()
        finish = _finish_of(prepared, tokens[-1], len(tokens) - 1) if tokens else pb.FINISH_REASON_UNSPECIFIED
        messages += answer.replay(index, tokens, finish, list(known))
    return messages


def scored_anew(state: PortableState, next_index: Sequence[int]) -> PortableState:
    """Log-probabilities of the prompt are kept by no state: a client that has no token yet may lack them, and they come only with
    computing the prompt. Then what was drawn is drawn again."""
    if not state.request.HasField("prompt_logprobs") or any(next_index):
        return state
    anew = PortableState()
    anew.CopyFrom(state)
    anew.ClearField("choices")
    anew.ClearField("finished")
    return anew


def progress(state: PortableState) -> tuple[int, bool, int]:
    """Of two states of one stream the greater is the later one."""
    drawn = sum(len(choice.token_ids) for choice in state.choices)
    return state.request.moves, state.HasField("finished"), drawn


def _finish_of(prepared: Prepared, token: int, at: int) -> pb.FinishReason.ValueType:
    """Whether the token at a position ends its choice: the rule by which workers draw."""
    if token in prepared.stop_token_ids and at + 1 >= prepared.min_tokens:
        return pb.FINISH_REASON_STOP
    return pb.FINISH_REASON_LENGTH if at + 1 >= prepared.max_tokens else pb.FINISH_REASON_UNSPECIFIED


def _packed(tokens: NDArray[np.int32]) -> bytes:
    return tokens.astype("<i4", copy=False).tobytes()


def _unpacked(data: bytes) -> NDArray[np.int32]:
    if len(data) % 4:
        raise TwinpoolError("INTERNAL", "the state of the answer makes no sense")
    return np.frombuffer(data, "<i4").astype(np.int32)
