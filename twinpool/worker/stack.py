# SPDX-License-Identifier: Apache-2.0
"""The engine of a worker: model, KV pool, block manager, scheduler and runner, built from the configuration."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twinpool import metrics
from twinpool._core import BlockManager, SchedulerConfig, StepScheduler
from twinpool.config import TwinpoolConfig
from twinpool.engine.config import ModelConfig
from twinpool.engine.fingerprint import fingerprint
from twinpool.engine.kv.pool import KVPool
from twinpool.engine.loader import DTYPES, load_model
from twinpool.engine.runner import ModelRunner
from twinpool.errors import ConfigError
from twinpool.logs import get_logger
from twinpool.transfer.base import PoolMemory
from twinpool.worker.commands import Limits

PROGRESS_SECONDS: Final = 1.0
"""A load that takes longer says how far it is, so often."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStack:
    """Everything that the step thread runs on. ``memory`` is the pool as the transfer layer sees it."""

    model: ModelConfig
    fingerprint: str
    pool: KVPool
    memory: PoolMemory
    blocks: BlockManager
    scheduler: StepScheduler
    runner: ModelRunner
    limits: Limits


class LoadProgress:
    """Logs how far a load is, and says once that the checkpoint's headers were good."""

    def __init__(self, on_checked: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_checked = on_checked
        self._checked = False
        self._clock = clock
        self._said_at = clock()

    def __call__(self, done: int, total: int) -> None:
        """``done`` of ``total`` values are loaded. The loader has compared every header before the first."""
        if not self._checked:
            self._checked = True
            self._on_checked()
        now = self._clock()
        if now - self._said_at >= PROGRESS_SECONDS:
            self._said_at = now
            log.info("model_loading", percent=round(100 * done / max(total, 1), 1))


def served_name(config: TwinpoolConfig) -> str:
    """The name that requests use."""
    return config.model.name or Path(config.model.path).resolve().name


def context_limit(config: TwinpoolConfig, model: ModelConfig) -> int:
    """Most tokens of prompt and output together. Raises ConfigError if more is configured than the model has."""
    wanted, most = config.model.max_context_tokens, model.max_position_embeddings
    if wanted > most:
        raise ConfigError(
            f"model.max_context_tokens: {wanted} exceeds the {most} positions of {config.model.path}",
            key="model.max_context_tokens",
        )
    return wanted or most


def build_stack(config: TwinpoolConfig, *, on_checked: Callable[[], None] = lambda: None) -> EngineStack:
    """Loads the model and allocates the pool; takes as long as the checkpoint is large.

    ``on_checked`` is called once the checkpoint's headers have been compared with the model, before the weights are
    read. Raises CheckpointError or ConfigError.
    """
    if not config.model.path:
        raise ConfigError("model.path: is empty; name a checkpoint directory", key="model.path")
    started = time.monotonic()
    model_config = ModelConfig.from_pretrained(config.model.path)
    max_context = context_limit(config, model_config)
    dtype, device = DTYPES[config.model.dtype], config.worker.device
    model = load_model(
        config.model.path,
        dtype=dtype,
        attention=config.model.attention,
        device=device,
        progress=LoadProgress(on_checked),
    )
    layout, kv, steps = model.kv_layout, config.kv, config.scheduler
    pool = KVPool(kv.num_blocks, layout.layers, kv.block_tokens, layout.width, dtype, device)
    runner = ModelRunner(model, pool, threads=config.worker.threads)
    runner.warmup(max_batched_tokens=steps.max_chunk_tokens, max_num_seqs=steps.max_num_seqs)
    blocks = BlockManager(kv.num_blocks, kv.block_tokens, pool.generations)
    scheduler = StepScheduler(
        blocks,
        SchedulerConfig(
            max_num_seqs=steps.max_num_seqs,
            max_batched_tokens=steps.max_batched_tokens,
            max_chunk_tokens=steps.max_chunk_tokens,
            policy=steps.policy,
        ),
    )
    seconds = time.monotonic() - started
    metrics.WORKER_MODEL_LOAD_TIME.set(seconds)
    log.info("model_loaded", family=model_config.family, seconds=round(seconds, 2), pool_bytes=pool.nbytes)
    return EngineStack(
        model=model_config,
        fingerprint=fingerprint(config.model.path, model, pool),
        pool=pool,
        memory=PoolMemory.of_tensor(pool.tensor),
        blocks=blocks,
        scheduler=scheduler,
        runner=runner,
        limits=Limits(
            block_tokens=kv.block_tokens,
            num_blocks=kv.num_blocks,
            max_context_tokens=max_context,
            max_num_seqs=steps.max_num_seqs,
            vocab_size=model_config.vocab_size,
        ),
    )
