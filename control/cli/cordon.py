# SPDX-License-Identifier: Apache-2.0
"""``twinpool cordon`` and ``twinpool uncordon``."""

from twinpool.control.cli.calls import CALL_SECONDS, ask
from twinpool.control.cli.drain import WorkerArgument
from twinpool.control.cli.output import err
from twinpool.control.cli.target import ClusterOption, ControlOption, control_endpoint, run_command
from twinpool.v1 import control_pb2 as pb


def cordon(worker: WorkerArgument, cluster: ClusterOption = "local", control: ControlOption = "") -> None:
    """Keep new work away from a worker. What runs there goes on; it stays so after a restart, until `twinpool uncordon`."""
    request, endpoint = pb.CordonWorkerRequest(worker=worker), control_endpoint(cluster, control)
    answer = run_command(ask(endpoint, lambda stub: stub.CordonWorker(request, timeout=CALL_SECONDS)))
    _say(worker, "cordoned", answer.told)


def uncordon(worker: WorkerArgument, cluster: ClusterOption = "local", control: ControlOption = "") -> None:
    """Give new work to a worker again."""
    request, endpoint = pb.UncordonWorkerRequest(worker=worker), control_endpoint(cluster, control)
    answer = run_command(ask(endpoint, lambda stub: stub.UncordonWorker(request, timeout=CALL_SECONDS)))
    _say(worker, "uncordoned", answer.told)


def _say(worker: str, what: str, told: bool) -> None:
    err.print(f"{worker} is {what}" if told else f"{worker} will be {what} as soon as it can be reached")
