# SPDX-License-Identifier: Apache-2.0
"""Prints docs/metrics.md: ``python -m twinpool.metrics > docs/metrics.md``."""

from twinpool.metrics.page import render

if __name__ == "__main__":
    print(render(), end="")
