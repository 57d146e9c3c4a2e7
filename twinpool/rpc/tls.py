# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS from files. A server takes renewed files at the next connection, without a restart."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from twinpool.config import TlsConfig
from twinpool.errors import ConfigError
from twinpool.logs import get_logger

_log = get_logger(__name__)

_Stamp = tuple[tuple[int, int, int], ...]


def _read(path: str, key: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"tls.{key}: cannot read {path}: {error.strerror}", key=f"tls.{key}") from None


def _check_pair(tls: TlsConfig) -> None:
    """Raises ConfigError unless key and certificate belong together: gRPC would fail only at a handshake."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(tls.cert_file, tls.key_file)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"tls.cert_file {tls.cert_file} and tls.key_file {tls.key_file} do not form a pair: {error}",
            key="tls.cert_file",
        ) from None


@dataclass(frozen=True, slots=True)
class Pems:
    """What the three files hold."""

    roots: bytes
    key: bytes
    chain: bytes


def read_pems(tls: TlsConfig) -> Pems:
    """The files as they are now. Raises ConfigError if one is missing or the pair does not match."""
    _check_pair(tls)
    return Pems(
        roots=_read(tls.ca_file, "ca_file"),
        key=_read(tls.key_file, "key_file"),
        chain=_read(tls.cert_file, "cert_file"),
    )


def channel_credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    """Client credentials, read now: a channel that is made anew takes renewed files. What is not given is not shown, and
    without a CA gRPC's own list of public ones decides."""
    key = chain = None
    if tls.cert_file:
        _check_pair(tls)
        key, chain = _read(tls.key_file, "key_file"), _read(tls.cert_file, "cert_file")
    roots = _read(tls.ca_file, "ca_file") if tls.ca_file else None
    return grpc.ssl_channel_credentials(root_certificates=roots, private_key=key, certificate_chain=chain)


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Server credentials that demand a client certificate and follow the files."""
    files = PemFiles(tls)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        pems = files.fetch()
        return None if pems is None else _configuration(pems)

    # The stubs do not know that None means "no change".
    following: Callable[[], Any] = fetch
    return grpc.dynamic_ssl_server_credentials(
        _configuration(files.load()), following, require_client_authentication=True
    )


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.chain)], pems.roots)


class PemFiles:
    """The three files, and whether they have changed since they were loaded."""

    def __init__(self, tls: TlsConfig) -> None:
        self._tls = tls
        self._stamp: _Stamp = ()

    def load(self) -> Pems:
        """Raises ConfigError if a file is missing or the pair does not match."""
        stamp = self._stamps()
        loaded = read_pems(self._tls)
        self._stamp = stamp
        return loaded

    def fetch(self) -> Pems | None:
        """Called for each new connection. None keeps the present files, also while a renewal is half done."""
        try:
            if self._stamps() == self._stamp:
                return None
            loaded = self.load()
        except ConfigError as error:
            _log.warning("tls_reload_failed", error=error.message)
            return None
        _log.info("tls_reloaded", cert_file=self._tls.cert_file)
        return loaded

    def _stamps(self) -> _Stamp:
        stamps = []
        for key in ("cert_file", "key_file", "ca_file"):
            path = getattr(self._tls, key)
            try:
                found = Path(path).stat()
            except OSError as error:
                raise ConfigError(
                    f"tls.{key}: cannot read {path}: {error.strerror}", key=f"tls.{key}"
                ) from None
            # The inode tells an atomic replacement within one clock tick.
            stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
        return tuple(stamps)


class HttpsContext:
    """The server side of TLS for HTTP, as ``server_credentials`` is for gRPC: clients show a certificate, files are followed."""

    def __init__(self, tls: TlsConfig) -> None:
        """Raises ConfigError if a file is missing or the pair does not match."""
        self._tls = tls
        self._files = PemFiles(tls)
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.verify_mode = ssl.CERT_REQUIRED
        self._files.load()
        self._use()

    def refresh(self) -> None:
        """Takes renewed files, for connections from now on. To be called now and then."""
        if self._files.fetch() is not None:
            self._use()

    def _use(self) -> None:
        self.context.load_cert_chain(self._tls.cert_file, self._tls.key_file)
        self.context.load_verify_locations(self._tls.ca_file)
