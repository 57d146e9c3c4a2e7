# SPDX-License-Identifier: Apache-2.0
"""``twinpool health``, against a server of the product."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme
from click.testing import Result
from typer.testing import CliRunner

from twinpool import rpc
from twinpool.config import RpcConfig, TlsConfig
from twinpool.control.cli.main import app

DOMAIN = "cluster.twinpool"


@pytest.fixture
async def server() -> AsyncIterator[tuple[rpc.Server, int]]:
    found = rpc.Server(RpcConfig())
    port = found.bind("127.0.0.1")
    await found.start()
    yield found, port
    await found.stop(0)


async def ask(*arguments: str, **env: str) -> Result:
    words = ["health", *arguments, "--timeout", "30"]
    return await asyncio.to_thread(CliRunner().invoke, app, words, env={"TWINPOOL_CONFIG": None, **env})


async def test_a_process_is_live_before_it_is_ready(server: tuple[rpc.Server, int]) -> None:
    process, port = server
    assert (await ask(f"127.0.0.1:{port}", "--service", "live")).exit_code == 0
    assert (await ask(f"127.0.0.1:{port}")).exit_code == 1
    await process.set_serving(True)
    assert (await ask("127.0.0.1", "--port", str(port))).exit_code == 0


async def test_who_does_not_answer_is_told_from_who_is_not_ready(server: tuple[rpc.Server, int]) -> None:
    process, port = server
    unknown = await ask(f"127.0.0.1:{port}", "--service", "twinpool.v1.NoSuchService")
    assert unknown.exit_code == 2, unknown.output
    await process.stop(0)
    gone = await ask(f"127.0.0.1:{port}")
    assert gone.exit_code == 3, gone.output


async def test_a_role_has_to_exist(server: tuple[rpc.Server, int]) -> None:
    result = await ask(f"127.0.0.1:{server[1]}", "--role", "cook")
    assert result.exit_code == 2
    assert "worker" in result.output


def certificate(directory: Path) -> dict[str, str]:
    """The files of a worker."""
    ca = trustme.CA()
    files = {name: str(directory / name) for name in ("cert_file", "key_file", "ca_file")}
    leaf = ca.issue_cert(f"worker.{DOMAIN}", common_name="worker")
    Path(files["cert_file"]).write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
    Path(files["key_file"]).write_bytes(leaf.private_key_pem.bytes())
    Path(files["ca_file"]).write_bytes(ca.cert_pem.bytes())
    return files


async def test_it_shows_its_certificate_and_expects_the_role(tmp_path: Path) -> None:
    files = certificate(tmp_path)
    process = rpc.Server(RpcConfig(), TlsConfig(**files, role_domain=DOMAIN))
    port = process.bind("127.0.0.1")
    await process.start()
    env = {f"TWINPOOL_TLS__{name.upper()}": path for name, path in files.items()}
    env["TWINPOOL_TLS__ROLE_DOMAIN"] = DOMAIN
    arguments = (f"127.0.0.1:{port}", "--service", "live", "--role")
    try:
        assert (await ask(*arguments, "worker", **env)).exit_code == 0
        assert (await ask(*arguments, "router", **env)).exit_code == 3
        assert (await ask(*arguments, "worker")).exit_code == 3
    finally:
        await process.stop(0)
