# SPDX-License-Identifier: Apache-2.0
"""A line plot as SVG, with nothing but this file, or as PNG where matplotlib is installed."""

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

Line = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 40, 52
_MOST_TICKS = 16
_MOST_MARKS = 64
"""Points of a line beyond which they are not marked one by one."""
_COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8a5a9e", "#b8860b", "#4a4a4a")


class PlotError(RuntimeError):
    """A plot that can't be written; the message says what would help."""


def write_plot(path: Path, title: str, x_label: str, y_label: str, lines: Mapping[str, Line]) -> None:
    """Writes a plot; the name's ending chooses the format. Raises PlotError."""
    if path.suffix == ".svg":
        path.write_text(svg(title, x_label, y_label, lines))
    elif path.suffix == ".png":
        _with_matplotlib(path, title, x_label, y_label, lines)
    else:
        raise PlotError(f"{path.name}: allowed endings: .svg, .png")


def svg(title: str, x_label: str, y_label: str, lines: Mapping[str, Line]) -> str:
    """The plot as an SVG document."""
    points = [point for line in lines.values() for point in line]
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_high = max(y for _, y in points) or 1.0
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        return _LEFT + across * width, _TOP + height * (1 - y / y_high)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 24, title, size=15),
        _text(_LEFT + width / 2, _HEIGHT - 12, x_label, anchor="middle"),
        _text(16, _TOP + height / 2, y_label, anchor="middle", turn=-90),
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = place(x_low, y_high * share)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + width}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{y_high * share:.3g}", anchor="end"))
    for x_value in _ticks(sorted({x for x, _ in points})):
        x, _ = place(x_value, 0)
        parts.append(_text(x, _TOP + height + 18, f"{x_value:g}", anchor="middle"))
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        placed = [place(x, y) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(placed) <= _MOST_MARKS:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        y = _TOP + 16 + 18 * number
        parts.append(f'<rect x="{_LEFT + width + 14}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(_LEFT + width + 30, y, name))
    return "\n".join([*parts, "</svg>", ""])


def _ticks(values: Sequence[float]) -> list[float]:
    """Where the axis is labelled: at every value, or, of many, at some six round ones."""
    if len(values) <= _MOST_TICKS:
        return list(values)
    raw = (values[-1] - values[0]) / 6
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * round_one for round_one in (1, 2, 5, 10) if power * round_one >= raw)
    first = math.ceil(values[0] / step)
    return [step * number for number in range(first, math.floor(values[-1] / step) + 1)]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, turn: int = 0) -> str:
    turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{turned}>{escape(text)}</text>'


def _with_matplotlib(path: Path, title: str, x_label: str, y_label: str, lines: Mapping[str, Line]) -> None:
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise PlotError("a PNG needs matplotlib; an SVG does not") from error
    figure = module.Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    for name, line in lines.items():
        marker = "o" if len(line) <= _MOST_MARKS else None
        axes.plot([x for x, _ in line], [y for _, y in line], marker=marker, label=name)
    axes.set(title=title, xlabel=x_label, ylabel=y_label, ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=150)
