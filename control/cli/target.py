# SPDX-License-Identifier: Apache-2.0
"""Which cluster a command talks to: an address given, a release on Kubernetes, or the local cluster's state file."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Annotated, Any, TypeVar

import grpc.aio
import typer

from twinpool.client import Client
from twinpool.cluster_client import ClusterClient
from twinpool.control.cli.access import access, failed
from twinpool.errors import TwinpoolError
from twinpool.router_client import RouterClient
from twinpool.rpc import channel

T = TypeVar("T")

ClusterOption = Annotated[
    str, typer.Option("--cluster", help="Name of the local cluster.", envvar="TWINPOOL_CLUSTER__NAME")
]
EndpointOption = Annotated[
    str,
    typer.Option(
        "--endpoint",
        help="A router, host:port. Default: the local cluster's.",
        envvar=["TWINPOOL_ENDPOINT", "TWINPOOL_CLIENT__ENDPOINT"],
    ),
]
ControlOption = Annotated[
    str,
    typer.Option(
        "--control",
        "--control-address",
        help="The control process, host:port. Default: the local cluster's.",
        envvar=["TWINPOOL_CONTROL", "TWINPOOL_CLIENT__CONTROL"],
    ),
]


def router_endpoint(cluster: str, endpoint: str) -> str:
    """Where to send requests."""
    return access().routers(cluster, endpoint, every=False)[0]


def router_endpoints(cluster: str, endpoint: str) -> list[str]:
    """All routers, for what one of them may know."""
    return access().routers(cluster, endpoint)


def control_endpoint(cluster: str, endpoint: str) -> str:
    """Where to send an operator's calls."""
    return access().control(cluster, endpoint)


def control_channel(endpoint: str) -> grpc.aio.Channel:
    """A channel to the control process, secured as the options say."""
    way = access()
    return channel(endpoint, way.config.rpc, way.dial(endpoint, "control"))


def router_client(endpoint: str) -> RouterClient:
    """What operators ask of a router."""
    way = access()
    return RouterClient(endpoint, way.config.rpc, way.dial(endpoint, "router"), key=way.api_key())


def client(endpoint: str) -> Client:
    """What clients ask of a router."""
    way = access()
    return Client(endpoint, way.config.rpc, way.dial(endpoint, "router"), key=way.api_key())


def cluster_client(endpoints: Sequence[str]) -> ClusterClient:
    """What clients ask of several routers, which are secured alike."""
    way = access()
    tls = [way.dial(endpoint, "router") for endpoint in endpoints]
    return ClusterClient(endpoints, way.config.rpc, tls[0], key=way.api_key())


def run_command(main: Coroutine[Any, Any, T]) -> T:
    """Runs a command's coroutine; an error of the table becomes a message and an exit code."""
    try:
        return asyncio.run(main)
    except TwinpoolError as error:
        raise failed(access().explained(error)) from error
