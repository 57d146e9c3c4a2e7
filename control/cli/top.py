# SPDX-License-Identifier: Apache-2.0
"""``twinpool top``: the cluster, live."""

import asyncio
import contextlib
import io
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import grpc
import typer
from rich.console import Console
from rich.live import Live

from twinpool.control.cli.access import access
from twinpool.control.cli.output import EXIT_USAGE, Format, FormatOption, emit_data, fail, out
from twinpool.control.cli.target import (
    ClusterOption,
    ControlOption,
    control_channel,
    control_endpoint,
    run_command,
)
from twinpool.control.cli.top_state import Asked, Top
from twinpool.control.cli.top_view import COLUMNS, whole
from twinpool.control.overview.plain import plain
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import control_pb2_grpc, worker_pb2

CALL_SECONDS: Final = 15.0
RETRY_SECONDS: Final = 1.0
"""Time between two tries to reach a control process that is away."""

SVG_WIDTH: Final = 140
_METHODS: Final = frozenset(pb.DESCRIPTOR.services_by_name["ControlService"].methods_by_name)


def top(
    interval: Annotated[
        float, typer.Option("--interval", min=0.2, max=60, help="Time between two looks, in seconds.")
    ] = 1.0,
    pool: Annotated[str, typer.Option("--pool", help="Only this pool's workers.")] = "",
    sort: Annotated[
        str, typer.Option("--sort", help="Column of the workers to sort by, such as UTIL.")
    ] = "WORKER",
    once: Annotated[bool, typer.Option("--once", help="Print it once and end.")] = False,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="With --once: write a picture of it as well.")
    ] = None,
    cluster: ClusterOption = "local",
    control: ControlOption = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """Show pools, workers, routers and operations, live. Without a terminal, or as JSON or YAML, once."""
    titles = [column.title for column in COLUMNS]
    if sort.upper() not in titles:
        raise fail(f"--sort {sort}: no such column; there are {', '.join(titles)}", EXIT_USAGE)
    endpoint, column = control_endpoint(cluster, control), titles.index(sort.upper())
    # What has most of it is looked for at the top; names are read from A on.
    reverse = COLUMNS[column].right or sort.upper() in ("UTIL", "KV")
    if once or output is not Format.TABLE or not (sys.stdout.isatty() and sys.stdin.isatty()):
        overview = run_command(_once(endpoint, pool))
        if output is Format.TABLE:
            out.print(whole(overview, column, reverse))
        elif output is Format.NAME:
            for worker in overview.workers:
                print(worker.record.worker.name)
        else:
            emit_data(plain(overview), output)
        if svg is not None:
            _draw(overview, column, reverse, svg)
        return
    state = Top(_METHODS, column=column, reverse=reverse)
    run_command(_live(endpoint, pool, interval, state))


async def _once(endpoint: str, pool: str) -> pb.Overview:
    async with control_channel(endpoint) as connection:
        stub = control_pb2_grpc.ControlServiceStub(connection)
        try:
            answer = await stub.GetOverview(pb.GetOverviewRequest(pool=pool), timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return answer.overview


def _draw(overview: pb.Overview, column: int, reverse: bool, path: Path) -> None:
    console = Console(record=True, width=SVG_WIDTH, file=io.StringIO())
    console.print(whole(overview, column, reverse))
    picture = console.export_svg(title=f"twinpool top --cluster {overview.cluster}")
    # Fonts of another site: the viewer's own will do.
    path.write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL))


class _Session:
    """One run of the live view."""

    def __init__(self, endpoint: str, stub: Any, state: Top, live: Live) -> None:
        self._endpoint = endpoint
        self._stub, self._state, self._live = stub, state, live
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, pool: str, interval: float) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin.fileno(), self._read)
        loop.add_signal_handler(signal.SIGWINCH, self.draw)
        watching = asyncio.ensure_future(self._watch(pool, interval))
        try:
            await self._over.wait()
        finally:
            loop.remove_reader(sys.stdin.fileno())
            loop.remove_signal_handler(signal.SIGWINCH)
            for task in (watching, *self._tasks):
                task.cancel()
            await asyncio.gather(watching, *self._tasks, return_exceptions=True)

    def draw(self) -> None:
        size = self._live.console.size
        self._live.update(self._state.render(size.width, size.height), refresh=True)

    async def _watch(self, pool: str, interval: float) -> None:
        request = pb.WatchOverviewRequest(pool=pool)
        request.interval.FromNanoseconds(int(interval * 1e9))
        while True:
            try:
                async for answer in self._stub.WatchOverview(request):
                    self._state.take(answer.overview)
                    self.draw()
                self._state.lost = "the control process has ended; waiting for it"
            except grpc.RpcError as error:
                known = from_rpc_error(error)
                self._state.lost = f"{known.reason}: {known.message}; what you see is old"
            self.draw()
            await asyncio.sleep(RETRY_SECONDS)
            with contextlib.suppress(TwinpoolError):
                # A port-forward has ended with its pod.
                access().dial(self._endpoint, "control")

    def _read(self) -> None:
        text = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
        if not text:
            self._over.set()
            return
        for key in _keys(text):
            asked = self._state.press(key)
            if asked is not None:
                task = asyncio.ensure_future(self._do(asked))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if self._state.over:
            self._over.set()
        self.draw()

    async def _do(self, asked: Asked) -> None:
        name = asked.worker.record.worker.name
        self._state.notice = f"{asked.act.label} {name} ..."
        self.draw()
        request = getattr(pb, f"{asked.act.rpc}Request")(worker=name)
        if asked.act.rpc == "FlipWorker":
            prefill = asked.worker.record.role == worker_pb2.ROLE_PREFILL
            request.role = worker_pb2.ROLE_DECODE if prefill else worker_pb2.ROLE_PREFILL
        try:
            answer = await getattr(self._stub, asked.act.rpc)(request, timeout=CALL_SECONDS)
            begun = getattr(getattr(answer, "operation", None), "id", "")
            self._state.notice = f"{asked.act.label} {name}: {begun or 'done'}"
        except grpc.RpcError as error:
            known = from_rpc_error(error)
            self._state.notice = f"{known.reason}: {known.message}"
        self.draw()


async def _live(endpoint: str, pool: str, interval: float, state: Top) -> None:
    # Not the one for tables: it does not wrap, and a screen must not be wider than it is.
    console = Console(highlight=False)
    async with control_channel(endpoint) as connection:
        stub = control_pb2_grpc.ControlServiceStub(connection)
        with _raw(), Live(console=console, screen=True, auto_refresh=False) as live:
            session = _Session(endpoint, stub, state, live)
            session.draw()
            await session.run(pool, interval)


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Keys come one by one and unseen; the terminal is as it was afterwards."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _keys(text: str) -> Iterator[str]:
    """Single keys; an arrow is three characters."""
    at = 0
    while at < len(text):
        width = 3 if text.startswith(("\x1b[", "\x1bO"), at) else 1
        yield text[at : at + width].replace("\x1bO", "\x1b[")
        at += width
