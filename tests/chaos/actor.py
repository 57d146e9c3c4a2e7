# SPDX-License-Identifier: Apache-2.0
"""A worker's Ray actor on a host of the test's network."""

from __future__ import annotations

from tests.chaos.network import inside
from twinpool.worker.actor import WorkerActor


class HostedWorker(WorkerActor):
    """All of the worker's threads are in the namespace; Ray's own stay where they are."""

    def __init__(self, config_yaml: str, role: str, log_file: str, namespace: str) -> None:
        with inside(namespace):
            super().__init__(config_yaml, role, log_file)
