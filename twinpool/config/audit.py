# SPDX-License-Identifier: Apache-2.0
"""Where administrative calls are written down."""

from __future__ import annotations

from pydantic import Field

from twinpool.config.base import Section


class AuditConfig(Section):
    """The audit log of control processes, routers and workers."""

    file: str = Field(
        default="",
        max_length=4096,
        description="File to which each administrative call is appended, a line of JSON each; processes of one host may share it, and it "
        "may be renamed away at any time. While it cannot be written, calls that change something are refused. Empty: the log has "
        "them, as `audit` at level info.",
    )
