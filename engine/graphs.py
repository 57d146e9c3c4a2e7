# SPDX-License-Identifier: Apache-2.0
"""Decode steps as CUDA graphs, one for each size of batch, so that a step's launches cost the host one call.

A batch runs in the smallest graph that holds it. Sequences that fill it up have no context and slot -1: they attend to
nothing and store nothing. Attention plans its work on the device, inside the graph, from the lengths of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kv.pool import KVPool
from twinpool.engine.models.base import DecoderModel
from twinpool.engine.step import PlanArrays
from twinpool.logs import get_logger

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

log = get_logger(__name__)


class Replayed(NamedTuple):
    """What a step leaves, valid until the next run: logits ``[n, vocab]`` of the model's dtype and the greedy choice from
    them, ``int32[2, n]`` (``operations.Greedy``)."""

    logits: Tensor
    best: Tensor


@dataclass(slots=True)
class _Graph:
    """A captured step of ``size`` sequences, the tensors it reads and what it leaves."""

    size: int
    numbers: Tensor  # uint8: int64[3, size] of token ids, positions, slots; then int32[size] of contexts
    batch: AttentionBatch
    staged: Tensor  # pinned, as ``numbers``
    staged_table: Tensor  # pinned int32[size, blocks]
    copied: torch.cuda.Event
    replayed: torch.cuda.CUDAGraph
    result: Replayed | None = None
    table: NDArray[np.int32] | None = None
    """The block table of the last plan, as far as it was wide: most steps come with the same one."""

    @property
    def token_ids(self) -> Tensor:
        """``int64[size]``, a part of ``numbers``."""
        return self.numbers[: 8 * self.size].view(torch.int64)


class DecodeGraphs:
    """The graphs of one model over one pool, captured when first needed. Used from one thread."""

    def __init__(
        self, model: DecoderModel, pool: KVPool, *, max_context: int, buckets: Sequence[int] = BUCKETS
    ) -> None:
        """``max_context``: tokens of the longest sequence; longer ones, and larger batches, are not for graphs."""
        self._model, self._pool = model, pool
        self._blocks = -(-max_context // pool.block_tokens)
        self._buckets = sorted(buckets)
        self._graphs: dict[int, _Graph] = {}
        self._memory: Any = None

    def takes(self, count: int) -> bool:
        """Whether there is a graph for so many sequences."""
        return count <= self._buckets[-1]

    def fits(self, plan: PlanArrays) -> bool:
        """Whether ``plan`` consists of decodes alone, no more and no longer than the graphs take."""
        count = len(plan.seq)
        return plan.num_decodes == count and self.takes(count) and int(plan.context.max()) <= self.max_context

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence that a graph takes."""
        return self._blocks * self._pool.block_tokens

    @torch.inference_mode()
    def run(self, plan: PlanArrays, drawn: Tensor | None = None) -> Replayed:
        """Runs a plan that ``fits``. Does not wait for the device. ``drawn [n]``, on the device: the tokens, instead of the plan's."""
        count = len(plan.seq)
        size = next(bucket for bucket in self._buckets if bucket >= count)
        graph = self._graphs.get(size) or self._capture(size)
        graph.copied.synchronize()  # The staging memory is free again once the last step's copies are done.
        self._stage(graph, plan, count)
        if drawn is not None:
            graph.token_ids[:count].copy_(drawn)
        graph.replayed.replay()
        assert graph.result is not None
        return Replayed(graph.result.logits[:count], graph.result.best[:, :count])

    def _stage(self, graph: _Graph, plan: PlanArrays, count: int) -> None:
        size = graph.size
        staged = graph.staged.numpy()
        whole, context = (
            staged[: 24 * size].view(np.int64).reshape(3, size),
            staged[24 * size :].view(np.int32),
        )
        whole[:2, count:], whole[2, count:] = 0, -1
        whole[0, :count], whole[1, :count], whole[2, :count] = plan.token_ids, plan.positions, plan.slots
        context[:count], context[count:] = plan.context, 0
        graph.numbers.copy_(graph.staged, non_blocking=True)
        table = plan.block_table[:, : self._blocks]
        if graph.table is None or not np.array_equal(graph.table, table):
            graph.table = np.array(table)
            graph.staged_table.numpy()[:count, : table.shape[1]] = table
            graph.batch.block_table.copy_(graph.staged_table, non_blocking=True)
        graph.copied.record()

    def _capture(self, size: int) -> _Graph:
        device = self._pool.tensor.device
        numbers = torch.zeros(28 * size, dtype=torch.uint8, device=device)
        whole = numbers[: 24 * size].view(torch.int64).view(3, size)
        whole[2] = -1
        # The lengths that captured launches are sized for; unequal ones, since real ones are.
        lengths = np.full(size, self._blocks * self._pool.block_tokens, np.int32)
        lengths[1::2] -= self._pool.block_tokens * min(self._blocks - 1, 1)
        batch = AttentionBatch.build(
            q_start=np.arange(size + 1, dtype=np.int32),
            context=lengths,
            block_table=np.full((size, self._blocks), -1, np.int32),
            slots=np.full(size, -1, np.int64),
            block_tokens=self._pool.block_tokens,
            num_decodes=size,
            device=device,
        )
        batch.context, batch.slots = numbers[24 * size :].view(torch.int32), whole[2]
        made = _Graph(
            size=size,
            numbers=numbers,
            batch=batch,
            staged=torch.zeros(28 * size, dtype=torch.uint8, pin_memory=True),
            staged_table=torch.full((size, self._blocks), -1, dtype=torch.int32, pin_memory=True),
            copied=torch.cuda.Event(),  # type: ignore[no-untyped-call]
            replayed=torch.cuda.CUDAGraph(),
        )
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            # Builds kernels and the libraries' workspaces, which a capture must not.
            self._forward(made)
            side.synchronize()
            batch.forget()
            with torch.cuda.graph(made.replayed, pool=self._memory, stream=side):
                made.result = self._forward(made)
        self._memory = self._memory or made.replayed.pool()
        self._graphs[size] = made
        log.info("decode_graph_captured", sequences=size)
        return made

    def _forward(self, graph: _Graph) -> Replayed:
        whole = graph.numbers[: 24 * graph.size].view(torch.int64).view(3, graph.size)
        hidden = self._model(whole[0], whole[1], self._pool.tensor, graph.batch)
        logits = self._model.scores(hidden)
        return Replayed(logits, self._model.best(logits))
