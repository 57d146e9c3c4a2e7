# SPDX-License-Identifier: Apache-2.0
"""Runs a model over a paged pool as a scheduler would, and transformers on the same checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kv.pool import KVPool
from twinpool.engine.models.base import DecoderModel


class PagedRun:
    """Several sequences over one pool whose unused memory is poisoned and whose blocks are scattered."""

    def __init__(
        self, model: DecoderModel, *, block_tokens: int = 16, num_blocks: int = 96, seed: int = 0
    ) -> None:
        self.model = model
        layout = model.kv_layout
        dtype = next(model.parameters()).dtype
        self.pool = KVPool(num_blocks, layout.layers, block_tokens, layout.width, dtype)
        self.pool.poison(range(num_blocks))
        self.free = list(np.random.default_rng(seed).permutation(num_blocks))
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}

    def add(self, seq: int, tokens: list[int]) -> None:
        self.tokens[seq], self.computed[seq], self.blocks[seq] = list(tokens), 0, []

    def remove(self, seq: int) -> None:
        self.pool.poison(self.blocks[seq])
        self.free.extend(self.blocks.pop(seq))
        del self.tokens[seq], self.computed[seq]

    def written(self, seq: int) -> Tensor:
        """The sequence's KV in order, ``[layers, tokens, width]``."""
        pages = self.pool.tensor[self.blocks[seq]]
        return pages.transpose(0, 1).flatten(1, 2)[:, : self.computed[seq]]

    def step(
        self, work: list[tuple[int, int]], *, all_rows: bool = False, rows: list[int] | None = None
    ) -> Tensor:
        """Runs ``(sequence, new tokens)``, decodes first; logits of each sequence's last row, of all, or of ``rows``."""
        bt = self.pool.block_tokens
        q_start, context, ids, positions, slots = [0], [], [], [], []
        for seq, count in work:
            first, last = self.computed[seq], self.computed[seq] + count
            while len(self.blocks[seq]) * bt < last:
                self.blocks[seq].append(int(self.free.pop()))
            span = range(first, last)
            ids += self.tokens[seq][first:last]
            positions += list(span)
            slots += [self.blocks[seq][p // bt] * bt + p % bt for p in span]
            q_start.append(q_start[-1] + count)
            context.append(last)
            self.computed[seq] = last
        table = np.full((len(work), max(len(self.blocks[s]) for s, _ in work) + 1), -1, np.int32)
        for row, (seq, _) in enumerate(work):
            table[row, : len(self.blocks[seq])] = self.blocks[seq]
        decodes = 0
        while decodes < len(work) and work[decodes][1] == 1 and context[decodes] > 1:
            decodes += 1
        wanted = [start - 1 for start in q_start[1:]] if rows is None else rows
        batch = AttentionBatch.build(
            q_start=np.array(q_start, np.int32),
            context=np.array(context, np.int32),
            block_table=table,
            slots=np.array(slots, np.int64),
            block_tokens=bt,
            num_decodes=decodes,
            last_rows=None if all_rows else np.array(wanted, np.int64),
        )
        hidden = self.model(torch.tensor(ids), torch.tensor(positions), self.pool.tensor, batch)
        return self.model.logits(hidden)

    def prefill(self, seq: int, chunk: int | None = None) -> Tensor:
        """Logits of all prompt rows, computed in chunks."""
        left = len(self.tokens[seq]) - self.computed[seq]
        parts = []
        while left:
            count = min(chunk or left, left)
            parts.append(self.step([(seq, count)], all_rows=True))
            left -= count
        return torch.cat(parts)

    def greedy(self, prompts: list[list[int]], new_tokens: int, chunk: int | None = None) -> list[list[int]]:
        """Greedy tokens of several prompts, decoded together, prefills joining while others decode."""
        results: list[list[int]] = []
        for seq, prompt in enumerate(prompts):
            self.add(seq, prompt)
            results.append([])
        active: list[int] = []
        waiting = list(range(len(prompts)))
        while active or waiting:
            work = [(seq, 1) for seq in active]
            joining = waiting[0] if waiting else None
            if joining is not None:
                left = len(self.tokens[joining]) - self.computed[joining]
                work.append((joining, min(chunk or left, left)))
            logits = self.step(work)
            if joining is not None and self.computed[joining] == len(self.tokens[joining]):
                active.append(waiting.pop(0))
            for row, (seq, _) in enumerate(work):
                if seq in active:
                    token = int(logits[row].argmax())
                    results[seq].append(token)
                    self.tokens[seq].append(token)
            for seq in [s for s in active if len(results[s]) == new_tokens]:
                active.remove(seq)
                self.remove(seq)
        return results


class Oracle:
    """transformers' own model on the same files."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM

        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, output_loading_info=True, attn_implementation="eager"
        )
        self.model: Any = model.eval()
        self.loading = info

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        return self.model(torch.tensor([tokens])).logits[0].float()

    @torch.inference_mode()
    def greedy(self, prompt: list[int], new_tokens: int) -> list[int]:
        found = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        return found[0, len(prompt) :].tolist()


def random_prompts(lengths: list[int], vocab: int, seed: int = 0) -> list[list[int]]:
    """Prompts of the given lengths without special tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(5, vocab, length).tolist() for length in lengths]
