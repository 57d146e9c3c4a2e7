# SPDX-License-Identifier: Apache-2.0
"""How a command reaches a cluster: TLS, the API key, and kubectl where the cluster runs on Kubernetes.

The options are the same for all commands that talk to a router or the control process, so ``App`` gives them to each one
that has the parameter ``endpoint`` or ``control``. Each is a key of the section ``client`` too.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.markup import escape
from typer.models import OptionInfo

from twinpool.config import ClientSection, ClientTls, TlsConfig, TwinpoolConfig, env_name
from twinpool.control import state
from twinpool.control.cli.config import read_config
from twinpool.control.cli.output import EXIT_DENIED, EXIT_FAILED, EXIT_UNAVAILABLE, EXIT_USAGE, fail
from twinpool.control.doctor.certificates import refusal
from twinpool.control.kube.forward import PortForward
from twinpool.control.kube.kubectl import Kubectl
from twinpool.control.kube.release import Service, find_pods, find_service
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.rpc.probe import why_unreachable
from twinpool.rpc.roles import PeerRole, server_name

KEY_VARIABLE: Final = "TWINPOOL_KEY"
"""The API key that commands show; a flag would be seen by everybody on the machine."""

_USAGE_CODES: Final = {"INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS"}
_UNAVAILABLE_CODES: Final = {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
_DENIED_CODES: Final = {"UNAUTHENTICATED", "PERMISSION_DENIED"}

_ADDRESSES: Final = {"endpoint", "control"}
_KUBE: Final = ("kube_context", "namespace", "kubeconfig", "release")


def _contexts(incomplete: str) -> list[str]:
    """For the shell: the contexts of the kubeconfig."""
    try:
        names = Kubectl().run("config", "get-contexts", "-o", "name").split()
    except TwinpoolError:
        return []
    return [name for name in names if name.startswith(incomplete)]


def _option(
    name: str, *flags: str, kind: Any = str, panel: str, complete: Callable[[str], list[str]] | None = None
) -> Any:
    text = (ClientSection.model_fields[name].description or "").rstrip(".") + "."
    made = typer.Option(
        *flags, help=text, envvar=env_name("client", name), rich_help_panel=panel, autocompletion=complete
    )
    return Annotated[kind, made]


_TLS_OPTIONS: Final = {
    "tls": _option("tls", "--tls", kind=bool, panel="TLS"),
    "ca_file": _option("ca_file", "--ca-file", panel="TLS"),
    "cert_file": _option("cert_file", "--cert-file", panel="TLS"),
    "key_file": _option("key_file", "--key-file", panel="TLS"),
    "server_name": _option("server_name", "--server-name", panel="TLS"),
}
_KEY_OPTIONS: Final = {"api_key_file": _option("api_key_file", "--api-key-file", panel="TLS")}
_KUBE_OPTIONS: Final = {
    "kube_context": _option("kube_context", "--kube-context", panel="Kubernetes", complete=_contexts),
    "namespace": _option("namespace", "--namespace", "-n", panel="Kubernetes"),
    "kubeconfig": _option("kubeconfig", "--kubeconfig", panel="Kubernetes"),
    "release": _option("release", "--release", panel="Kubernetes"),
}


class Access:
    """The way of one command. Port-forwards end with ``close``."""

    def __init__(
        self, config: TwinpoolConfig, given: dict[str, Any] | None = None, *, typed: bool = False
    ) -> None:
        """``given``: keys of the section ``client`` that flags name. ``typed``: whether a flag names a part of Kubernetes."""
        self.config = config
        update = {key: value for key, value in (given or {}).items() if value}
        self.client = config.client.model_copy(update=update)
        self.typed = typed
        self._local: state.LocalState | None = None
        self._forwards: dict[str, PortForward] = {}
        self._names: dict[str, str] = {}
        self._dialled: dict[str, PeerRole | None] = {}
        if bool(self.client.cert_file) != bool(self.client.key_file):
            missing = "--key-file" if self.client.cert_file else "--cert-file"
            raise ConfigError(f"{missing} must be given, since its counterpart is")

    @property
    def kubectl(self) -> Kubectl:
        """As the options say."""
        return Kubectl(self.client.kube_context, self.client.namespace, self.client.kubeconfig)

    def close(self) -> None:
        """Ends what was forwarded."""
        while self._forwards:
            self._forwards.popitem()[1].close()

    # --- where ------------------------------------------------------------------------------

    def control(self, cluster: str, given: str) -> str:
        """Where to send an operator's calls."""
        if endpoint := self._given(given, self.client.control):
            return endpoint
        if self.client.kube:
            return self._forward_service("control")
        return self._local_state(cluster).control_endpoint

    def routers(self, cluster: str, given: str, *, every: bool = True) -> list[str]:
        """Routers to ask. ``every``: all of them, for what one of them may know."""
        if endpoint := self._given(given, self.client.endpoint):
            return [endpoint]
        if self.client.kube and every:
            return self._forward_pods("router")
        if self.client.kube:
            return [self._forward_service("router")]
        endpoints = list(self._local_state(cluster).router_endpoints)
        return endpoints if every else endpoints[:1]

    def reach(self, endpoint: str) -> str:
        """Where to dial a control process that another one has named. Inside Kubernetes that is a pod, by its address."""
        if not self._forwards:
            return endpoint
        host, _, port = endpoint.rpartition(":")
        for pod in find_pods(self.kubectl, "control", self.client.release):
            if pod.get("status", {}).get("podIP") == host.strip("[]"):
                return self._forward(
                    f"pod/{pod['metadata']['name']}", int(port), next(iter(self._names.values()), "")
                )
        return endpoint

    def _given(self, flag: str, configured: str) -> str:
        """An address goes before kubectl, unless it comes from a file or the environment and flags name a part of Kubernetes."""
        return "" if self.typed else flag or configured

    def _local_state(self, cluster: str) -> state.LocalState:
        found = state.read(cluster)
        if found is None or not found.alive():
            raise fail(
                f"no local cluster {cluster!r} is running: start one with `twinpool up`", EXIT_UNAVAILABLE
            )
        self._local = found
        return found

    def _forward_service(self, component: str) -> str:
        found = find_service(self.kubectl, component, self.client.release)
        return self._forward(f"service/{found.name}", found.port, found.server_name)

    def _forward_pods(self, component: str) -> list[str]:
        found: Service = find_service(self.kubectl, component, self.client.release)
        pods = find_pods(self.kubectl, component, found.release)
        if not pods:
            raise TwinpoolError(
                "KUBE_FORWARD_FAILED", f"no {component} of release {found.release} is running"
            )
        return [
            self._forward(f"pod/{pod['metadata']['name']}", found.port, found.server_name) for pod in pods
        ]

    def _forward(self, target: str, port: int, name: str) -> str:
        made = PortForward(self.kubectl, target, port)
        self._forwards[made.endpoint] = made
        self._names[made.endpoint] = name
        return made.endpoint

    # --- how --------------------------------------------------------------------------------

    def dial(self, endpoint: str, role: PeerRole | None) -> TlsConfig | None:
        """What a channel to ``endpoint`` takes. Starts a port-forward anew that has ended."""
        self._dialled[endpoint] = role
        if (forward := self._forwards.get(endpoint)) is not None:
            forward.ensure()
        return self.tls(endpoint, role)

    def tls(self, endpoint: str, role: PeerRole | None) -> TlsConfig | None:
        """What to show and to expect there; None: no TLS."""
        client, files = self.client, self._files()
        if not client.secured and not files.enabled:
            return None
        chosen = client if client.secured else files
        by_role = server_name(role, files.role_domain, "")
        name = client.server_name or by_role or self._names.get(endpoint, "") or files.server_name
        return ClientTls(
            ca_file=chosen.ca_file, cert_file=chosen.cert_file, key_file=chosen.key_file, server_name=name
        )

    def _files(self) -> TlsConfig:
        """Of the local cluster, if it is the one that is talked to; else of the section ``tls``."""
        if self._local is not None and self._local.tls:
            return TlsConfig(**self._local.tls)
        return self.config.tls

    def api_key(self) -> str:
        """The key to show; "" for none. Raises CONFIG_INVALID."""
        if not self.client.api_key_file:
            return os.environ.get(KEY_VARIABLE, "")
        try:
            key = Path(self.client.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"client.api_key_file: cannot read {self.client.api_key_file}: {error}"
            ) from None
        if not key or any(sign.isspace() for sign in key):
            raise ConfigError(f"client.api_key_file: {self.client.api_key_file} does not hold one key")
        return key

    # --- what went wrong --------------------------------------------------------------------

    def explained(self, error: TwinpoolError) -> TwinpoolError:
        """Why nobody was reached, where a connection made by hand shows it."""
        if error.reason != "SERVER_UNREACHABLE":
            return error
        for endpoint, role in self._dialled.items():
            tls = self.tls(endpoint, role)
            try:
                found = why_unreachable(endpoint, tls)
            except (OSError, ValueError):
                continue
            if found is None:
                continue
            # A server does not say why; the files may.
            fault = refusal(tls) if found.reason == "CERTIFICATE_REFUSED" else ""
            return TwinpoolError(found.reason, f"{found.message} ({fault})") if fault else found
        return error


_current: contextvars.ContextVar[Access | None] = contextvars.ContextVar("access", default=None)


def access() -> Access:
    """Of the command that runs; one without options where none of ``App`` does."""
    return _current.get() or Access(read_config())


def failed(error: TwinpoolError) -> typer.Exit:
    """Prints an error of the table; its exit status is that of docs/commands.md."""
    name = error.code.name
    if name in _USAGE_CODES or error.reason == "CONFIG_INVALID":
        code = EXIT_USAGE
    elif name in _UNAVAILABLE_CODES:
        code = EXIT_UNAVAILABLE
    else:
        code = EXIT_DENIED if name in _DENIED_CODES else EXIT_FAILED
    return fail(escape(f"{error.reason}: {error.message}. {error.spec.user_action}"), code)


class App(typer.Typer):
    """Gives the options above to each command that has the parameter ``endpoint`` or ``control``."""

    def command(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        """As Typer's."""
        register = super().command(*args, **kwargs)

        def add(function: Any) -> Any:
            reaches = _ADDRESSES & set(inspect.signature(function).parameters)
            register(reaching(function) if reaches else function)
            return function

        return add


def reaching(function: Callable[..., Any], *, kube: bool = True) -> Callable[..., Any]:
    """The command with the options of TLS, of the key if it asks routers, and with ``kube`` those of Kubernetes."""
    signature = inspect.signature(function, eval_str=True)
    taken = signature.parameters
    extra = dict(_TLS_OPTIONS)
    if "endpoint" in taken:
        extra |= _KEY_OPTIONS
    if kube:
        extra |= _KUBE_OPTIONS
        if any("-n" in flags for flags in map(_flags, taken.values())):
            extra["namespace"] = _option("namespace", "--namespace", panel="Kubernetes")
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=False if name == "tls" else "", annotation=kind
        )
        for name, kind in extra.items()
    ]
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    @functools.wraps(function)
    def command(context: typer.Context, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in extra}
        return _run(context, given, functools.partial(function, **kwargs), kwargs.get("config"))

    made: Any = command
    made.__signature__ = signature.replace(parameters=[*taken.values(), *added, context])
    made.__annotations__ = {name: one.annotation for name, one in made.__signature__.parameters.items()}
    return command


def _flags(parameter: inspect.Parameter) -> tuple[str, ...]:
    for mark in getattr(parameter.annotation, "__metadata__", ()):
        if isinstance(mark, OptionInfo):
            return tuple(str(flag) for flag in (mark.default, *(mark.param_decls or ())))
    return ()


def _run(
    context: typer.Context, given: dict[str, Any], function: Callable[[], Any], file: Path | None
) -> Any:
    typed = any(_is_flag(context, name) for name in _KUBE if name in given)
    flags = {name: value for name, value in given.items() if _is_flag(context, name)}
    try:
        opened = Access(
            read_config(file), flags, typed=typed and not _is_flag(context, "control", "endpoint")
        )
    except ConfigError as error:
        raise failed(error) from error
    token = _current.set(opened)
    try:
        return function()
    except TwinpoolError as error:
        raise failed(opened.explained(error)) from error
    finally:
        _current.reset(token)
        opened.close()


def _is_flag(context: typer.Context, *names: str) -> bool:
    """Whether one of them was typed. What comes from the environment is in the configuration as well."""
    sources = (context.get_parameter_source(name) for name in names)
    return any(source is not None and source.name == "COMMANDLINE" for source in sources)
