# SPDX-License-Identifier: Apache-2.0
"""Turns a GGUF file into an ordinary checkpoint directory. Run as a process of its own by ``fetch``.

Its own process, because ``transformers`` brings a second copy of the weights and much else into memory, and because its
progress bars and settings must not reach the caller. Prints one line a stage on stdout.
"""

import json
import sys
from pathlib import Path
from typing import Any


def convert(gguf: Path, target: Path) -> None:
    """Writes config, bfloat16 safetensors, tokenizer, chat template and generation config into ``target``."""
    _say("loading transformers")
    import torch
    import transformers

    from twinpool.engine.checkpoint import share

    source, name = str(gguf.parent), gguf.name
    _say("reading the tokenizer")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source, gguf_file=name)
    _say("reading and unpacking the weights")
    # Without dequantize the weights stay packed and can't be written as plain tensors.
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    _say("writing the checkpoint")
    model.save_pretrained(str(target))
    for path in target.glob("*.safetensors"):
        share(path)
    tokenizer.save_pretrained(str(target))
    _tidy(target / "tokenizer_config.json", int(model.config.max_position_embeddings))


def _tidy(path: Path, max_tokens: int) -> None:
    """Drops what describes this conversion and not the tokenizer."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only"):
        config.pop(key, None)
    config["model_max_length"] = max_tokens
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _say(stage: str) -> None:
    print(stage, flush=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
