# SPDX-License-Identifier: Apache-2.0
"""Prints docs/configuration.md: ``python -m twinpool.config > docs/configuration.md``."""

from twinpool.config.page import render

if __name__ == "__main__":
    print(render(), end="")
