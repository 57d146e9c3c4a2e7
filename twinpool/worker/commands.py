# SPDX-License-Identifier: Apache-2.0
"""What a router may ask of a worker, checked once more on arrival.

The router has validated the request already. The worker checks again what would otherwise corrupt its state or another
request's answer: a router of another version, or a bug in one, must not be able to publish a prompt under the wrong hash.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from twinpool._core import hash_blocks
from twinpool.engine.sampling import DrawParams, DrawParamsError, Grammars, SequenceDraw
from twinpool.ids import WorkerKey
from twinpool.transfer.base import AttemptKey
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.resume_pb2 import PortableRequest

HASH_BYTES = 16
"""Bytes of a block hash and of a root hash."""

MAX_CHOICES = 16
"""Most choices of one request."""

MAX_STOP_IDS = 1024
"""Most stop ids of one request, the model's own included."""

MAX_BIASES = 4096
"""Most tokens of one request whose logits are changed."""

SESSION_BYTES = 16
"""Bytes that stand for a session."""

_SamplingField: TypeAlias = Literal[
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
]
_SAMPLING_FIELDS: tuple[_SamplingField, ...] = get_args(_SamplingField)

Reason: TypeAlias = pb.FailureReason.ValueType


class CommandError(Exception):
    """A command that is refused. ``detail`` names field, value and limit, never prompt text."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Limits:
    """What a prompt must fit into on this worker. Lengths in tokens."""

    block_tokens: int
    num_blocks: int
    max_context_tokens: int
    max_num_seqs: int
    vocab_size: int

    def blocks_of(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens take, a partial last one included."""
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Prompt:
    """``tokens`` int32[n], ``hashes`` uint8[n // block_tokens, 16] of its full blocks, ``root`` 16 bytes."""

    tokens: NDArray[np.int32]
    hashes: NDArray[np.uint8]
    root: bytes

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Draw:
    """How both legs draw, and how many choices. A choice's index is part of its random numbers.

    ``drawn``: ids at the prompt's end that are output already; not 0 only where an answer goes on, with one choice.
    """

    params: DrawParams
    n: int
    drawn: int = 0
    grammars: Grammars | None = None

    @property
    def remaining(self) -> int:
        """Tokens that a choice may still have."""
        return self.params.max_tokens - self.drawn

    @property
    def use_cache(self) -> bool:
        """Whether whoever computes the prompt may take its beginning from a cache, which holds no logits."""
        return self.params.prompt_logprobs is None

    def sequence(
        self,
        prompt: Prompt,
        *,
        choice: int = 0,
        outputs: tuple[int, ...] = (),
        siblings: tuple[SequenceDraw, ...] = (),
    ) -> SequenceDraw:
        """The draw of a choice that has ``outputs`` besides what it had before the command."""
        asked = len(prompt) - self.drawn
        history = (*prompt.tokens[asked:].tolist(), *outputs)
        grammar = self.grammars.state(self.params.grammar) if self.grammars and self.params.grammar else None
        own = prompt.tokens[:asked]
        return SequenceDraw(
            self.params, own, choice=choice, outputs=history, siblings=siblings, grammar=grammar
        )


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """Who is believed to hold the prompt's first ``blocks`` full blocks."""

    owner: WorkerKey
    endpoint: str
    blocks: int


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """A checked PrefillCommand. ``deadline_seconds`` counts from its arrival; None: no deadline. ``epoch`` 0: any."""

    key: AttemptKey
    prompt: Prompt
    draw: Draw
    reader: WorkerKey
    reader_cached_blocks: int
    priority: int
    deadline_seconds: float | None
    prefix: PrefixSource | None = None
    preemptible: bool = True
    traceparent: str = ""
    session: bytes = b""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """A checked DecodeCommand. ``deadline_seconds`` counts from its arrival; None: no deadline. ``epoch`` 0: any.

    ``owner`` None: no other worker computes the prompt.
    """

    key: AttemptKey
    prompt: Prompt
    draw: Draw
    owner: WorkerKey | None
    owner_endpoint: str
    priority: int
    deadline_seconds: float | None
    prefix: PrefixSource | None = None
    preemptible: bool = True
    traceparent: str = ""
    portable: PortableRequest | None = None
    session: bytes = b""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class CancelWork:
    """A CancelCommand. Unknown attempts are acknowledged too. ``keep``: the answer is not over."""

    key: AttemptKey
    keep: bool = False


Work: TypeAlias = PrefillWork | DecodeWork | CancelWork


def parse_command(message: pb.SessionRequest, limits: Limits, grammars: Grammars | None = None) -> Work:
    """The checked form of any message but Hello. ``grammars``: who has compiled the grammars that come. Raises CommandError
    (INVALID) for a wrong one."""
    kind = message.WhichOneof("message")
    if kind == "cancel":
        return CancelWork(AttemptKey.of(message.cancel.id), message.cancel.keep)
    if kind == "prefill":
        return _prefill(message.prefill, limits, grammars)
    if kind == "decode":
        return _decode(message.decode, limits, grammars)
    raise _invalid(f"message {kind or 'without content'} is not a command")


def grammar_of(message: pb.SessionRequest) -> str:
    """The grammar that a command draws by; "": none."""
    kind = message.WhichOneof("message")
    command = message.prefill if kind == "prefill" else message.decode if kind == "decode" else None
    return command.draw.grammar if command is not None else ""


def attempt_of(message: pb.SessionRequest) -> AttemptKey | None:
    """The attempt that a command is about, also of a wrong command; None if it names none."""
    kind = message.WhichOneof("message")
    if kind not in ("prefill", "decode", "cancel"):
        return None
    return AttemptKey.of(getattr(message, kind).id)


def worker_key(message: pb.WorkerId, field: str) -> WorkerKey:
    """The key of a WorkerId. Raises CommandError (INVALID) naming ``field``."""
    try:
        return WorkerKey(message.name, message.incarnation)
    except ValueError as error:
        raise _invalid(f"{field}: {error}") from None


def worker_id(key: WorkerKey) -> pb.WorkerId:
    """The wire form of a key."""
    return pb.WorkerId(name=key.name, incarnation=key.incarnation)


def _invalid(detail: str) -> CommandError:
    return CommandError(pb.FAILURE_REASON_INVALID, detail)


def _prefill(command: pb.PrefillCommand, limits: Limits, grammars: Grammars | None) -> PrefillWork:
    key = _attempt(command.id)
    draw = _draw(command.draw, limits, grammars)
    prompt = _prompt(command.prompt, draw, limits)
    cached = command.reader_cached_blocks
    if cached > len(prompt.hashes):
        raise _invalid(f"reader_cached_blocks {cached} exceeds the prompt's {len(prompt.hashes)} full blocks")
    return PrefillWork(
        key=key,
        prompt=prompt,
        draw=draw,
        reader=worker_key(command.reader, "reader"),
        reader_cached_blocks=cached,
        priority=command.priority,
        deadline_seconds=_deadline(command),
        prefix=_prefix(command, prompt),
        preemptible=command.preemptible if command.HasField("preemptible") else True,
        traceparent=command.traceparent,
        session=_session(command),
        epoch=command.epoch,
    )


def _decode(command: pb.DecodeCommand, limits: Limits, grammars: Grammars | None) -> DecodeWork:
    key = _attempt(command.id)
    draw = _draw(command.draw, limits, grammars)
    prompt = _prompt(command.prompt, draw, limits)
    remote = command.HasField("owner")
    if remote != bool(command.owner_endpoint):
        raise _invalid(f"owner_endpoint is {'empty' if remote else 'set without an owner'}")
    return DecodeWork(
        key=key,
        prompt=prompt,
        draw=draw,
        owner=worker_key(command.owner, "owner") if remote else None,
        owner_endpoint=command.owner_endpoint,
        priority=command.priority,
        deadline_seconds=_deadline(command),
        prefix=_prefix(command, prompt),
        preemptible=command.preemptible if command.HasField("preemptible") else True,
        traceparent=command.traceparent,
        portable=_portable(command),
        session=_session(command),
        epoch=command.epoch,
    )


def _session(command: pb.PrefillCommand | pb.DecodeCommand) -> bytes:
    if len(command.session) not in (0, SESSION_BYTES):
        raise _invalid(f"session has {len(command.session)} bytes, not {SESSION_BYTES} or none")
    return command.session


def _portable(command: pb.DecodeCommand) -> PortableRequest | None:
    if not command.HasField("portable"):
        return None
    if not command.portable.stream_id or command.portable.n != command.draw.n:
        raise _invalid("portable names no stream, or another number of choices")
    return command.portable


def _prefix(command: pb.PrefillCommand | pb.DecodeCommand, prompt: Prompt) -> PrefixSource | None:
    if not command.HasField("prefix"):
        return None
    source = command.prefix
    if not source.endpoint:
        raise _invalid("prefix.endpoint is empty")
    if not 1 <= source.blocks <= len(prompt.hashes):
        raise _invalid(
            f"prefix.blocks is {source.blocks}, not 1 to the prompt's {len(prompt.hashes)} full blocks"
        )
    return PrefixSource(worker_key(source.owner, "prefix.owner"), source.endpoint, source.blocks)


def _attempt(message: pb.AttemptId) -> AttemptKey:
    if not message.request_id:
        raise _invalid("id.request_id is empty")
    if message.attempt < 1:
        raise _invalid("id.attempt is 0; attempts count from 1")
    return AttemptKey.of(message)


def _deadline(command: pb.PrefillCommand | pb.DecodeCommand) -> float | None:
    return command.deadline.ToNanoseconds() / 1e9 if command.HasField("deadline") else None


def _draw(spec: pb.DrawSpec, limits: Limits, grammars: Grammars | None) -> Draw:
    if not 1 <= spec.n <= MAX_CHOICES:
        raise _invalid(f"draw.n {spec.n} is not in 1..{MAX_CHOICES}")
    if len(spec.stop_token_ids) > MAX_STOP_IDS:
        raise _invalid(f"draw.stop_token_ids has {len(spec.stop_token_ids)} entries, limit {MAX_STOP_IDS}")
    sampling, stop = spec.sampling, spec.stop
    # The router has filled in every default. One that it left out would be drawn by another rule than it says.
    for name in _SAMPLING_FIELDS:
        if not sampling.HasField(name):
            raise _invalid(f"draw.sampling.{name} is not set")
    if not stop.HasField("max_tokens"):
        raise _invalid("draw.stop.max_tokens is not set")
    if len(spec.sampling.logit_bias) > MAX_BIASES:
        raise _invalid(
            f"draw.sampling.logit_bias has {len(spec.sampling.logit_bias)} entries, limit {MAX_BIASES}"
        )
    if spec.grammar and grammars is None:
        raise _invalid("draw.grammar is set; this worker cannot draw by grammars")
    try:
        params = DrawParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
            max_tokens=stop.max_tokens,
            min_tokens=stop.min_tokens,
            stop_token_ids=frozenset(spec.stop_token_ids),
            logit_bias=tuple((entry.token_id, entry.bias) for entry in sampling.logit_bias),
            grammar=spec.grammar,
            logprobs=spec.logprobs if spec.HasField("logprobs") else None,
            prompt_logprobs=spec.prompt_logprobs if spec.HasField("prompt_logprobs") else None,
        )
        params.check_vocabulary(limits.vocab_size)
    except DrawParamsError as error:
        raise _invalid(f"draw: {error}") from None
    if spec.drawn and (spec.n != 1 or spec.drawn >= params.max_tokens):
        raise _invalid(
            f"draw.drawn is {spec.drawn} with n {spec.n} and max_tokens {params.max_tokens};"
            " it needs one choice and a token that is left to draw"
        )
    if spec.drawn and params.prompt_logprobs is not None:
        raise _invalid(f"draw.prompt_logprobs is set with draw.drawn {spec.drawn}: who has tokens has them")
    return Draw(params, spec.n, spec.drawn, grammars)


def _prompt(spec: pb.PromptSpec, draw: Draw, limits: Limits) -> Prompt:
    if not spec.token_ids or len(spec.token_ids) % 4:
        raise _invalid(f"prompt.token_ids has {len(spec.token_ids)} bytes, not a positive multiple of 4")
    tokens = np.frombuffer(spec.token_ids, dtype="<i4").astype(np.int32)
    total = len(tokens) + draw.remaining
    if total > limits.max_context_tokens:
        raise _invalid(
            f"prompt of {len(tokens)} tokens and max_tokens {draw.remaining} exceed the context limit"
            f" {limits.max_context_tokens}"
        )
    if draw.drawn >= len(tokens):
        raise _invalid(f"draw.drawn is {draw.drawn}, of a prompt of {len(tokens)} tokens")
    # One block of head-room: what a decode worker reserves beyond the prompt.
    if limits.blocks_of(len(tokens)) + 1 > limits.num_blocks:
        raise _invalid(f"prompt of {len(tokens)} tokens does not fit into {limits.num_blocks} KV blocks")
    if int(tokens.min()) < 0 or int(tokens.max()) >= limits.vocab_size:
        raise _invalid(f"prompt.token_ids holds an id outside the vocabulary of {limits.vocab_size}")
    return Prompt(tokens, _hashes(spec, tokens, limits), spec.root_hash)


def _hashes(spec: pb.PromptSpec, tokens: NDArray[np.int32], limits: Limits) -> NDArray[np.uint8]:
    if len(spec.root_hash) != HASH_BYTES:
        raise _invalid(f"prompt.root_hash has {len(spec.root_hash)} bytes, not {HASH_BYTES}")
    full = len(tokens) // limits.block_tokens
    if len(spec.block_hashes) != full * HASH_BYTES:
        raise _invalid(
            f"prompt.block_hashes has {len(spec.block_hashes)} bytes, not {full * HASH_BYTES}:"
            f" {len(tokens)} tokens are {full} full blocks of {limits.block_tokens}"
        )
    # Hashing costs about a microsecond a block; a wrong hash would hand this prompt's KV to another one.
    expected = hash_blocks(spec.root_hash, tokens, limits.block_tokens)
    if expected.tobytes() != spec.block_hashes:
        raise _invalid("prompt.block_hashes are not the hashes of prompt.token_ids under prompt.root_hash")
    return expected
