# SPDX-License-Identifier: Apache-2.0
"""Checks that everything a release needs at run time has a licence that Apache-2.0 software may depend on.

``python -m scripts.licences`` prints a table and ends with 1 if a package has none that is allowed. Looks at what is installed:
the project, its extras for workers, traces and the faster tokenizer, and all that these need.
"""

import importlib.metadata as metadata
import re
import sys
from collections.abc import Iterator
from typing import Final, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS: Final = ("worker", "tracing", "fast")

ALLOWED: Final = {
    "0bsd",
    "apache-2.0",
    "bsd-2-clause",
    "bsd-3-clause",
    "bsl-1.0",
    "cc0-1.0",
    "isc",
    "mit",
    "mit-0",
    "mpl-2.0",
    "psf-2.0",
    "zlib",
}
"""SPDX names. The MPL asks for the source of files of its own that are changed; none is."""

NAMES: Final = {
    "3-clause bsd license": "bsd-3-clause",
    "apache 2.0": "apache-2.0",
    "apache software license": "apache-2.0",
    "apache software license 2.0": "apache-2.0",
    "bsd": "bsd-3-clause",
    "bsd license": "bsd-3-clause",
    "isc license": "isc",
    "isc license (iscl)": "isc",
    "mit license": "mit",
    "mozilla public license 2.0 (mpl 2.0)": "mpl-2.0",
    "python software foundation license": "psf-2.0",
}
"""What packages write instead."""

READ: Final = {"fastokens": "Apache-2.0"}
"""Packages whose metadata say nothing; by the licence file in them."""


class Package(NamedTuple):
    """One that is needed. ``licence``: as its metadata give it, "" if they don't."""

    name: str
    version: str
    licence: str

    @property
    def allowed(self) -> bool:
        """Whether some choice that the licence gives is allowed whole."""
        return any(
            all(_known(part) for part in re.split(r"\s+and\s+", choice))
            for choice in re.split(r"\s+or\s+", self.licence.lower().strip("()"))
        )


def _known(name: str) -> bool:
    plain = name.strip("() ").removesuffix(" with llvm-exception")
    return NAMES.get(plain, plain) in ALLOWED


def licence_of(found: metadata.Distribution) -> str:
    """The SPDX expression if there is one, else the short name, else what the classifiers say."""
    about = found.metadata
    name = canonicalize_name(about["Name"])
    plain = (about.get("License") or "").strip()
    marks = [
        mark.split(" :: ")[-1] for mark in about.get_all("Classifier") or () if mark.startswith("License ::")
    ]
    short = plain if "\n" not in plain and len(plain) < 60 else ""
    return about.get("License-Expression") or short or " OR ".join(marks) or READ.get(name, "")


def needed(name: str, extras: tuple[str, ...] = (), seen: set[str] | None = None) -> Iterator[Package]:
    """A package that is installed, and all that it needs; each once. Raises PackageNotFoundError for the first alone."""
    seen = set() if seen is None else seen
    key = canonicalize_name(name)
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        if not seen:
            raise
        return  # an extra that is not installed
    if key not in seen:
        seen.add(key)
        yield Package(key, found.version, licence_of(found))
    for text in found.requires or ():
        wanted = Requirement(text)
        given = [{"extra": extra} for extra in ("", *extras)]
        if wanted.marker is not None and not any(wanted.marker.evaluate(extra) for extra in given):
            continue
        if canonicalize_name(wanted.name) not in seen:
            yield from needed(wanted.name, tuple(wanted.extras), seen)


def main() -> int:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    packages = sorted(needed("twinpool", EXTRAS))
    table = Table("package", "version", "licence", "allowed", box=None)
    for package in packages:
        table.add_row(package.name, package.version, package.licence, "yes" if package.allowed else "NO")
    Console().print(table)
    return 0 if all(package.allowed for package in packages) else 1


if __name__ == "__main__":
    sys.exit(main())
