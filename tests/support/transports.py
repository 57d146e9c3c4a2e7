# SPDX-License-Identifier: Apache-2.0
"""Both carriers of calls, for tests that hold of either: import a fixture into the module, and each of its tests runs twice."""

from functools import partial

import pytest

from twinpool import rpc

TRANSPORTS = ("python", "native")


def _built(transport: str) -> str:
    if transport == "native":
        pytest.importorskip("twinpool._transport", reason="built without gRPC's C headers")
    return transport


@pytest.fixture(autouse=True, params=TRANSPORTS)
def each_rpc_transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """``rpc.Server``, called by clients over gRPC for Python."""
    transport = _built(request.param)
    if transport == "native":
        monkeypatch.setattr(rpc, "Server", partial(rpc.Server, native=True))
    return transport


@pytest.fixture(autouse=True, params=["python", pytest.param("native", marks=pytest.mark.slow)])
def each_transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Routers whose configuration does not say which."""
    transport = _built(request.param)
    monkeypatch.setenv("TWINPOOL_RPC__TRANSPORT", transport)
    return transport
