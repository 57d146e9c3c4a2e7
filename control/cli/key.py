# SPDX-License-Identifier: Apache-2.0
"""``twinpool key``: a new API key for a tenant."""

from twinpool.control.cli.output import Format, FormatOption, emit_data, err, out
from twinpool.rpc import new_key


def key_command(output: FormatOption = Format.TABLE) -> None:
    """Make an API key, and what the tenants file is to hold of it. The key itself is kept nowhere."""
    key, digest = new_key()
    if output is not Format.TABLE:
        emit_data({"key": key, "digest": digest}, output)
        return
    out.print(key, soft_wrap=True, highlight=False)
    err.print(f"for the tenants file: {digest}", soft_wrap=True, highlight=False)
