# SPDX-License-Identifier: Apache-2.0
"""``twinpool demo``: a whole cluster on this machine, three answers from a real model, and nothing left behind."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from twinpool.client import Completion, Turn, request
from twinpool.config import TwinpoolConfig
from twinpool.control.cli.config import parse_settings, read_config
from twinpool.control.cli.generate import figures, stream_answer
from twinpool.control.cli.model import resolve_model
from twinpool.control.cli.output import Format, FormatOption, emit_rows, err, out
from twinpool.control.cli.progress import stages
from twinpool.control.cli.target import run_command
from twinpool.control.local import LocalCluster
from twinpool.rpc import stop_event

ARTICLE = (
    "The Rosetta Stone is a slab of dark granodiorite found in 1799 by French soldiers who were strengthening a fort "
    "near the town of Rashid, which Europeans called Rosetta, in the Nile delta. It carries one decree, issued at "
    "Memphis in 196 BC on behalf of King Ptolemy V, in three scripts: Egyptian hieroglyphs at the top, Demotic in the "
    "middle, and Ancient Greek at the bottom. Because the Greek could be read, the stone became the key to the other "
    "two. Thomas Young showed that some signs spelled the sounds of a royal name, and in 1822 Jean-Francois "
    "Champollion announced that he could read the hieroglyphs. The stone has been on display in the British Museum "
    "in London almost without a break since 1802."
)


def demo(
    model: Annotated[
        str, typer.Option(help="A checkpoint directory or the name of a known model.")
    ] = "smollm2-135m-instruct",
    prefill: Annotated[int, typer.Option(help="Prefill workers.", min=1)] = 1,
    decode: Annotated[int, typer.Option(help="Decode workers.", min=1)] = 1,
    max_tokens: Annotated[int, typer.Option(help="Most tokens an answer.", min=1)] = 48,
    embedded_store: Annotated[
        bool, typer.Option(help="Use the embedded store even if etcd is installed.")
    ] = False,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any option, as section.key=value.")
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Start a cluster here, ask it three questions, print what they cost, stop it."""
    path = resolve_model(model)
    overrides: dict[str, object] = {
        "cluster.name": "demo",
        "model.path": str(path),
        "model.name": path.name,
        "kv.num_blocks": 256,
        "pools.prefill_workers": prefill,
        "pools.decode_workers": decode,
        # On an idle machine the decode worker may as well compute a prompt itself; here each answer shows a hand-off.
        "router.local_prefill": False,
        "log.level": "warning",
    }
    config = read_config(None, overrides | parse_settings(setting or []))
    rows = run_command(_demo(config, max_tokens, embedded_store, live=output is Format.TABLE))
    columns = [
        "prompt",
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        "ttft_ms",
        "tokens_per_s",
        "kv_mb",
        "kv_gb_per_s",
    ]
    if output is Format.TABLE:
        out.print()
    emit_rows(rows, columns, output, title="What it cost (KV pulled over NIXL by the decode worker)")


async def _demo(
    config: TwinpoolConfig, max_tokens: int, embedded: bool, *, live: bool
) -> list[dict[str, object]]:
    stopping = stop_event()
    with tempfile.TemporaryDirectory(prefix="twinpool-demo-") as directory:
        cluster = LocalCluster(config, Path(directory), embedded_store=embedded)
        try:
            with stages(live) as progress:
                await cluster.start(progress.stage, stopping)
            endpoints = cluster.router_endpoints
            if live:
                err.print(f"[dim]{cluster.describe()}[/]")
            return await _questions(endpoints, max_tokens, live)
        finally:
            with stages(live) as progress:
                progress.stage("Stopping")
                await cluster.stop()


async def _questions(endpoints: Sequence[str], max_tokens: int, live: bool) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []

    async def ask(label: str, turns: list[Turn]) -> Completion:
        if live:
            out.print(f"[dim]── {label} ──[/]")
        answer = await stream_answer(
            endpoints, request(chat=turns, max_tokens=max_tokens, temperature=0.0), live=live
        )
        rows.append({"prompt": label, **figures(answer), "text": answer.texts[0]})
        return answer

    await ask("a question", [("user", "What is the capital of France?")])
    turns: list[Turn] = [("user", f"{ARTICLE}\n\nWho announced that he could read the hieroglyphs?")]
    first = await ask("a long prompt", turns)
    turns += [("assistant", first.texts[0]), ("user", "In which museum is the stone?")]
    await ask("its second turn", turns)
    return rows
