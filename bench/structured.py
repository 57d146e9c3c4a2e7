# SPDX-License-Identifier: Apache-2.0
"""Claim: an answer that must follow a grammar costs a step almost nothing, since masks are computed while the model runs.

Decode steps of one engine (SmolLM2-135M, 49,152 tokens of vocabulary) with and without a JSON schema, alternating in one run, at several
batch sizes; and what a mask itself takes, one token after another, for that vocabulary and (``--tokenizer DIRECTORY``) for another one.
"""

import json
import random
import statistics
import time
from pathlib import Path

import torch
from llguidance import LLMatcher

from bench._common import Figures, arguments, interleave, report
from twinpool.engine.fetch import fetch_model
from twinpool.engine.loader import load_model
from twinpool.engine.local import LocalEngine
from twinpool.engine.sampling import DrawParams, Grammars
from twinpool.text import Tokenizer

BATCHES = (1, 8, 16)
STEPS = 24
SCHEMA = {
    "type": "array",
    "minItems": 40,
    "items": {
        "type": "object",
        "properties": {
            "town": {"type": "string", "maxLength": 20},
            "days": {"type": "integer"},
            "wet": {"type": "boolean"},
        },
        "required": ["town", "days", "wet"],
        "additionalProperties": False,
    },
}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})


def grammars_of(path: Path) -> Grammars:
    """Of a checkpoint's tokenizer."""
    tokenizer = Tokenizer.from_pretrained(path)
    return Grammars(tokenizer.to_json, vocab_size=tokenizer.vocab_size, end_ids=tokenizer.eos_token_ids)


def steps(engine: LocalEngine, draw: random.Random, batch: int, grammar: str, vocab: int) -> Figures:
    """Median time of a decode step of ``batch`` sequences, and of the CPU that all threads spent meanwhile."""
    found = [
        engine.submit(
            [draw.randrange(100, vocab) for _ in range(32)],
            DrawParams(temperature=1.0, seed=draw.randrange(1 << 30), max_tokens=STEPS, grammar=grammar),
        )
        for _ in range(batch)
    ]
    times, spent = [], []
    while engine.busy:
        before = [len(one.tokens) for one in found]
        began, had_spent = time.perf_counter(), time.process_time()
        engine.step()
        took, cpu = time.perf_counter() - began, time.process_time() - had_spent
        if all(len(one.tokens) == had + 1 for one, had in zip(found, before, strict=True)):
            times.append(took)
            spent.append(cpu)
    return {"step_ms": statistics.median(times) * 1e3, "cpu_ms": statistics.median(spent) * 1e3}


def mask_microseconds(path: Path) -> float:
    """Median time of the mask of one choice, over the tokens of an answer."""
    grammars = grammars_of(path)
    state = grammars.state(GRAMMAR)
    tokenizer = Tokenizer.from_pretrained(path)
    rows = [{"town": f"Town {number}", "days": number, "wet": number % 2 == 0} for number in range(40)]
    times = []
    for token in tokenizer.encode(json.dumps(rows, separators=(",", ":")), add_special_tokens=False).tolist():
        began = time.perf_counter()
        masks = grammars.masks([state])
        assert masks is not None
        masks.wait()
        times.append(time.perf_counter() - began)
        state.append(token)
    grammars.close()
    return statistics.median(times) * 1e6


def main() -> None:
    """Runs the benchmark."""
    options = arguments(
        __doc__ or "", ("--tokenizer", {"default": "", "help": "another checkpoint's directory"})
    )
    torch.set_num_threads(1)
    path = fetch_model("smollm2-135m-instruct")
    engine = LocalEngine(
        load_model(str(path)), num_blocks=512, block_tokens=16, grammars=grammars_of(path), threads=1
    )
    vocab = engine.model.config.vocab_size
    draw = random.Random(1)
    figures: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for batch in BATCHES[:1] if options.quick else BATCHES:
        found = interleave(
            1 if options.quick else 7,
            {
                "free": lambda batch=batch: steps(engine, draw, batch, "", vocab),
                "schema": lambda batch=batch: steps(engine, draw, batch, GRAMMAR, vocab),
            },
        )
        for name, unit in (("step_ms", "microseconds"), ("cpu_ms", "cpu_microseconds")):
            free, schema = found["free"][name], found["schema"][name]
            figures |= {f"{name}_free_{batch}": free, f"{name}_schema_{batch}": schema}
            figures[f"{unit}_a_token_{batch}"] = (schema - free) * 1e3 / batch
            ratios[f"{name}_schema_to_free_{batch}"] = schema / free
    figures["mask_us_49k"] = mask_microseconds(path)
    if options.tokenizer:
        figures["mask_us_other"] = mask_microseconds(Path(options.tokenizer))
    report("structured output", figures, ratios, as_json=options.json)


if __name__ == "__main__":
    main()
