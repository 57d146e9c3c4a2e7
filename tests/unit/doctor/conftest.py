# SPDX-License-Identifier: Apache-2.0
"""Ways to look at one finding."""

from collections.abc import Callable, Iterable

import pytest

from twinpool.control.doctor.finding import Finding, Status


def _only(findings: Iterable[Finding], name: str) -> Finding:
    (found,) = (one for one in findings if one.name == name)
    if found.status is not Status.OK:
        assert found.matters, "what follows is said"
    return found


@pytest.fixture
def only() -> Callable[[Iterable[Finding], str], Finding]:
    """The one finding of a name."""
    return _only
