# SPDX-License-Identifier: Apache-2.0
"""Prints docs/errors.md: ``python -m twinpool.errors > docs/errors.md``."""

from twinpool.errors.page import render

if __name__ == "__main__":
    print(render(), end="")
