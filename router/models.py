# SPDX-License-Identifier: Apache-2.0
"""Which models the cluster serves, by which groups of workers, and their tokenizers."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.membership import takes_work
from twinpool.router.choice import Offer, PoolRule, choose
from twinpool.router.request import Group
from twinpool.router.tokenize import TokenizeHop
from twinpool.text import Tokenizer, TokenizerLoadError
from twinpool.v1 import control_pb2, worker_pb2
from twinpool.v1 import inference_pb2 as pb

log = get_logger(__name__)

_RELOAD_SECONDS: Final = (0.5, 1.0, 2.0, 5.0, 10.0)

NO_RULE: Final = PoolRule()

GroupId = tuple[str, str, str]


@dataclass(slots=True)
class _Members:
    """The workers of one group."""

    records: dict[WorkerKey, control_pb2.WorkerRecord] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    load_error: str = ""
    # Made anew when the membership changes, not for every request.
    group: Group | None = None

    def ready(self, role: worker_pb2.Role.ValueType) -> int:
        """Workers of a role that take work."""
        return sum(record.role == role and takes_work(record) for record in self.records.values())

    @property
    def complete(self) -> bool:
        """Whether a request can be placed at all."""
        return self.ready(worker_pb2.ROLE_PREFILL) > 0 and self.ready(worker_pb2.ROLE_DECODE) > 0

    @property
    def pool(self) -> str:
        """The pool that they are of."""
        return self.group.pool if self.group is not None else ""

    @property
    def servable(self) -> bool:
        """Whether a request can be understood and placed."""
        return self.complete and self.tokenizer is not None


@dataclass(frozen=True, slots=True)
class Target:
    """What answers a request for a model."""

    group: Group
    tokenizer: Tokenizer
    why: str = ""
    """Why its pool was chosen, for people."""


def group_id(record: control_pb2.WorkerRecord) -> GroupId:
    """Workers with equal ids may serve one another's requests."""
    return record.pool, record.model, record.fingerprint


class ModelTable:
    """Follows the workers; answers which group and which tokenizer a model name means."""

    def __init__(self, tokenize: TokenizeHop, rules: Mapping[str, PoolRule] | None = None) -> None:
        """``rules``: what is configured of pools. A rule's ``model_path`` is used where the workers' own path does not exist: a
        router on another machine."""
        self._tokenize = tokenize
        self._rules = rules or {}
        self._members: dict[GroupId, _Members] = {}
        # Of every path that was ever loaded: a model whose last worker restarts is back without a reload.
        self._tokenizers: dict[str, Tokenizer] = {}
        # By the workers' own path and their pool: where their tokenizer is read from here.
        self._paths: dict[tuple[str, str], str] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._known = {rule.model for rule in self._rules.values() if rule.model}

    def close(self) -> None:
        """Ends what is still loading."""
        for task in self._loading.values():
            task.cancel()

    def upsert(self, key: WorkerKey, record: control_pb2.WorkerRecord) -> None:
        """Adds or updates a worker."""
        self._drop(key, but=group_id(record))
        members = self._members.setdefault(group_id(record), _Members())
        members.records[key] = record
        members.group = _make_group(members.records.values())
        self._known.add(record.model)
        path = self._paths[record.model_path, record.pool] = self._path_of(record.model_path, record.pool)
        members.tokenizer = members.tokenizer or self._tokenizers.get(path)
        # Pools that share a path share its tokenizer.
        if members.tokenizer is None and path not in self._loading:
            self._loading[path] = asyncio.get_running_loop().create_task(self._load(path))

    def remove(self, key: WorkerKey) -> None:
        """Forgets a worker."""
        self._drop(key, but=None)

    def resolve(self, name: str, fingerprint: str = "", pool: str = "") -> Target:
        """Who answers for ``name`` ("" if there is only one model), with that KV format and in that pool if they are given. Raises
        MODEL_NOT_FOUND, NO_WORKERS."""
        found = [
            members
            for (place, _, own), members in self._members.items()
            if _serves(members, name) and fingerprint in ("", own) and pool in ("", place)
        ]
        if not found:
            if not self._members or name in self._known:
                raise TwinpoolError(
                    "NO_WORKERS", f"no worker of model {name!r} is registered", retry_after=1.0
                )
            raise TwinpoolError(
                "MODEL_NOT_FOUND",
                f"model is {name!r}; the limit is one of {', '.join(self.names())}",
                field="model",
            )
        if not name and len(self.names()) > 1:
            raise TwinpoolError(
                "INVALID_ARGUMENT",
                f"model is empty; the limit is one of {', '.join(self.names())}",
                field="model",
            )
        best = max(found, key=lambda members: (members.complete, len(members.records)))
        return _target(best)

    def place(self, target: Target, prompt_tokens: int, priority: int) -> Target:
        """Who answers a request for the model of ``target`` by the length of its prompt and by its priority. Raises NO_POOL,
        NO_WORKERS."""
        found = [
            members
            for (_, model, _), members in sorted(self._members.items())
            if model == target.group.model and members.group is not None
        ]
        offers = [
            Offer(
                members.pool,
                self._rule(members.pool).takes,
                members.servable,
                len(members.records),
            )
            for members in found
        ]
        chosen = choose(offers, prompt_tokens, priority)
        if chosen is not None:
            at, why = chosen
            # With one pool there is nothing to say.
            return _target(found[at], why if len({offer.pool for offer in offers}) > 1 else "")
        if not found and self._rule(target.group.pool).takes.suits(prompt_tokens, priority):
            # Its workers have gone since it was resolved; they may come back while it waits.
            return target
        raise self._untaken(target.group.model, {offer.pool for offer in offers}, prompt_tokens, priority)

    def _untaken(self, model: str, there: set[str], prompt_tokens: int, priority: int) -> TwinpoolError:
        """Why no pool that has workers takes a request."""
        known = {
            pool: rule for pool, rule in self._rules.items() if pool in there or rule.model in ("", model)
        }
        for pool, rule in sorted(known.items()):
            if rule.takes.suits(prompt_tokens, priority):
                return TwinpoolError(
                    "NO_WORKERS",
                    f"no worker of pool {pool} is registered, which takes {rule.takes} of {model!r}",
                    retry_after=1.0,
                )
        limits = "; ".join(f"{pool}: {rule.takes}" for pool, rule in sorted(known.items()))
        return TwinpoolError(
            "NO_POOL",
            f"the prompt has {prompt_tokens} tokens and the priority is {priority}; the limit is one of {limits}",
        )

    def _rule(self, pool: str) -> PoolRule:
        return self._rules.get(pool, NO_RULE)

    def tokenizer(self, group: Group) -> Tokenizer:
        """That of a group that was resolved before, whether or not it has workers now."""
        return self._tokenizers[self._paths[group.model_path, group.pool]]

    def names(self) -> list[str]:
        """Names of the models, in order."""
        return sorted({model for _, model, _ in self._members})

    @property
    def servable(self) -> bool:
        """Whether any model can be asked now."""
        return any(members.servable for members in self._members.values())

    def models(self) -> list[pb.Model]:
        """One entry a model, ordered by name."""
        answer = []
        for name in self.names():
            groups = [members for members in self._members.values() if _serves(members, name)]
            best = max(groups, key=lambda members: (members.complete, len(members.records)))
            assert best.group is not None
            answer.append(
                pb.Model(
                    name=name,
                    family=best.group.family,
                    # Of its pools, the one for the longest prompts.
                    max_context_tokens=max(
                        members.group.max_context_tokens
                        for members in groups
                        if members.group is not None and members.complete == best.complete
                    ),
                    vocab_size=best.group.vocab_size,
                    block_tokens=best.group.block_tokens,
                    prefill_workers=sum(members.ready(worker_pb2.ROLE_PREFILL) for members in groups),
                    decode_workers=sum(members.ready(worker_pb2.ROLE_DECODE) for members in groups),
                    ready=best.servable,
                )
            )
        return answer

    def _path_of(self, own: str, pool: str) -> str:
        return own if Path(own).is_dir() else self._rule(pool).model_path or own

    def _drop(self, key: WorkerKey, but: GroupId | None) -> None:
        for identity, members in list(self._members.items()):
            if identity == but or members.records.pop(key, None) is None:
                continue
            if members.records:
                members.group = _make_group(members.records.values())
                continue
            del self._members[identity]

    async def _load(self, path: str) -> None:
        attempt = 0
        try:
            while readers := self._readers(path):
                try:
                    loaded = self._tokenizers[path] = await self._tokenize.load(path)
                except TokenizerLoadError as error:
                    for members in readers:
                        members.load_error = str(error)
                    log.warning("tokenizer_load_failed", path=path, error=str(error))
                else:
                    for members in self._readers(path):
                        members.tokenizer = loaded
                    log.info("tokenizer_loaded", path=path)
                    return
                await asyncio.sleep(_RELOAD_SECONDS[min(attempt, len(_RELOAD_SECONDS) - 1)])
                attempt += 1
        finally:
            del self._loading[path]

    def _readers(self, path: str) -> list[_Members]:
        """Those whose tokenizer lies there."""
        return [
            members
            for members in self._members.values()
            if members.group is not None
            and self._path_of(members.group.model_path, members.group.pool) == path
        ]


def _target(members: _Members, why: str = "") -> Target:
    """Raises NO_WORKERS while its tokenizer is missing."""
    assert members.group is not None
    if members.tokenizer is None:
        error = members.load_error
        what = f"its tokenizer cannot be loaded: {error}" if error else "it is loading"
        raise TwinpoolError(
            "NO_WORKERS", f"model {members.group.model!r} is not ready: {what}", retry_after=1.0
        )
    return Target(members.group, members.tokenizer, why)


def _serves(members: _Members, name: str) -> bool:
    return members.group is not None and (not name or members.group.model == name)


def _make_group(records: Iterable[control_pb2.WorkerRecord]) -> Group:
    known = list(records)
    first = known[0]
    return Group(
        pool=first.pool,
        model=first.model,
        fingerprint=first.fingerprint,
        family=first.family,
        vocab_size=min(record.vocab_size for record in known),
        block_tokens=first.block_tokens,
        max_context_tokens=min(record.max_context_tokens for record in known),
        num_blocks=min(record.num_blocks for record in known),
        eos_token_ids=tuple(first.eos_token_ids),
        model_path=first.model_path,
    )
