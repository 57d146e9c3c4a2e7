# SPDX-License-Identifier: Apache-2.0
"""The engine in one process, without network, transfer or pools: the same scheduler, runner and kernels.

Benchmarks compare the cluster with it, and tests take it as a small whole engine.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from twinpool._core import BlockManager, SchedulerConfig, StepPlan, StepScheduler, hash_blocks, root_hash
from twinpool.config import TwinpoolConfig
from twinpool.engine.kv.host import HostPool
from twinpool.engine.kv.pool import KVPool
from twinpool.engine.loader import DTYPES, load_model
from twinpool.engine.models.base import DecoderModel
from twinpool.engine.runner import ModelRunner
from twinpool.engine.sampling import (
    DrawParams,
    Finish,
    GrammarError,
    Grammars,
    PromptLogprobs,
    PromptScoring,
    SequenceDraw,
    TokenLogprobs,
)
from twinpool.engine.step import StepResult


class PromptError(ValueError):
    """A prompt that this engine can't serve. Names length and limit."""


@dataclass(slots=True)
class Generation:
    """One choice of one prompt. Times are ``time.monotonic`` seconds."""

    prompt_tokens: int
    choice: int
    submitted: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry a token, if asked for."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """Of the prompt's positions from 1 on, a chunk an entry, if asked for."""
    times: list[float] = field(default_factory=list)
    """When each token was there."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    preemptions: int = 0
    finish: Finish | None = None

    @property
    def time_to_first_token(self) -> float:
        return self.times[0] - self.submitted

    @property
    def inter_token_seconds(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


class LocalEngine:
    """Continuous batching over one model. Used from one thread."""

    def __init__(
        self,
        model: DecoderModel,
        *,
        num_blocks: int = 1024,
        block_tokens: int = 64,
        scheduler: SchedulerConfig | None = None,
        max_context_tokens: int = 0,
        grammars: Grammars | None = None,
        threads: int | None = None,
        poison_freed: bool = False,
        validate: bool = False,
    ) -> None:
        """``max_context_tokens`` 0: the model's own limit. ``poison_freed`` and ``validate`` are for tests."""
        layers, rows = model.kv_layout.layers, model.kv_rows
        device = next(model.parameters()).device
        self.model = model
        self.pool = KVPool(num_blocks, layers, block_tokens, rows.columns, rows.dtype, device)
        self.blocks = BlockManager(num_blocks, block_tokens, self.pool.generations)
        limits = scheduler or SchedulerConfig()
        self.scheduler = StepScheduler(self.blocks, limits)
        host = HostPool(self.pool, limits.host_blocks) if limits.host_blocks else None
        self.runner = ModelRunner(
            model, self.pool, host=host, grammars=grammars, threads=threads, validate=validate
        )
        self._grammars = grammars
        own = model.config.max_position_embeddings
        self._max_context = min(max_context_tokens or own, own)
        self._root = root_hash(b"local", b"", b"")
        self._poison_freed = poison_freed
        self._live: dict[int, tuple[SequenceDraw, Generation]] = {}

    @classmethod
    def from_config(cls, config: TwinpoolConfig) -> "LocalEngine":
        """Loads ``config.model`` and sizes the engine as a worker of this configuration would be. Raises CheckpointError."""
        section = config.scheduler
        model = load_model(
            config.model.path,
            dtype=DTYPES[config.model.dtype],
            attention=config.model.attention,
            device=config.worker.device,
            backend=config.model.kernels or None,
            kv_dtype=config.kv.dtype,
        )
        return cls(
            model,
            num_blocks=config.kv.num_blocks,
            block_tokens=config.kv.block_tokens,
            scheduler=SchedulerConfig(
                max_num_seqs=section.max_num_seqs,
                max_batched_tokens=section.max_batched_tokens,
                max_chunk_tokens=section.max_chunk_tokens,
                policy=section.policy,
                max_overtaken=section.max_overtaken,
                host_blocks=config.kv.host_blocks,
            ),
            max_context_tokens=config.model.max_context_tokens,
            threads=config.worker.threads or None,
            poison_freed=config.kv.poison_freed,
        )

    @property
    def busy(self) -> bool:
        """Whether a submitted prompt is not finished."""
        return bool(self._live)

    def submit(
        self, prompt: Sequence[int] | NDArray[np.int32], params: DrawParams, *, choice: int = 0
    ) -> Generation:
        """Queues a prompt; ``step`` fills what is returned. Raises PromptError, DrawParamsError or GrammarError."""
        tokens = np.asarray(prompt, np.int32)
        self._check(tokens, params)
        grammar = None
        if params.grammar:
            if self._grammars is None:
                raise GrammarError("this engine was made without grammars")
            grammar = self._grammars.state(params.grammar)
        hashes = hash_blocks(self._root, tokens, self.pool.block_tokens)
        now = time.monotonic()
        scoring = None if params.prompt_logprobs is None else PromptScoring(tokens, params.prompt_logprobs)
        handle = self.scheduler.add(
            tokens,
            hashes,
            self._root,
            max_new_tokens=params.max_tokens,
            arrival=now,
            use_cache=scoring is None,
        )
        generation = Generation(len(tokens), choice, now)
        draw = SequenceDraw(params, tokens, choice=choice, grammar=grammar, scoring=scoring)
        self._live[handle] = (draw, generation)
        return generation

    def step(self) -> bool:
        """Plans and runs one step. False if there was nothing to run. Raises RuntimeError if logits are not finite."""
        plan = self.scheduler.plan(time.monotonic())
        if plan.empty:
            self._poison()
            self.scheduler.abort_plan(plan)
            return False
        handles: list[int] = plan.seq.tolist()
        try:
            self.runner.swap(plan)
            self._poison()
            result = self.runner.step(plan, [self._live[handle][0] for handle in handles])
        except BaseException:
            self.scheduler.abort_plan(plan)
            raise
        self.scheduler.advance(plan, result.tokens)
        self._take(plan, handles, result)
        self._poison()
        return True

    def generate(
        self,
        prompts: Sequence[Sequence[int] | NDArray[np.int32]],
        params: DrawParams | Sequence[DrawParams],
        *,
        n: int = 1,
    ) -> list[list[Generation]]:
        """Runs all prompts to their end together. ``[prompt][choice]``, in the order given."""
        each = [params] * len(prompts) if isinstance(params, DrawParams) else params
        submitted = [
            [self.submit(prompt, draw, choice=choice) for choice in range(n)]
            for prompt, draw in zip(prompts, each, strict=True)
        ]
        self.run()
        return submitted

    def run(self) -> None:
        """Steps until nothing is left."""
        while self._live:
            if not self.step():
                raise RuntimeError(f"nothing can run although {len(self._live)} sequences are not finished")

    def cancel_all(self) -> None:
        """Ends all sequences and gives their blocks back."""
        for handle in self._live:
            self.scheduler.remove(handle)
        self._live.clear()

    def _take(self, plan: StepPlan, handles: list[int], result: StepResult) -> None:
        now = time.monotonic()
        for handle in plan.preempted.tolist():
            self._live[handle][1].preemptions += 1
        if result.failed:
            raise RuntimeError(f"the logits of {len(result.failed)} sequences are not finite")
        for i, part in result.prompts.items():
            self._live[handles[i]][1].prompt_logprobs.append(part)
        for i in np.flatnonzero(plan.sample).tolist():
            handle = handles[i]
            draw, generation = self._live[handle]
            if not generation.tokens:
                generation.cached_tokens = self.scheduler.cached_tokens(handle)
            generation.tokens.append(int(result.tokens[i]))
            generation.times.append(now)
            entry = result.logprobs[i] if result.logprobs is not None else None
            if entry is not None:
                generation.logprobs.append(entry)
            generation.finish = draw.finish()
            if generation.finish is not None:
                self.scheduler.remove(handle)
                del self._live[handle]

    def _poison(self) -> None:
        freed = self.blocks.drain_freed()
        if self._poison_freed and len(freed):
            self.pool.poison(freed)

    def _check(self, tokens: NDArray[np.int32], params: DrawParams) -> None:
        vocab = self.model.config.vocab_size
        params.check_vocabulary(vocab)
        if tokens.ndim != 1 or not len(tokens):
            raise PromptError("the prompt is empty")
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
            raise PromptError(f"the prompt holds a token id outside the vocabulary of {vocab}")
        total = len(tokens) + params.max_tokens
        if total > self._max_context:
            raise PromptError(
                f"{len(tokens)} prompt tokens and max_tokens {params.max_tokens} exceed {self._max_context}"
            )
        if -(-total // self.pool.block_tokens) > self.pool.num_blocks:
            raise PromptError(f"{total} tokens need more than the pool's {self.pool.num_blocks} blocks")
