# SPDX-License-Identifier: Apache-2.0
"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How bad it is. Only ``failed`` decides the exit status."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing. ``detail``: what was found, ``matters``: what follows from it, ``remedy``: what to do about it."""

    name: str
    status: Status
    detail: str
    matters: str = ""
    remedy: str = ""

    def row(self) -> dict[str, object]:
        """For printing."""
        return {
            "name": self.name,
            "status": self.status.value,
            "detail": self.detail,
            "matters": self.matters,
            "remedy": self.remedy,
        }


def ok(name: str, detail: str) -> Finding:
    """All is well."""
    return Finding(name, Status.OK, detail)


def warning(name: str, detail: str, matters: str, remedy: str) -> Finding:
    """It works, but not as it could, or not for long."""
    return Finding(name, Status.WARNING, detail, matters, remedy)


def failed(name: str, detail: str, matters: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(name, Status.FAILED, detail, matters, remedy)


def judged(fatal: bool, name: str, detail: str, matters: str, remedy: str) -> Finding:
    """Failed where it is ``fatal``, else a warning."""
    return Finding(name, Status.FAILED if fatal else Status.WARNING, detail, matters, remedy)
