# SPDX-License-Identifier: Apache-2.0
"""The engine of a worker: model, KV pool, block manager, scheduler and runner, built from the configuration."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from twinpool import metrics
from twinpool._core import BlockManager, SchedulerConfig, StepScheduler
from twinpool.config import TwinpoolConfig
from twinpool.engine.calibration import Calibration, calibrate
from twinpool.engine.config import ModelConfig
from twinpool.engine.device import enter_device
from twinpool.engine.fingerprint import fingerprint
from twinpool.engine.kernels import KernelNotFoundError
from twinpool.engine.kv.host import HostPool
from twinpool.engine.kv.pool import KVPool
from twinpool.engine.loader import DTYPES, load_model
from twinpool.engine.models.base import KVLayout
from twinpool.engine.runner import ModelRunner
from twinpool.engine.sampling import Grammars
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.logs import get_logger
from twinpool.text import Tokenizer, TokenizerLoadError
from twinpool.transfer.base import PoolMemory
from twinpool.v1.control_pb2 import CostModel, WorkerRecord
from twinpool.worker.commands import Limits
from twinpool.worker.step_loop import Runner

PROGRESS_SECONDS: Final = 1.0
"""A load that takes longer says how far it is, so often."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a worker's model before its weights are loaded."""

    model: ModelConfig
    served_name: str
    fingerprint: str
    kv_bytes_per_token: int
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class EngineStack:
    """Everything that the step thread runs on. ``memory`` is the pool as the transfer layer sees it,
    ``calibration`` what steps were found to take."""

    fingerprint: str
    pool: KVPool
    memory: PoolMemory
    blocks: BlockManager
    scheduler: StepScheduler
    runner: Runner
    limits: Limits
    calibration: Calibration = field(default_factory=Calibration)
    grammars: Grammars | None = None


class LoadProgress:
    """Logs how far a load is, says once that the checkpoint's headers were good, and ends a load that is not wanted
    any more."""

    def __init__(
        self,
        on_checked: Callable[[], None],
        cancelled: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_checked = on_checked
        self._cancelled = cancelled
        self._checked = False
        self._clock = clock
        self._said_at = clock()

    def __call__(self, done: int, total: int) -> None:
        """``done`` of ``total`` values are loaded. The loader has compared every header before the first.

        Raises CANCELLED.
        """
        if self._cancelled():
            raise TwinpoolError("CANCELLED", "the load was cancelled")
        if not self._checked:
            self._checked = True
            self._on_checked()
        now = self._clock()
        if now - self._said_at >= PROGRESS_SECONDS:
            self._said_at = now
            log.info("model_loading", percent=round(100 * done / max(total, 1), 1))


def describe(config: TwinpoolConfig) -> Facts:
    """Reads what a checkpoint is, not its weights. Raises CheckpointError or ConfigError."""
    path = config.model.path
    if not path:
        raise ConfigError("model.path: is empty; name a checkpoint directory", key="model.path")
    model, dtype = ModelConfig.from_pretrained(path), DTYPES[config.model.dtype]
    wanted, most = config.model.max_context_tokens, model.max_position_embeddings
    if wanted > most:
        raise ConfigError(
            f"model.max_context_tokens: {wanted} exceeds the {most} positions of {path}",
            key="model.max_context_tokens",
        )
    return Facts(
        model=model,
        served_name=config.model.name or Path(path).resolve().name,
        fingerprint=str(
            fingerprint(path, dtype=dtype, block_tokens=config.kv.block_tokens, kv_dtype=config.kv.dtype)
        ),
        kv_bytes_per_token=KVLayout.of(model).bytes_per_token(dtype, config.kv.dtype),
        max_context_tokens=wanted or most,
    )


def _step_limits(config: TwinpoolConfig) -> SchedulerConfig:
    steps = config.scheduler
    return SchedulerConfig(
        max_num_seqs=steps.max_num_seqs,
        max_batched_tokens=steps.max_batched_tokens,
        max_chunk_tokens=steps.max_chunk_tokens,
        policy=steps.policy,
        max_overtaken=steps.max_overtaken,
        host_blocks=config.kv.host_blocks,
    )


def build_stack(
    config: TwinpoolConfig,
    facts: Facts,
    *,
    on_checked: Callable[[], None] = lambda: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> EngineStack:
    """Loads the model and allocates the pool; takes as long as the checkpoint is large.

    ``on_checked`` is called once the checkpoint's headers have been compared with the model, before the weights are
    read; the load ends soon after ``cancelled`` is true. Raises CheckpointError, ConfigError for a pool that cannot be
    allocated, or CANCELLED.
    """
    started = time.monotonic()
    dtype, device, kv = DTYPES[config.model.dtype], enter_device(config.worker.device), config.kv
    try:
        model = load_model(
            config.model.path,
            dtype=dtype,
            attention=config.model.attention,
            device=device,
            backend=config.model.kernels or None,
            progress=LoadProgress(on_checked, cancelled),
            kv_dtype=kv.dtype,
        )
    except KernelNotFoundError as error:
        raise ConfigError(f"model.kernels: {error}", key="model.kernels") from None
    layers, rows = model.kv_layout.layers, model.kv_rows
    try:
        pool = KVPool(kv.num_blocks, layers, kv.block_tokens, rows.columns, rows.dtype, device)
    except MemoryError as error:
        raise ConfigError(f"kv.num_blocks: {kv.num_blocks} blocks: {error}", key="kv.num_blocks") from None
    try:
        host = HostPool(pool, kv.host_blocks) if kv.host_blocks else None
    except MemoryError as error:
        raise ConfigError(f"kv.host_blocks: {error}", key="kv.host_blocks") from None
    grammars = _grammars(config, facts)
    runner = ModelRunner(model, pool, host=host, grammars=grammars, threads=config.worker.threads)
    calibration = _prepare(runner, config, cancelled)
    blocks = BlockManager(kv.num_blocks, kv.block_tokens, pool.generations)
    metrics.WORKER_MODEL_LOAD_TIME.set(seconds := time.monotonic() - started)
    log.info("model_loaded", family=facts.model.family, seconds=round(seconds, 2), pool_bytes=pool.nbytes)
    return EngineStack(
        fingerprint=facts.fingerprint,
        pool=pool,
        memory=PoolMemory.of_tensor(pool.tensor),
        blocks=blocks,
        scheduler=StepScheduler(blocks, _step_limits(config)),
        runner=runner,
        limits=Limits(
            block_tokens=kv.block_tokens,
            num_blocks=kv.num_blocks,
            max_context_tokens=facts.max_context_tokens,
            max_num_seqs=config.scheduler.max_num_seqs,
            vocab_size=facts.model.vocab_size,
        ),
        calibration=calibration,
        grammars=grammars,
    )


def _grammars(config: TwinpoolConfig, facts: Facts) -> Grammars | None:
    """Reads the tokenizer for answers that must follow a grammar: it takes a second, which no request is to wait for."""
    try:
        tokenizer = Tokenizer.from_pretrained(config.model.path)
        end_ids = tokenizer.eos_token_ids
        grammars = Grammars(tokenizer.to_json, vocab_size=facts.model.vocab_size, end_ids=end_ids)
        grammars.prepare()
    except (TokenizerLoadError, ValueError) as error:
        log.warning("no_grammars", error=str(error))
        return None
    return grammars


def _prepare(runner: ModelRunner, config: TwinpoolConfig, cancelled: Callable[[], bool]) -> Calibration:
    """Warms up and measures. To be done before there is a block manager: to it and to peers the pool is untouched."""
    steps = config.scheduler
    runner.warmup(max_batched_tokens=steps.max_chunk_tokens, max_num_seqs=steps.max_num_seqs)
    return calibrate(
        runner,
        budget_seconds=config.worker.calibration_seconds,
        max_chunk_tokens=steps.max_chunk_tokens,
        max_num_seqs=steps.max_num_seqs,
        cancelled=cancelled,
    )


def measured(calibration: Calibration) -> WorkerRecord:
    """The fields of the record that the calibration gives."""
    prefill, step = calibration
    return WorkerRecord(
        prefill_cost=None if prefill is None else CostModel(**prefill._asdict()),
        step_cost=None if step is None else CostModel(**step._asdict()),
    )
