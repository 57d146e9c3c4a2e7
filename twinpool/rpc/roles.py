# SPDX-License-Identifier: Apache-2.0
"""Which process of the cluster may call what, by the names in its certificate.

Inside ``tls.role_domain`` a certificate names its role as ROLE.DOMAIN, by which a server is dialled too, and may name the
process as well: NAME.ROLE.DOMAIN. Health and reflection are for anybody whose certificate the CA signed, and so are the
services that clients call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, get_args

import grpc.aio

from twinpool.errors import TwinpoolError

PeerRole = Literal["router", "worker", "control", "operator"]
ROLES: Final[tuple[PeerRole, ...]] = get_args(PeerRole)

_PACKAGE: Final = "/twinpool.v1."
_OVERSEERS: Final = frozenset({"control", "operator"})
_CALLERS: Final[dict[str, frozenset[str]]] = {
    "WorkerService/Session": frozenset({"router"}),
    "WorkerService/TakeOver": frozenset({"router"}),
    "WorkerService/TakePrefixes": frozenset({"worker"}),
    "WorkerService/PinPrefix": frozenset({"router"}),
    "WorkerService/ReleasePrefix": frozenset({"router"}),
    "WorkerService/ChangeRole": _OVERSEERS,
    "WorkerService/Cordon": _OVERSEERS,
    "WorkerService": _OVERSEERS | {"router"},
    "HandoffService": frozenset({"worker"}),
    "RouterService/HandOver": frozenset({"router"}),
    "RouterService/ListRouterRequests": frozenset({"control"}),
    "RouterService": _OVERSEERS | {"router"},
    "ControlService/ListWorkers": _OVERSEERS | {"router", "worker"},
    "ControlService": _OVERSEERS,
}
"""Who may call a method, or any other method of a service."""


class RoleGuard:
    """Judges the callers of one server."""

    def __init__(self, domain: str) -> None:
        self._domain = domain

    def guards(self, method: str) -> bool:
        """Whether not everybody may call ``method``."""
        return _allowed(short_name(method)) is not None

    def check(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Raises PERMISSION_DENIED if the caller's certificate names no role that may call ``method``."""
        name = short_name(method)
        allowed = _allowed(name)
        if allowed is None:
            return
        shown = roles_in(names_of(context), self._domain)
        if not allowed & shown:
            raise TwinpoolError(
                "PERMISSION_DENIED",
                f"{name} is for {' and '.join(sorted(allowed))}; the caller's certificate names "
                f"{' and '.join(sorted(shown)) or 'no role'} of {self._domain}",
            )


def _allowed(name: str) -> frozenset[str] | None:
    return _CALLERS.get(name) or _CALLERS.get(name.partition("/")[0])


def short_name(method: str) -> str:
    """SERVICE/METHOD of gRPC's full name, without our package."""
    return method.removeprefix(_PACKAGE)


def names_of(context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str, ...]:
    """The alternative names in the caller's certificate; none without TLS."""
    found = context.auth_context().get("x509_subject_alternative_name", ())
    return tuple(name.decode(errors="replace") for name in found)


def roles_in(names: Iterable[str], domain: str) -> frozenset[str]:
    """The roles that ``names`` name in ``domain``."""
    labels = (
        name.removesuffix(f".{domain}").rpartition(".")[2] for name in names if name.endswith(f".{domain}")
    )
    return frozenset(labels) & frozenset(ROLES)


def check_process(
    context: grpc.aio.ServicerContext[Any, Any], domain: str, role: PeerRole, claimed: str
) -> None:
    """Raises PERMISSION_DENIED if the caller claims to be process ``claimed`` and its certificate names others of that role.

    A certificate that names none is that of a whole pool: its processes are trusted to say who they are.
    """
    suffix = f".{role}.{domain}"
    named = {name.removesuffix(suffix) for name in names_of(context) if domain and name.endswith(suffix)}
    if named and claimed not in named:
        raise TwinpoolError(
            "PERMISSION_DENIED",
            f"the caller says that it is {role} {claimed!r}; its certificate names {', '.join(sorted(named))}",
        )


def server_name(role: PeerRole | None, domain: str, given: str) -> str:
    """The name to expect in the certificate of a server of that role; "": the host's."""
    return f"{role}.{domain}" if role is not None and domain else given
