# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: arguments, the machine's description, medians, one JSON object at the end."""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

Figures = dict[str, float]


def arguments(description: str, *extra: tuple[str, dict[str, object]]) -> argparse.Namespace:
    """``--quick``, ``--json`` and what the benchmark adds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a check that it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    for name, options in extra:
        parser.add_argument(name, **options)  # type: ignore[arg-type]
    return parser.parse_args()


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as info:
            model = next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def interleave(rounds: int, variants: Mapping[str, Callable[[], Figures]]) -> dict[str, Figures]:
    """Runs the variants A B A B ..., ``rounds`` times each, and returns the median of every figure.

    On a shared machine neighbours come and go; alternating spreads them over all variants alike.
    """
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in variants}
    for _ in range(rounds):
        for name, measure in variants.items():
            for figure, value in measure().items():
                samples[name].setdefault(figure, []).append(value)
    return {
        name: {figure: statistics.median(values) for figure, values in found.items()}
        for name, found in samples.items()
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0-1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1e6) * len(ordered) // 1_000_000) - 1))]


def report(claim: str, figures: Mapping[str, object], ratios: Mapping[str, float], *, as_json: bool) -> None:
    """Prints the result: one JSON object, or a table for a person."""
    if as_json:
        document = {
            "claim": claim,
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "machine": machine(),
            "figures": dict(figures),
            "ratios": dict(ratios),
        }
        print(json.dumps(document))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=claim, title_justify="left", box=None)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in {**figures, **{f"ratio {key}": value for key, value in ratios.items()}}.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
