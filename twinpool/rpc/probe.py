# SPDX-License-Identifier: Apache-2.0
"""Why a connection does not come about. gRPC says little of it, so one is tried by hand, step by step."""

from __future__ import annotations

import socket
import ssl
from typing import Final

from twinpool.config import TlsConfig
from twinpool.errors import TwinpoolError

PROBE_SECONDS: Final = 3.0
"""Longest wait for each step."""

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a client of HTTP/2 begins: the preface, and empty settings."""

_TLS_ALERT: Final = 0x15
_NOT_TLS: Final = (
    "WRONG_VERSION_NUMBER",
    "UNEXPECTED_MESSAGE",
    "HTTP_REQUEST",
    "PACKET_LENGTH",
    "RECORD_LAYER",
)


def why_unreachable(endpoint: str, tls: TlsConfig | None = None) -> TwinpoolError | None:
    """What keeps a client from ``endpoint`` (host:port), or None if the probe finds nothing wrong. Blocks for some seconds at most.

    ``tls``: what the client shows and expects; None: it does not speak TLS.
    """
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), PROBE_SECONDS) as connection:
            if tls is None or not tls.enabled:
                return _plain(connection, endpoint)
            return _secured(connection, endpoint, host, tls)
    except socket.gaierror as error:
        return _gone(endpoint, f"the name {host} is not known: {error.strerror}")
    except TimeoutError:
        return _gone(endpoint, f"no answer within {PROBE_SECONDS:g} s: is there a firewall in between?")
    except ConnectionRefusedError:
        return _gone(endpoint, "nobody listens there")
    except OSError as error:
        return _gone(endpoint, error.strerror or str(error))


def _gone(endpoint: str, why: str) -> TwinpoolError:
    return TwinpoolError("SERVER_UNREACHABLE", f"{endpoint}: {why}")


def _plain(connection: socket.socket, endpoint: str) -> TwinpoolError | None:
    """A server that speaks TLS answers with an alert, or hangs up."""
    try:
        connection.sendall(_PREFACE)
        answer = connection.recv(9)
    except TimeoutError:
        return None
    except OSError:
        answer = b""
    if answer and answer[0] != _TLS_ALERT:
        return None
    return TwinpoolError("TLS_EXPECTED", f"{endpoint} speaks TLS") if _speaks_tls(connection) else None


def _speaks_tls(before: socket.socket) -> bool:
    """Whether the peer of ``before`` shows a certificate to a new connection, whichever it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection(before.getpeername()[:2], PROBE_SECONDS) as fresh,
            context.wrap_socket(fresh),
        ):
            return True
    except OSError:
        return False


def _secured(connection: socket.socket, endpoint: str, host: str, tls: TlsConfig) -> TwinpoolError | None:
    context = ssl.create_default_context(cafile=tls.ca_file or None)
    if tls.cert_file:
        context.load_cert_chain(tls.cert_file, tls.key_file)
    context.set_alpn_protocols(["h2"])
    name = tls.server_name or host
    try:
        secure = context.wrap_socket(connection, server_hostname=name, suppress_ragged_eofs=False)
    except ssl.SSLCertVerificationError as error:
        return TwinpoolError("SERVER_NOT_TRUSTED", f"{endpoint}: {_untrusted(error, name, tls)}")
    except TimeoutError:
        return None
    except OSError as error:
        return _refused(endpoint, error, tls)
    try:
        with secure:
            # A server judges the client's certificate after the client's part of the handshake; gRPC's then hangs up.
            secure.sendall(_PREFACE)
            secure.recv(9)
    except TimeoutError:
        return None
    except OSError as error:
        return _refused(endpoint, error, tls, met=True)
    return None


def _untrusted(error: ssl.SSLCertVerificationError, name: str, tls: TlsConfig) -> str:
    text = error.verify_message.rstrip(".")
    if error.verify_code in (18, 19, 20, 21):
        who = f"the CA of {tls.ca_file}" if tls.ca_file else "a public CA"
        return f"its certificate was not signed by {who} ({text})"
    if error.verify_code in (62, 64):
        return f"its certificate is not for the name {name!r} ({text})"
    return f"its certificate: {text}"


def _refused(endpoint: str, error: OSError, tls: TlsConfig, *, met: bool = False) -> TwinpoolError:
    """``met``: whether the server's part of the handshake had succeeded."""
    reason = (error.reason or "") if isinstance(error, ssl.SSLError) else ""
    hung_up = not reason or "EOF" in reason
    if not met and (hung_up or any(word in reason for word in _NOT_TLS)):
        return TwinpoolError("TLS_NOT_SPOKEN", f"{endpoint} answers, but not in TLS")
    if not tls.cert_file:
        return TwinpoolError("CERTIFICATE_REQUIRED", f"{endpoint} asks for a certificate, and none was shown")
    told = "it hangs up" if hung_up else reason.lower().replace("_", " ")
    return TwinpoolError("CERTIFICATE_REFUSED", f"{endpoint} does not accept {tls.cert_file}: {told}")
