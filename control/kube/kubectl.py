# SPDX-License-Identifier: Apache-2.0
"""kubectl as a child process. What it says on stderr becomes an error of the table."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from twinpool.errors import TwinpoolError

CALL_SECONDS: Final = 30.0
"""Longest time of one kubectl."""

REQUEST_SECONDS: Final = 10
"""Longest wait of kubectl for one answer of the API server."""

_SHOWN_CHARS: Final = 300

_CAUSES: Final = (
    (
        "KUBE_CONTEXT_UNKNOWN",
        re.compile(
            r'context was not found|context "?[^"]*"? does not exist|no context exists with the name'
            r"|error: stat .*no such file or directory|error loading config file"
        ),
    ),
    ("KUBE_FORBIDDEN", re.compile(r"\(Forbidden\)|is forbidden|\(Unauthorized\)|must be logged in")),
    (
        "KUBE_UNREACHABLE",
        re.compile(
            r"unable to connect to the server|connection to the server .* was refused|i/o timeout|no such host"
            r"|context deadline exceeded|client\.timeout exceeded|couldn't get current server api group list"
            r"|x509:|tls:|serviceunavailable|no configuration has been provided",
            re.IGNORECASE,
        ),
    ),
)
"""What kubectl says, by the error that it means; the first that fits."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """Where commands go. Empty: as kubectl itself decides."""

    context: str = ""
    namespace: str = ""
    kubeconfig: str = ""

    def command(self, *arguments: str) -> list[str]:
        """The command line. Raises KUBECTL_MISSING."""
        binary = shutil.which("kubectl")
        if binary is None:
            raise TwinpoolError("KUBECTL_MISSING")
        options = [
            ("--kubeconfig", self.kubeconfig),
            ("--context", self.context),
            ("--namespace", self.namespace),
        ]
        given = [f"{name}={value}" for name, value in options if value]
        return [binary, *given, *arguments]

    def run(self, *arguments: str, stdin: str | None = None) -> str:
        """What it prints. Raises TwinpoolError with what it says on stderr."""
        done = self._ask(*arguments, stdin=stdin)
        if done.returncode:
            raise said(done.stderr, arguments)
        return done.stdout

    def _ask(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        command = self.command(f"--request-timeout={REQUEST_SECONDS}s", *arguments)
        try:
            return subprocess.run(
                command,
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                text=True,
                timeout=CALL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise TwinpoolError(
                "KUBE_UNREACHABLE", f"kubectl {arguments[0]} took more than {CALL_SECONDS:g} s"
            ) from error

    def get(self, kind: str, *arguments: str) -> list[dict[str, Any]]:
        """The objects of a kind. Raises TwinpoolError."""
        found: Any = json.loads(self.run("get", kind, *arguments, "-o", "json"))
        items: list[dict[str, Any]] = found.get("items", [found])
        return items

    def can(self, verb: str, resource: str, *arguments: str) -> bool:
        """Whether the user may do it. Raises TwinpoolError if that is not to be known."""
        # It ends with 1 for "no", which is no failure.
        done = self._ask("auth", "can-i", verb, resource, *arguments)
        answer = done.stdout.strip().partition(" ")[0]
        if answer not in ("yes", "no"):
            raise said(done.stderr, ("auth", "can-i", verb, resource))
        return answer == "yes"


def said(stderr: str, arguments: Sequence[str]) -> TwinpoolError:
    """The error that kubectl's words mean."""
    lines = [line for line in stderr.strip().splitlines() if line and not re.match(r"[EWI]\d{4} ", line)]
    text = (" ".join(lines[-2:]) or "it said nothing")[:_SHOWN_CHARS]
    reason = next((reason for reason, pattern in _CAUSES if pattern.search(text)), "KUBECTL_FAILED")
    return TwinpoolError(reason, f"kubectl {' '.join(arguments[:2])}: {text}")
