# SPDX-License-Identifier: Apache-2.0
"""Who may read the console page, and what a browser may do with it."""

import ipaddress
import socket
from typing import Any, Final

from aiohttp import web

from twinpool.config import TwinpoolConfig
from twinpool.errors import TwinpoolError
from twinpool.rpc import AuditLog
from twinpool.rpc.audit import CHARS_MAX, NAMES_MAX
from twinpool.rpc.roles import roles_in

ROLES: Final = frozenset({"control", "operator"})
"""As for ControlService."""

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Nothing but the page's own files is loaded or run, nowhere else is called, and no text becomes markup."""


class Gate:
    """One a console."""

    def __init__(self, config: TwinpoolConfig) -> None:
        """Raises ConfigError."""
        self._domain = config.tls.role_domain if config.tls.enabled else ""
        control = config.control
        self._hosts = {
            control.host,
            control.http_host,
            "localhost",
            socket.gethostname(),
            *control.http_hosts,
        } - {""}
        self._audit = AuditLog(config.audit.file, "control")
        self.headers = dict(HEADERS)

    def close(self) -> None:
        """Closes the audit log."""
        self._audit.close()

    def admit(self, request: web.Request) -> None:
        """Raises PERMISSION_DENIED for a name that is not ours, or a certificate that names no operator."""
        if not self._ours(request.host):
            raise TwinpoolError(
                "PERMISSION_DENIED",
                f"the console page is not known as {request.host[:64]!r}; see control.http_hosts",
            )
        if self._domain and not roles_in(_names(request), self._domain) & ROLES:
            raise TwinpoolError("PERMISSION_DENIED", f"the certificate names no operator of {self._domain}")

    def note(self, request: web.Request) -> None:
        """Writes down who looks at others' requests."""
        who = {
            "names": [name[:CHARS_MAX] for name in _names(request)[:NAMES_MAX]],
            "peer": request.remote or "",
        }
        line: dict[str, object] = {"stage": "end", "method": f"GET {request.path}", "who": who, "code": "OK"}
        try:
            self._audit.write(line)
        except OSError:
            # It is in the log, and a call that only looks goes on.
            return

    def _ours(self, host: str) -> bool:
        name = (
            host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
        )
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


def _names(request: web.Request) -> tuple[str, ...]:
    """The alternative names in the caller's certificate; none without TLS."""
    found: Any = request.transport.get_extra_info("peercert") if request.transport is not None else None
    return tuple(value for _, value in (found or {}).get("subjectAltName", ()))
