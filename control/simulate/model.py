# SPDX-License-Identifier: Apache-2.0
"""How long a worker's steps and transfers take. The presets say where their figures come from."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerModel:
    """Coefficients of one worker, in seconds unless named otherwise."""

    name: str
    source: str
    """Where the figures come from."""
    kv_bytes_per_token: int
    prefill_base: float
    """Of a prefill step, whatever it computes."""
    prefill_token: float
    """Of each prompt token computed."""
    prefill_pair: float
    """Of each (computed token, token before it) pair: the part of attention that grows with the context."""
    step_base: float
    """Of a decode step: reading the weights, launching the kernels."""
    step_sequence: float
    """Of each sequence in a decode step."""
    step_token: float
    """Of each token of KV that a decode step reads."""
    link_bytes_per_second: float
    link_latency: float
    """Of a transfer, whatever it moves."""
    link_block: float
    """Of each block (one descriptor)."""
    prefill_tokens: int
    """KV that a prefill worker holds, in tokens."""
    decode_tokens: int
    block_tokens: int = 64
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    max_chunk_tokens: int = 8192
    hop: float = 0.0005
    """One message between router and worker."""
    slo_ttft: float = 5.0
    slo_itl: float = 0.1

    def prefill_seconds(self, tokens: int, context: int) -> float:
        """Computing ``tokens`` after ``context`` tokens, without the step's base."""
        return self.prefill_token * tokens + self.prefill_pair * tokens * (context + tokens / 2.0)

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of one block of KV."""
        return self.kv_bytes_per_token * block_tokens


_H200 = (
    "H200 measured: matrix products 784 TFLOP/s bf16, reads 4.60 TB/s; FlashMLA decode and FlashInfer FA3 prefill kernels at "
    "their measured times; a link of 50 GB/s (400 Gb/s) with the measured cost of a NIXL block-major READ. "
)

PRESETS: Mapping[str, WorkerModel] = {
    model.name: model
    for model in (
        WorkerModel(
            name="h200-v3",
            source=_H200
            + "DeepSeek-V3, one GPU of an eight-way expert-parallel group with data-parallel attention: 74 GFLOP a token (37 B "
            "active parameters) at 784 TFLOP/s, half of the FP8 peak (10.6 thousand tokens a second; SGLang published 6.5 "
            "thousand on an H100, 2025-05); attention 5.0 MFLOP a pair (128 heads x 61 layers x 640) at 658 TFLOP/s; 84 GB of "
            "FP8 weights read a step; KV 70,272 bytes a token in bf16, 27.5 ns a token and step over 61 layers. At 128 streams "
            "of 5,000 tokens a step takes 50 ms (DeepSeek published 1,850 tokens/s a GPU at 45 to 50 ms, 2025-02).",
            kv_bytes_per_token=70_272,
            prefill_base=0.010,
            prefill_token=94e-6,
            prefill_pair=7.6e-9,
            step_base=0.020,
            step_sequence=94e-6,
            step_token=27.5e-9,
            link_bytes_per_second=50e9,
            link_latency=100e-6,
            link_block=3e-6,
            prefill_tokens=610_000,
            decode_tokens=610_000,
            slo_ttft=5.0,
            slo_itl=0.1,
        ),
        WorkerModel(
            name="h200-v2lite",
            source=_H200
            + "DeepSeek-V2-Lite, one GPU: 4.8 GFLOP a token (2.4 B active parameters) at 314 TFLOP/s, 40 % of the bf16 peak; "
            "attention 276 kFLOP a pair (16 heads x 27 layers x 640) at 650 TFLOP/s; 31.4 GB of weights read a step; KV 31,104 "
            "bytes a token in bf16, 7.3 ns a token and step over 27 layers.",
            kv_bytes_per_token=31_104,
            prefill_base=0.005,
            prefill_token=15.3e-6,
            prefill_pair=0.425e-9,
            step_base=0.008,
            step_sequence=15e-6,
            step_token=7.3e-9,
            link_bytes_per_second=50e9,
            link_latency=100e-6,
            link_block=3e-6,
            prefill_tokens=3_070_000,
            decode_tokens=3_070_000,
            slo_ttft=2.0,
            slo_itl=0.05,
        ),
        WorkerModel(
            name="cpu-tiny",
            source="The tiny random DeepSeek-V3 checkpoint of `twinpool model tiny` on one core of a shared two-core AMD EPYC machine, "
            "measured through a router at a client, single prompts of 16 to 3,000 tokens and batches of 1 to 48, NIXL over "
            "TCP and CMA; +-50 % on a busy machine.",
            kv_bytes_per_token=480,
            prefill_base=6.5e-3,
            prefill_token=16e-6,
            prefill_pair=3.9e-8,
            step_base=2.5e-3,
            step_sequence=0.27e-3,
            step_token=2e-7,
            link_bytes_per_second=2e9,
            link_latency=0.25e-3,
            link_block=10e-6,
            prefill_tokens=32_768,
            decode_tokens=32_768,
            block_tokens=16,
            max_num_seqs=64,
            max_batched_tokens=2048,
            max_chunk_tokens=512,
            hop=0.001,
            slo_ttft=1.0,
            slo_itl=0.05,
        ),
    )
}
