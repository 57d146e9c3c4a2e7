# SPDX-License-Identifier: Apache-2.0
"""Clock skew: measured against a real etcd, against servers with another time, and with our own clock set wrong."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from twinpool.config import ClusterConfig
from twinpool.control.doctor.clock import check_etcd_clock, etcd_offset, told_offset
from twinpool.control.doctor.finding import Status
from twinpool.store import start_store


@contextmanager
def http_server(date: Callable[[], str | None]) -> Iterator[str]:
    """What etcd's HTTP side is to the measurement: an answer with a Date."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response_only(200)
            if (shown := date()) is not None:
                self.send_header("Date", shown)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("skew", [0.0, 5.25, -3.75])
def test_another_date_is_measured_to_its_bound(skew: float) -> None:
    with http_server(lambda: formatdate(time.time() + skew, usegmt=True)) as endpoint:
        found = etcd_offset(ClusterConfig(), endpoint)
        assert abs(found.seconds - skew) <= found.bound
        assert found.bound < 1.0, "finer than the header's second"
        judged = check_etcd_clock(ClusterConfig(), endpoint)
    assert judged.status is (Status.FAILED if skew else Status.OK)
    assert ("ahead of" if skew > 0 else "behind") in judged.detail or not skew
    assert not skew or "chrony" in judged.remedy


def test_a_real_etcd_and_our_own_clock_set_wrong(tmp_path: Path) -> None:
    server = start_store(tmp_path)
    try:
        if server.kind != "etcd":
            pytest.skip("there is no etcd here")
        right = check_etcd_clock(ClusterConfig(), server.endpoint)
        assert right.status is Status.OK, right.detail
        wrong = check_etcd_clock(ClusterConfig(), server.endpoint, lambda: time.time() - 7.5)
        assert wrong.status is Status.FAILED
        assert "ahead of this machine's" in wrong.detail
        found = etcd_offset(ClusterConfig(), server.endpoint, lambda: time.time() - 7.5)
        assert abs(found.seconds - 7.5) <= found.bound
    finally:
        server.stop()


def test_a_clock_that_does_not_answer_is_not_called_right() -> None:
    nobody = check_etcd_clock(ClusterConfig(), "127.0.0.1:1")
    assert nobody.status is Status.WARNING
    assert "not measured: Connection refused" in nobody.detail
    with http_server(lambda: None) as endpoint:
        assert "it does not say its time" in check_etcd_clock(ClusterConfig(), endpoint).detail
    stopped = formatdate(time.time(), usegmt=True)
    with http_server(lambda: stopped) as endpoint:
        assert "stood still" in check_etcd_clock(ClusterConfig(), endpoint).detail


def test_of_several_looks_the_quickest_counts() -> None:
    """Our clock says when each call was sent and answered; the other one is 2 s ahead."""
    times = iter([100.0, 101.0, 110.0, 110.2, 120.0, 121.0])
    answers = iter([102.5, 112.1, 122.5])
    found = told_offset(lambda: next(answers), lambda: next(times))
    assert found.seconds == pytest.approx(2.0)
    assert found.bound == pytest.approx(0.1)
    stale = told_offset(lambda: 12.0, iter([10.0, 10.0] * 3).__next__, stale=0.5)
    assert stale.seconds == pytest.approx(2.25)
    assert stale.bound == pytest.approx(0.25)
