# SPDX-License-Identifier: Apache-2.0
"""Who a caller is, and what its tenant may do: read from a file that is followed.

A caller is known by an API key, of which the file holds the SHA-256, or by a name in its client certificate. With such a file
nobody else is served, and what a request itself says of its tenant counts for nothing.
"""

import re
from pathlib import Path
from typing import Annotated, Final

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from twinpool.errors import ConfigError, TwinpoolError
from twinpool.logs import get_logger
from twinpool.rpc import Caller, digest_of

log = get_logger(__name__)

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_SECTION: Final = "router.tenants_file"

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


class Tenant(BaseModel):
    """What one tenant may do. 0: no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    keys: tuple[str, ...] = ()
    """``sha256:`` and the digest of each API key, in hexadecimal."""
    identities: tuple[str, ...] = ()
    """Names of client certificates: common names or subject alternative names."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    max_requests: Annotated[int, Field(ge=0)] = 0
    tokens_per_second: Annotated[float, Field(ge=0)] = 0.0
    burst_tokens: Annotated[float, Field(ge=0)] = 0.0
    max_priority: Annotated[int, Field(ge=-100, le=100)] = 100
    max_pinned_tokens: Annotated[int, Field(ge=0, le=1 << 40)] | None = None
    """Most that it may have pinned on one worker; 0: nothing. Unset: ``sessions.max_pinned_tokens``."""
    models: tuple[str, ...] = ()
    """Served names of the models that it may use; none: all."""
    cache: str = ""
    """Tenants with the same word here share cached prefixes; "": it shares with nobody."""

    @property
    def salt(self) -> str:
        """What its block hashes are salted with. No name of a tenant has a slash, so none is another's word."""
        return f"shared/{self.cache}" if self.cache else self.name


class Operators(BaseModel):
    """Who may ask a router what it knows of everybody's requests."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[str, ...] = ()
    identities: tuple[str, ...] = ()


class TenantsFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid")

    tenants: list[Tenant]
    operators: Operators = Operators()


def read_tenants(path: str) -> TenantsFile:
    """Reads a file. Raises ConfigError, which names what is wrong but holds no key."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{_SECTION}: cannot read {path}: {error.strerror}", key=_SECTION) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(f"{_SECTION}: {path} is not YAML", key=_SECTION) from None
    try:
        found = TenantsFile.model_validate(content)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"])) or "it"
        raise ConfigError(f"{_SECTION}: {path}: {where}: {fault['msg']}", key=_SECTION) from None
    _check(path, found)
    return found


def _check(path: str, file: TenantsFile) -> None:
    operators = Tenant.model_construct(
        name="operators", keys=file.operators.keys, identities=file.operators.identities
    )
    seen: set[str] = set()
    for tenant in (operators, *file.tenants):
        own = [tenant.name, *tenant.keys, *(f"identity {name}" for name in tenant.identities)]
        if len(set(own)) != len(own) or not seen.isdisjoint(own):
            raise ConfigError(
                f"{_SECTION}: {path}: tenant {tenant.name!r} shares its name, a key or an identity",
                key=_SECTION,
            )
        seen.update(own)
        if not all(_DIGEST.fullmatch(key) for key in tenant.keys):
            raise ConfigError(
                f"{_SECTION}: {path}: a key of tenant {tenant.name!r} is not 'sha256:' and 64 hexadecimal digits",
                key=_SECTION,
            )
        if "" in tenant.identities or "" in tenant.models:
            raise ConfigError(f"{_SECTION}: {path}: tenant {tenant.name!r} has an empty name", key=_SECTION)


class Tenants:
    """The tenants of a router's file, or everybody if there is none."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError."""
        self._path = path
        self._by_name: dict[str, Tenant] = {}
        self._by_key: dict[str, Tenant] = {}
        self._by_identity: dict[str, Tenant] = {}
        self._operators = Operators()
        self._stamp: tuple[int, int, int] | None = None
        if path:
            self._load()

    @property
    def closed(self) -> bool:
        """Whether only tenants of the file are served."""
        return bool(self._path)

    @property
    def all(self) -> list[Tenant]:
        """All tenants of the file."""
        return list(self._by_name.values())

    def known(self, name: str) -> bool:
        """Whether the file names it."""
        return name in self._by_name

    def salt(self, name: str) -> str:
        """What the block hashes of a tenant are salted with."""
        tenant = self._by_name.get(name)
        return tenant.salt if tenant is not None else name

    def max_pinned_tokens(self, name: str, default: int) -> int:
        """How many tokens a tenant may have pinned on one worker; ``default`` where the file says nothing."""
        tenant = self._by_name.get(name)
        return default if tenant is None or tenant.max_pinned_tokens is None else tenant.max_pinned_tokens

    def priority(self, name: str, asked: int, most: int) -> int:
        """The priority that a tenant's request really has, as in the core; ``most``: the highest where the file says nothing."""
        tenant = self._by_name.get(name)
        return min(asked, most if tenant is None else tenant.max_priority)

    def admit(self, caller: Caller, named: str = "") -> str:
        """The caller's tenant. ``named``: which one the request names. Raises UNAUTHENTICATED, or PERMISSION_DENIED for another
        tenant."""
        if not self.closed:
            return named
        tenant = self._find(caller)
        if tenant is None:
            raise TwinpoolError("UNAUTHENTICATED", "no API key or client certificate of a tenant was shown")
        if named not in ("", tenant.name):
            raise TwinpoolError("PERMISSION_DENIED", "the request names another tenant", field="tenant")
        return tenant.name

    def admit_operator(self, caller: Caller) -> None:
        """Raises UNAUTHENTICATED for who is not an operator; without a file everybody is."""
        own = self._operators
        known = (
            digest_of(caller.key) in own.keys
            if caller.key
            else any(name in own.identities for name in caller.identities)
        )
        if self.closed and not known:
            raise TwinpoolError(
                "UNAUTHENTICATED", "no API key or client certificate of an operator was shown"
            )

    def allowed(self, tenant: str, model: str) -> bool:
        """Whether a tenant may use a model."""
        found = self._by_name.get(tenant)
        return found is None or not found.models or model in found.models

    def check_model(self, tenant: str, model: str) -> None:
        """Raises PERMISSION_DENIED for a model that a tenant may not use."""
        if not self.allowed(tenant, model):
            raise TwinpoolError(
                "PERMISSION_DENIED",
                f"model is {model[:64]!r}; the limit is those of this tenant",
                field="model",
            )

    def refresh(self) -> bool:
        """Follows the file: whether it has changed. One that cannot be used is logged, and the present tenants stay."""
        if not self.closed:
            return False
        try:
            if self._stamps() == self._stamp:
                return False
            self._load()
        except ConfigError as error:
            log.warning("tenants_reload_failed", error=error.message)
            return False
        log.info("tenants_reloaded", tenants=len(self._by_name))
        return True

    def _find(self, caller: Caller) -> Tenant | None:
        if caller.key:
            return self._by_key.get(digest_of(caller.key))
        return next(
            (self._by_identity[name] for name in caller.identities if name in self._by_identity), None
        )

    def _load(self) -> None:
        stamp, file = self._stamps(), read_tenants(self._path)
        tenants, self._operators = file.tenants, file.operators
        self._by_name = {tenant.name: tenant for tenant in tenants}
        self._by_key = {key: tenant for tenant in tenants for key in tenant.keys}
        self._by_identity = {name: tenant for tenant in tenants for name in tenant.identities}
        self._stamp = stamp

    def _stamps(self) -> tuple[int, int, int]:
        try:
            found = Path(self._path).stat()
        except OSError as error:
            raise ConfigError(
                f"{_SECTION}: cannot read {self._path}: {error.strerror}", key=_SECTION
            ) from None
        # The inode tells an atomic replacement within one clock tick.
        return found.st_mtime_ns, found.st_size, found.st_ino
