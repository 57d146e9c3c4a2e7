# SPDX-License-Identifier: Apache-2.0
"""What carries calls: gRPC for Python, or the same gRPC from C++ under an adapter of ours (``native``), where that was built.

The two are the same to handlers, clients and workers. The module ``twinpool._transport`` is there where gRPC's C headers were. Its gRPC
is the library that the machine has, which may be years older than Python's own: see CORE_MIN.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import grpc.aio

from twinpool.config import RpcConfig, TlsConfig
from twinpool.errors import ConfigError
from twinpool.logs import get_logger
from twinpool.rpc.options import Options
from twinpool.rpc.tls import PemFiles, Pems, read_pems

CORE_MIN: Final = 48
"""Oldest C core, by its major version, that is taken unasked: gRPC 1.73. Up to 1.56 one client could silence a server for all: for good
by more connections than it has file descriptors (CVE-2023-4785), or for as long as it sends a header without end (CVE-2023-33953)."""

_log = get_logger(__name__)


def wants_native(config: RpcConfig) -> bool:
    """Whether calls go over the C core. Raises ConfigError where that is demanded and was not built."""
    if config.transport == "python":
        return False
    try:
        core = str(import_module("twinpool._transport").core_version())
    except ImportError as error:
        # Not built, or built where gRPC's library was, and run where it is not.
        if config.transport == "native":
            raise ConfigError(
                f"rpc.transport is native, which needs gRPC's C library (Debian: libgrpc-dev to build): {error}",
                key="rpc.transport",
            ) from None
        _log.info("transport_not_there", transport="python", error=str(error))
        return False
    if int(core.partition(".")[0]) >= CORE_MIN:
        return True
    if config.transport == "native":
        _log.warning("transport_old", transport="native", core=core, wanted=CORE_MIN)
        return True
    _log.info("transport_old", transport="python", core=core, wanted=CORE_MIN)
    return False


def native_server(options: Options, guard: Any, tls: TlsConfig | None) -> grpc.aio.Server:
    """A server over the C core, with TLS where ``tls`` is given. Raises ConfigError if a file cannot be used."""
    from twinpool.rpc.native import NativeServer

    if tls is None:
        return NativeServer(options, (guard,))
    files = PemFiles(tls)
    # The first handshake asks for certificates, too: what is wrong with the files is to be known before.
    waiting: list[Pems] = [files.load()]

    def fetch() -> Any:
        pems = waiting.pop() if waiting else files.fetch()
        return None if pems is None else _certificates(pems)

    return NativeServer(options, (guard,), fetch)


def native_channel(
    target: str, options: Options, tls: TlsConfig | None, other: grpc.aio.Channel
) -> grpc.aio.Channel:
    """A channel over the C core. ``other``: a channel to the same target, for calls that are no streams both ways."""
    from twinpool.rpc.native import NativeChannel

    certificates = None if tls is None else _certificates(read_pems(tls))
    made: Any = NativeChannel(target, options, certificates, other)
    return made  # type: ignore[no-any-return]


def _certificates(pems: Pems) -> Any:
    from twinpool._transport import Certificates

    return Certificates(roots=pems.roots, key=pems.key, chain=pems.chain)
