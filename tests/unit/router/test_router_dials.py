# SPDX-License-Identifier: Apache-2.0
"""Whom a router dials: with roles in certificates, workers as workers and routers as routers, wherever they say they are."""

from pathlib import Path

import pytest
import trustme

from twinpool import rpc
from twinpool.config import RpcConfig, TlsConfig, TwinpoolConfig
from twinpool.errors import TwinpoolError
from twinpool.router.app import Router

DOMAIN = "pool.twinpool.internal"


def certificate(ca: trustme.CA, directory: Path, name: str) -> TlsConfig:
    """Of that name alone: no address is in it."""
    leaf, stem = ca.issue_cert(name), str(directory / name)
    leaf.private_key_pem.write_to_path(f"{stem}.key")
    Path(f"{stem}.pem").write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    return TlsConfig(
        cert_file=f"{stem}.pem", key_file=f"{stem}.key", ca_file=str(directory / "ca.pem"), role_domain=DOMAIN
    )


@pytest.mark.parametrize("role", ["worker", "router"])
async def test_a_router_expects_the_role_that_it_dials(tmp_path: Path, role: str) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    own = certificate(ca, tmp_path, f"router.{DOMAIN}")
    served = certificate(ca, tmp_path, f"worker.{DOMAIN}") if role == "worker" else own
    server = rpc.Server(RpcConfig(), served)
    target = f"127.0.0.1:{server.bind('127.0.0.1')}"
    await server.start()
    config = TwinpoolConfig.model_validate({"tls": own.model_dump()})
    router = Router(config, "r0")
    dials = {"worker": router.fleet.connect, "router": router.others._connect}
    try:
        assert router.others._connect_worker == router.fleet.connect
        async with dials.pop(role)(target) as right:
            await rpc.wait_ready(right, target, 60.0)
        (other,) = dials.values()
        async with other(target) as wrong:
            with pytest.raises(TwinpoolError, match="no connection"):
                await rpc.wait_ready(wrong, target, 1.0)
    finally:
        await router.stop(0.0)
        await server.stop(0.0)
