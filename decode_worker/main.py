# SPDX-License-Identifier: Apache-2.0
"""The decode worker's process."""

from twinpool.config import TwinpoolConfig
from twinpool.worker.main import run_worker


def run(config: TwinpoolConfig) -> int:
    """Runs a decode worker in the foreground until SIGINT or SIGTERM. Returns the exit status."""
    return run_worker(config, "decode")
