# SPDX-License-Identifier: Apache-2.0
"""A test that is killed leaves no namespace, link, process or mount of its hosts behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.chart import ROOT
from tests.support.netns import call
from tests.support.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TEST = """
import signal, sys, time
from pathlib import Path
from tests.support.netns import Network
from tests.support.sandbox import Sandbox, image_environment

place = Path(sys.argv[1])
with Network() as network:
    host = network.host("one")
    # A child of the container's first process, too.
    made = Sandbox(host, place, ("sh", "-c", "sleep 1234567 & echo up; wait"), image_environment())
    made.start()
    while "up" not in made.tail():
        time.sleep(0.01)
    print(network.prefix, host.holder.pid, made.pid, flush=True)
    signal.pause()
"""


def test_a_test_that_is_killed(hosts: None, tmp_path: Path) -> None:
    command = (sys.executable, "-c", TEST, str(tmp_path / "box"))
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    prefix, holder, first = process.stdout.readline().split()
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert {int(holder), int(first)} < {one.pid for one in family}
    # The shell goes on before its child has become what it runs.
    asyncio.run(until(lambda: any("1234567" in one.cmdline() for one in family)))
    assert f"{prefix}." in call("ip", "-o", "addr")
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    # With its last process the kernel takes a namespace away, when it comes to it.
    asyncio.run(until(lambda: f"{prefix}." not in call("ip", "-o", "addr")))
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert prefix not in call("nft", "list", "ruleset")
