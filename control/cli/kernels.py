# SPDX-License-Identifier: Apache-2.0
"""``twinpool kernels``: which implementation of each operation an engine would run, and why."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from twinpool.control.cli.output import EXIT_USAGE, Format, FormatOption, emit_rows, fail

if TYPE_CHECKING:
    from twinpool.engine.kernels import Capability


def kernels_command(
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every candidate and why it is not taken.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="cpu, cuda (the one in this machine), or a capability such as sm_90.")
    ] = "cpu",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    layout: Annotated[
        str, typer.Option(help="Layout of KV pages: block_major or fp8_latent.")
    ] = "block_major",
    backend: Annotated[str, typer.Option(help="Admit only this backend.")] = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """List the kernels that a device would run."""
    from twinpool.engine.kernels import BLOCK_MAJOR, FP8_LATENT, REGISTRY
    from twinpool.engine.kernels.plugins import load_plugins
    from twinpool.engine.loader import DTYPES

    kinds = {str(kind).removeprefix("torch."): kind for kind in DTYPES.values()}
    if dtype not in kinds:
        raise fail(f"unknown dtype {dtype!r}; known: {', '.join(sorted(kinds))}", EXIT_USAGE)
    if layout not in (BLOCK_MAJOR, FP8_LATENT):
        raise fail(f"unknown layout {layout!r}; known: {BLOCK_MAJOR}, {FP8_LATENT}", EXIT_USAGE)
    capability = _capability(device)
    load_plugins(REGISTRY)
    rows: list[dict[str, object]] = []
    for operation in REGISTRY.operations():
        verdicts = REGISTRY.explain(
            operation, capability=capability, dtype=kinds[dtype], layout=layout, backend=backend or None
        )
        rows += [
            {
                "name": operation,
                "backend": verdict.kernel.backend,
                "chosen": "yes" if verdict.chosen else "",
                "priority": verdict.kernel.priority,
                "reason": verdict.reason,
                "note": verdict.kernel.note,
            }
            for verdict in verdicts
            if explain or verdict.chosen
        ]
    columns = ["name", "backend", "chosen", "priority", "reason"] if explain else ["name", "backend", "note"]
    emit_rows(rows, columns, output)


def _capability(device: str) -> "Capability":
    from twinpool.engine.kernels import Capability

    named = re.fullmatch(r"sm_(\d+)(\d)", device)
    if named:
        return Capability("cuda", (int(named[1]), int(named[2])))
    if device == "cpu":
        return Capability("cpu")
    if device != "cuda":
        raise fail(f"unknown device {device!r}; known: cpu, cuda, sm_NN", EXIT_USAGE)
    import torch

    if not torch.cuda.is_available():
        raise fail("this machine has no CUDA device; name a capability, such as sm_90", EXIT_USAGE)
    return Capability.of("cuda")
