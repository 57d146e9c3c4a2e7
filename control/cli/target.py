# SPDX-License-Identifier: Apache-2.0
"""Which cluster a command talks to: an endpoint given, or the local cluster's state file."""

import asyncio
import os
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

import grpc.aio
import typer

from twinpool.control import state
from twinpool.control.cli.config import read_config
from twinpool.control.cli.output import EXIT_FAILED, EXIT_UNAVAILABLE, EXIT_USAGE, fail
from twinpool.errors import TwinpoolError
from twinpool.rpc import channel

T = TypeVar("T")

ClusterOption = Annotated[
    str, typer.Option("--cluster", help="Name of the local cluster.", envvar="TWINPOOL_CLUSTER__NAME")
]
EndpointOption = Annotated[
    str,
    typer.Option(
        "--endpoint", help="A router, host:port. Default: the local cluster's.", envvar="TWINPOOL_ENDPOINT"
    ),
]
ControlOption = Annotated[
    str,
    typer.Option(
        "--control",
        help="The control process, host:port. Default: the local cluster's.",
        envvar="TWINPOOL_CONTROL",
    ),
]

KEY_VARIABLE = "TWINPOOL_KEY"
"""The API key that commands show; a flag would be seen by everybody on the machine."""

_USAGE_CODES = {"INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS"}
_UNAVAILABLE_CODES = {"UNAVAILABLE", "DEADLINE_EXCEEDED"}


def local_state(cluster: str) -> state.LocalState:
    """The running local cluster's state; ends the command if there is none."""
    found = state.read(cluster)
    if found is None or not found.alive():
        raise fail(f"no local cluster {cluster!r} is running: start one with `twinpool up`", EXIT_UNAVAILABLE)
    return found


def router_endpoint(cluster: str, endpoint: str) -> str:
    """Where to send requests."""
    return endpoint or local_state(cluster).router_endpoints[0]


def router_endpoints(cluster: str, endpoint: str) -> list[str]:
    """All routers, for what one of them may know."""
    return [endpoint] if endpoint else list(local_state(cluster).router_endpoints)


def control_endpoint(cluster: str, endpoint: str) -> str:
    """Where to send an operator's calls."""
    return endpoint or local_state(cluster).control_endpoint


def control_channel(endpoint: str) -> grpc.aio.Channel:
    """A channel to the control process, with the certificate of TWINPOOL_CONFIG or the environment if there is one."""
    config = read_config()
    return channel(endpoint, config.rpc, config.tls, role="control")


def api_key() -> str:
    """The key that commands show; "" for none."""
    return os.environ.get(KEY_VARIABLE, "")


def run_command(main: Coroutine[Any, Any, T]) -> T:
    """Runs a command's coroutine; an error of the table becomes a message and an exit code."""
    try:
        return asyncio.run(main)
    except TwinpoolError as error:
        code = EXIT_FAILED
        if error.code.name in _USAGE_CODES:
            code = EXIT_USAGE
        elif error.code.name in _UNAVAILABLE_CODES:
            code = EXIT_UNAVAILABLE
        raise fail(f"{error.reason}: {error.message}. {error.spec.user_action}", code) from error
