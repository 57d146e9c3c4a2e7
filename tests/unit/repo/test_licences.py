# SPDX-License-Identifier: Apache-2.0
"""What a release needs at run time may be used by it."""

import pytest

from scripts.licences import EXTRAS, Package, needed


def test_every_dependency_has_an_allowed_licence() -> None:
    packages = list(needed("twinpool", EXTRAS))
    names = [package.name for package in packages]
    assert len(names) == len(set(names))
    assert {"grpcio", "torch", "nixl-cu12", "ray", "mpmath"} <= set(names), (
        "own, of an extra, and needed by one"
    )
    assert [package for package in packages if not package.allowed] == []


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT", True),
        ("Apache-2.0 AND MIT", True),
        ("GPL-3.0-only OR MIT", True),
        ("Apache-2.0 AND Apache-2.0 WITH LLVM-exception AND BSL-1.0", True),
        ("BSD License", True),
        ("GPL-3.0-only", False),
        ("MIT AND AGPL-3.0", False),
        ("", False),
        ("Proprietary", False),
    ],
)
def test_what_is_allowed(licence: str, allowed: bool) -> None:
    assert Package("some", "1", licence).allowed == allowed
