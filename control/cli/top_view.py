# SPDX-License-Identifier: Apache-2.0
"""What ``twinpool top`` shows: an overview as tables that fit a screen."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from twinpool.control.cli.drain import row_of as operation_row
from twinpool.control.overview.plain import plain
from twinpool.control.overview.roles import used_blocks
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import telemetry_pb2

Row = list[str | Text]

BAR_CELLS: Final = 8
_STATE_STYLES: Final = {
    "ready": "green",
    "starting": "cyan",
    "draining": "yellow",
    "flipping": "magenta",
    "unready": "red",
    "unreachable": "bold red",
}
# Those that begin with > are aligned to the right.
_POOL_TITLES = (
    "POOL", "ROLE", ">WANTED", ">READY", "OTHERS", ">RUN", ">WAIT", "UTIL", ">SWING", "KV", ">HIT", ">PROMPT/S", ">TOKENS/S",
)  # fmt: skip
_ROUTER_TITLES = (
    "ROUTER", ">QUEUE", ">TOKENS", ">RUN", ">TTFT P50", ">TTFT P99", ">ITL P50", ">ITL P99", ">REQ/S", ">REFUSED", "CONDITIONS",
)  # fmt: skip
_OPERATION_TITLES = ("OPERATION", "KIND", "WORKER", "STATE", "STEP", ">SECONDS", "ERROR")
_BUSY, _FULL = 0.6, 0.85
# From here on a bar is yellow, red.


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the workers' table. ``key`` is what it is sorted by; ``shown`` what it shows."""

    title: str
    key: Callable[[pb.WorkerStatus], Any]
    shown: Callable[[pb.WorkerStatus], str | Text]
    right: bool = True


def state_of(worker: pb.WorkerStatus) -> str:
    """In a word; a worker that does not answer is unreachable, whatever the store says."""
    name = pb.WorkerState.Name(worker.record.state).removeprefix("WORKER_STATE_").lower()
    if not worker.reachable:
        return "unreachable"
    return f"{name},cordoned" if getattr(worker.record, "cordoned", False) else name


def role_of(worker: pb.WorkerStatus) -> str:
    """prefill or decode."""
    return str(plain(worker.record)["role"])


def _kv(worker: pb.WorkerStatus) -> float:
    counts = worker.counts
    return used_blocks(counts) / counts.total_blocks if counts.total_blocks else 0.0


def _state(worker: pb.WorkerStatus) -> Text:
    name = state_of(worker)
    return Text(name, style=_STATE_STYLES.get(name.partition(",")[0], ""))


def _epoch(worker: pb.WorkerStatus) -> int:
    return int(getattr(worker.record, "epoch", 0))


def _columns() -> list[Column]:
    columns = [
        Column("WORKER", lambda w: w.record.worker.name, lambda w: w.record.worker.name, right=False),
        Column("POOL", lambda w: w.record.pool, lambda w: w.record.pool, right=False),
        Column("ROLE", role_of, role_of, right=False),
        Column("STATE", state_of, _state, right=False),
        Column("EPOCH", _epoch, lambda w: str(_epoch(w))),
        Column("RUN", lambda w: w.counts.running, lambda w: str(w.counts.running)),
        Column("WAIT", lambda w: w.counts.waiting, lambda w: str(w.counts.waiting)),
        Column("UTIL", lambda w: w.utilization, lambda w: bar(w.utilization), right=False),
        Column("KV", _kv, lambda w: bar(_kv(w)), right=False),
        Column("FREE", lambda w: w.counts.free_blocks, lambda w: str(w.counts.free_blocks)),
        Column("CACHED", lambda w: w.counts.cached_blocks, lambda w: str(w.counts.cached_blocks)),
        Column("HIT", lambda w: w.hit_rate, lambda w: percent(w.hit_rate if w.HasField("hit_rate") else None)),
        Column("PROMPT/S", lambda w: w.prompt_tokens_per_second, lambda w: number(w.prompt_tokens_per_second)),
        Column("TOKENS/S", lambda w: w.generation_tokens_per_second, lambda w: number(w.generation_tokens_per_second)),
        Column("STEP MS", lambda w: w.counts.step_time.ToNanoseconds(), lambda w: milliseconds(w.counts.step_time)),
        Column("READS", lambda w: w.counts.transfers, lambda w: str(w.counts.transfers)),
        Column("PINS", lambda w: w.counts.pinned_blocks, lambda w: str(w.counts.pinned_blocks)),
        Column("AGE S", lambda w: w.age.ToNanoseconds(), lambda w: f"{w.age.ToNanoseconds() / 1e9:.1f}"),
    ]  # fmt: skip
    # A role change is told by the record, where the protocol has it.
    known = {field.name for field in pb.WorkerRecord.DESCRIPTOR.fields}
    return [column for column in columns if column.title != "EPOCH" or "epoch" in known]


COLUMNS: Final = _columns()


def bar(share: float) -> Text:
    """A share of 1 as a bar and a percentage."""
    filled = round(min(1.0, max(0.0, share)) * BAR_CELLS)
    style = "red" if share >= _FULL else "yellow" if share >= _BUSY else "green"
    return Text.assemble(("█" * filled, style), ("·" * (BAR_CELLS - filled), "dim"), f"{100 * share:4.0f}%")


def percent(share: float | None) -> str:
    """A share of 1 in percent; "-" for none."""
    return "-" if share is None else f"{100 * share:.0f}%"


def number(value: float) -> str:
    """A rate: whole numbers once they are large enough."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def milliseconds(duration: Duration) -> str:
    """A duration in milliseconds with three digits or so."""
    value = duration.ToNanoseconds() / 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def sort_workers(overview: pb.Overview, column: int, reverse: bool) -> list[pb.WorkerStatus]:
    """The workers by a column, then by name."""
    by_name = sorted(overview.workers, key=lambda worker: worker.record.worker.name)
    return sorted(by_name, key=COLUMNS[column].key, reverse=reverse)


def headline(overview: pb.Overview) -> Text:
    """The cluster in two lines."""
    alive = [router.telemetry for router in overview.routers if router.reachable]
    seconds = max((one.window.ToNanoseconds() / 1e9 for one in alive), default=0.0)
    ended = sum(count.count for one in alive for count in one.ended)
    refused: dict[str, int] = {}
    for one in alive:
        for count in one.refused:
            refused[count.reason] = refused.get(count.reason, 0) + count.count
    refusals = ", ".join(f"{reason} {count}" for reason, count in sorted(refused.items())) or "none"
    at = time.strftime("%H:%M:%S", time.localtime(overview.at.ToNanoseconds() / 1e9))
    return Text.assemble(
        ("twinpool ", "bold"), (overview.cluster, "bold cyan"), f"  {at}  ",
        f"queue {sum(one.queued_requests for one in alive)}  running {sum(one.running_requests for one in alive)}  ",
        f"requests/s {number(ended / seconds if seconds else 0.0)}  refused {refusals}\n",
        "TTFT ms ", _percentiles(overview.time_to_first_token),
        "   short prompts ", _percentiles(overview.short_time_to_first_token),
        "   ITL ms ", _percentiles(overview.inter_token_latency),
        ("   p50/p90/p99 of the last minute", "dim"),
    )  # fmt: skip


def pools_table(overview: pb.Overview, width: int = 0) -> Table:
    """A row a role of each pool. ``width``: columns of the screen, here and below; what does not fit is left out; 0: no limit."""
    rows: list[Row] = []
    for pool in overview.pools:
        for role in pool.roles:
            others = ", ".join(
                f"{getattr(role, name)} {name}"
                for name in ("starting", "draining", "flipping", "unready", "unreachable")
                if getattr(role, name)
            )
            row: Row = [
                pool.pool,
                plain(role)["role"],
                str(role.desired) if role.HasField("desired") else "-",
                str(role.ready),
                Text(others, style="yellow"),
                str(role.running),
                str(role.waiting),
                bar(role.utilization),
                percent(role.utilization_swing),
                bar(role.kv_usage),
                percent(role.hit_rate if role.HasField("hit_rate") else None),
                number(role.prompt_tokens_per_second),
                number(role.generation_tokens_per_second),
            ]
            rows.append(row)
    return _table(_POOL_TITLES, rows, width, ("SWING", "PROMPT/S", "HIT", "TOKENS/S", "OTHERS", "KV"))


def workers_table(
    workers: list[pb.WorkerStatus], chosen: str, column: int, reverse: bool, width: int = 0
) -> Table:
    """A row a worker; the chosen one is marked, and so is the column that they are sorted by."""
    mark = "▼" if reverse else "▲"
    titles = [
        (">" if one.right else "") + one.title + (mark if at == column else "")
        for at, one in enumerate(COLUMNS)
    ]
    rows: list[Row] = [
        ["▶" if worker.record.worker.name == chosen else " ", *(one.shown(worker) for one in COLUMNS)]
        for worker in workers
    ]
    drops = (
        "PINS",
        "FREE",
        "AGE S",
        "PROMPT/S",
        "POOL",
        "READS",
        "CACHED",
        "STEP MS",
        "HIT",
        "TOKENS/S",
        "KV",
        "WAIT",
    )
    return _table(("", *titles), rows, width, drops, chosen)


def routers_table(overview: pb.Overview, width: int = 0) -> Table:
    """A row a router."""
    rows: list[Row] = []
    for router in overview.routers:
        one = router.telemetry
        seconds = one.window.ToNanoseconds() / 1e9
        ttft, itl = one.time_to_first_token_summary, one.inter_token_latency_summary
        conditions = [*one.conditions, *([f"{one.open_breakers} breakers open"] if one.open_breakers else [])]
        if not router.reachable:
            conditions = [f"unreachable: {router.error}"]
        rows.append(
            [
                router.record.name,
                str(one.queued_requests),
                str(one.queued_tokens),
                str(one.running_requests),
                *(_ms(part, field) for part in (ttft, itl) for field in ("p50", "p99")),
                number(sum(count.count for count in one.ended) / seconds if seconds else 0.0),
                str(sum(count.count for count in one.refused)),
                Text(", ".join(conditions), style="yellow" if router.reachable else "bold red"),
            ]
        )
    return _table(_ROUTER_TITLES, rows, width, ("TOKENS", "REQ/S", "ITL P99", "ITL P50"))


def operations_table(overview: pb.Overview, width: int = 0) -> Table:
    """A row an operation."""
    rows: list[Row] = []
    for operation in overview.operations:
        row = operation_row(operation)
        style = {"running": "cyan", "failed": "red"}.get(str(row["state"]), "dim")
        cells = [
            *(str(row[name]) for name in ("id", "kind", "worker", "state", "step")),
            f"{row['seconds']:.1f}",
        ]
        rows.append([Text(cell, style=style) for cell in (*cells, str(row["error"]))])
    return _table(_OPERATION_TITLES, rows, width, ("SECONDS", "STEP"))


def whole(overview: pb.Overview, column: int = 0, reverse: bool = False) -> Group:
    """All of it, for a page that has no end."""
    workers = sort_workers(overview, column, reverse)
    parts: list[RenderableType] = [headline(overview), "", pools_table(overview), ""]
    parts += [workers_table(workers, "", column, reverse), "", routers_table(overview)]
    if overview.operations:
        parts += ["", operations_table(overview)]
    return Group(*parts)


def _table(
    titles: Sequence[str], rows: Sequence[Row], width: int, drops: Sequence[str], chosen: str = ""
) -> Table:
    """A table of at most ``width`` columns: of those in ``drops`` the first ones go until it fits. What is still too long is cut."""
    kept = list(range(len(titles)))
    names = [title.strip(">▲▼") for title in titles]
    widths = [
        max(cell_len(title.removeprefix(">")), *(cell_len(_plain(row[at])) for row in rows), 0)
        for at, title in enumerate(titles)
    ]
    for name in drops:
        if width and sum(widths[at] + 1 for at in kept) > width:
            kept = [at for at in kept if names[at] != name]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for at in kept:
        title = titles[at]
        table.add_column(
            title.removeprefix(">"), justify="right" if title.startswith(">") else "left", no_wrap=True
        )
    for row in rows:
        here = bool(chosen) and _plain(row[0]) == "▶"
        table.add_row(*(row[at] for at in kept), style="reverse" if here else "")
    return table


def _plain(cell: str | Text) -> str:
    return cell if isinstance(cell, str) else cell.plain


def _percentiles(summary: telemetry_pb2.LatencySummary) -> Text:
    return Text("/".join(_ms(summary, field) for field in ("p50", "p90", "p99")), style="bold")


def _ms(summary: telemetry_pb2.LatencySummary, field: str) -> str:
    return milliseconds(getattr(summary, field)) if summary.count else "-"
