# SPDX-License-Identifier: Apache-2.0
"""Which steps go to a CUDA graph, and what the runner makes of its logits. The graphs themselves need a device."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from twinpool.engine.config import Family, ModelConfig
from twinpool.engine.graphs import DecodeGraphs, Replayed
from twinpool.engine.kernels import REGISTRY, Capability, Kernels
from twinpool.engine.kv.pool import KVPool
from twinpool.engine.loader import load_model
from twinpool.engine.models.base import DecoderModel
from twinpool.engine.models.decoder import PagedDecoder
from twinpool.engine.runner import ModelRunner
from twinpool.engine.sampling import DrawParams, SequenceDraw
from twinpool.engine.step import PlanArrays, PlanLimits
from twinpool.engine.tiny import tiny_config, write_tiny
from twinpool.engine.warmup import warmup_plans

BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_model(write_tiny(Path(tmp_path_factory.mktemp("tiny")), "deepseek_v2"))


@pytest.fixture
def pool(model: DecoderModel) -> KVPool:
    rows = model.kv_rows
    return KVPool(12, model.kv_layout.layers, BLOCK, rows.columns, rows.dtype)


def plans(pool: KVPool, sequences: int) -> tuple[PlanArrays, PlanArrays]:
    """A prefill, and a decode step of ``sequences``."""
    limits = PlanLimits(pool.num_blocks, BLOCK, 512, 4096)
    prefill, decode = warmup_plans(limits, 24, sequences)
    return prefill, decode


@pytest.mark.parametrize(
    ("sequences", "context", "fit"), [(1, 1, True), (3, 32, True), (4, 1, False), (2, 33, False)]
)
def test_only_small_batches_of_short_decodes_fit(
    model: DecoderModel, pool: KVPool, sequences: int, context: int, fit: bool
) -> None:
    graphs = DecodeGraphs(model, pool, max_context=BLOCK + 1, buckets=[3, 1])
    prefill, decode = plans(pool, sequences)
    decode = dataclasses.replace(decode, context=np.full(sequences, context, np.int32))
    assert graphs.fits(decode) == fit
    assert not graphs.fits(prefill)


class Eager(DecodeGraphs):
    """Takes what fits, and computes it without a graph."""

    def __init__(self, runner: ModelRunner, model: DecoderModel, pool: KVPool) -> None:
        super().__init__(model, pool, max_context=64)
        self.runner, self.model, self.runs = runner, model, 0

    def run(self, plan: PlanArrays) -> Replayed:
        self.runs += 1
        logits = self.model.scores(self.runner._forward(plan, plan.q_start[1:].astype(np.int64) - 1))
        return Replayed(logits, self.model.best(logits))


@pytest.mark.parametrize("sample", [[1, 1, 1], [0, 1, 1], [1, 0, 0]])
def test_the_runner_draws_from_a_graphs_logits(model: DecoderModel, pool: KVPool, sample: list[int]) -> None:
    prefill, decode = plans(pool, 3)
    decode = dataclasses.replace(
        decode, sample=np.array(sample, np.uint8), token_ids=np.array([3, 70, 401], np.int32)
    )
    results, runs = [], []
    for use in (False, True):
        runner = ModelRunner(model, pool, validate=True)
        graphs = Eager(runner, model, pool)
        runner._graphs = graphs if use else None
        params = DrawParams(temperature=0.0, max_tokens=9)
        runner.step(prefill, [SequenceDraw(params)])
        results.append(runner.step(decode, [SequenceDraw(params) for _ in range(3)]).tokens.tolist())
        runs.append(graphs.runs)
    assert runs == [0, 2]  # the prompt is few tokens: it goes as decodes
    assert results[0] == results[1]


def mixed(pool: KVPool) -> list[PlanArrays]:
    """Chunks of two prompts, then a decode of the first beside the rest of the second, in blocks that are not neighbours."""
    table = np.array([[3, 9, 5], [7, 2, 11]], np.int32)
    tokens = np.random.default_rng(4).integers(8, 500, (2, 48)).astype(np.int32)

    def plan(*parts: tuple[int, int], decodes: int, sample: list[int]) -> PlanArrays:
        positions = [np.arange(begin, end, dtype=np.int32) for begin, end in parts]
        slots = [table[index, at // BLOCK] * BLOCK + at % BLOCK for index, at in enumerate(positions)]
        return PlanArrays(
            seq=np.arange(2, dtype=np.int64),
            token_ids=np.concatenate([tokens[index, at] for index, at in enumerate(positions)]),
            positions=np.concatenate(positions),
            q_start=np.cumsum([0, *map(len, positions)]).astype(np.int32),
            context=np.array([end for _, end in parts], np.int32),
            block_table=table,
            slots=np.concatenate(slots).astype(np.int64),
            sample=np.array(sample, np.uint8),
            num_decodes=decodes,
            copies=np.zeros((0, 2), np.int32),
        )

    return [
        plan((0, 33), (0, 15), decodes=0, sample=[0, 0]),
        plan((33, 34), (15, 40), decodes=1, sample=[1, 0]),
        plan((34, 35), (40, 47), decodes=1, sample=[1, 1]),
    ]


@pytest.mark.parametrize("reads", [1 << 20, 700])
def test_small_chunks_go_through_a_graph_a_row_a_token(
    model: DecoderModel, pool: KVPool, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their KV and the tokens drawn after them are those of chunks; what would read too much goes without."""
    monkeypatch.setattr("twinpool.engine.runner.GRAPH_READS", reads)
    results, kv, runs = [], [], []
    for use in (False, True):
        pool.tensor.zero_()
        runner = ModelRunner(model, pool, validate=True)
        graphs = Eager(runner, model, pool)
        runner._graphs = graphs if use else None
        draws = [SequenceDraw(DrawParams(temperature=0.0, max_tokens=9)) for _ in range(2)]
        results.append([runner.step(plan, draws).tokens.tolist() for plan in mixed(pool)])
        kv.append(pool.tensor.clone())
        runs.append(graphs.runs)
    assert runs == [0, 3 if reads > 1000 else 2]
    assert results[0] == results[1]
    assert results[0][1][0]
    assert results[0][2][1]
    torch.testing.assert_close(kv[0], kv[1], rtol=1e-4, atol=1e-4)


def test_only_models_whose_kernels_plan_on_the_device_are_captured(model: DecoderModel) -> None:
    assert not model.capturable
    hopper = Capability("cuda", (9, 0))
    kernels = Kernels.select(REGISTRY, hopper, torch.bfloat16)
    expected: dict[Family, bool] = {"deepseek_v2": True, "llama": False}
    for family, captured in expected.items():
        assert PagedDecoder(ModelConfig.from_dict(tiny_config(family)), kernels).capturable == captured
