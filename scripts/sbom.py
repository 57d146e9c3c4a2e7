# SPDX-License-Identifier: Apache-2.0
"""Writes what is in an installation as a bill of materials: CycloneDX 1.6 in JSON.

``python -m scripts.sbom --prefix VENV --lock constraints.txt -o twinpool.cdx.json`` lists the Python packages of a virtual environment
with versions, licences and what needs what; ``--debian /`` adds the Debian packages of a root file system, ``--artifact FILE`` the digest
of a file that it is about. Ends with 1 if a package is installed in another version than the lock file has, or is not in it.

It reads metadata of what is installed and nothing else, so libraries that wheels bring with them count as part of these. Its bytes follow
from what it lists and from SOURCE_DATE_EPOCH.
"""

import argparse
import hashlib
import importlib.metadata as metadata
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.licences import EXTRAS, NAMES, licence_of

Json = dict[str, Any]
SPEC_VERSION: Final = "1.6"
PROJECT: Final = "twinpool"
UNPINNED: Final = frozenset({PROJECT, "pip", "setuptools", "wheel"})
"""What an environment has by itself, and the project."""
IDS: Final = {
    name.lower(): name
    for name in (
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "ISC",
        "MIT",
        "MIT-0",
        "MPL-2.0",
        "PSF-2.0",
        "Zlib",
    )
}
"""Licences by their SPDX identifiers in lower case."""
_NAMESPACE: Final = uuid.UUID("5e5b7c2e-4d0b-5bd1-9a53-3f1c6d2c4d55")


class SbomError(Exception):
    """What keeps a bill of materials from being true."""


def python_packages(prefix: Path) -> dict[str, metadata.Distribution]:
    """Those of a virtual environment, by their canonical names. Raises SbomError."""
    places = sorted(prefix.glob("lib/python3*/site-packages"))
    if not places:
        raise SbomError(f"{prefix} is no virtual environment")
    found = metadata.distributions(path=[str(place) for place in places])
    return {canonicalize_name(each.metadata["Name"]): each for each in found}


def pins(lock: Path) -> dict[str, str]:
    """Versions by name, of lines NAME==VERSION."""
    lines = re.findall(r"^([\w.-]+)==([^\s;#]+)", lock.read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in lines}


def differences(packages: Mapping[str, metadata.Distribution], locked: Mapping[str, str]) -> list[str]:
    """What is installed otherwise than the lock file says, a line each."""
    found = []
    for name in sorted(packages.keys() - UNPINNED):
        have = packages[name].version
        if name not in locked:
            found.append(f"{name} {have} is not in the lock file")
        # A build for other hardware (2.13.0+cpu) is the version that it is a build of.
        elif Version(have).public != Version(locked[name]).public:
            found.append(f"{name} {have} is installed, {locked[name]} locked")
    return found


def licences(text: str) -> list[Json]:
    """The ``licenses`` of a component: an identifier or an expression of SPDX where ``text`` says one, else the words themselves."""
    if not text:
        return []
    if re.fullmatch(r"\(*[\w.+-]+\)*( (AND|OR|WITH) \(*[\w.+-]+\)*)+", text):
        return [{"expression": text}]
    words = [IDS.get(NAMES.get(word, word)) for word in text.lower().split(" or ")]
    if None in words:
        return [{"license": {"name": text}}]
    return (
        [{"license": {"id": words[0]}}] if len(words) == 1 else [{"expression": " OR ".join(map(str, words))}]
    )


def needs(packages: Mapping[str, metadata.Distribution]) -> dict[str, list[str]]:
    """By name, the installed packages that a package asks for, with the extras that others ask it for."""
    extras: dict[str, set[str]] = {name: set() for name in packages}
    extras[PROJECT] = {*EXTRAS}
    while True:
        found: dict[str, set[str]] = {name: set() for name in packages}
        before = {name: len(asked) for name, asked in extras.items()}
        for name, package in packages.items():
            for wanted in map(Requirement, package.requires or ()):
                other = canonicalize_name(wanted.name)
                given = [{"extra": extra} for extra in ("", *extras[name])]
                asked = wanted.marker is None or any(wanted.marker.evaluate(each) for each in given)
                if asked and other in packages:
                    found[name].add(other)
                    extras[other] |= wanted.extras
        if before == {name: len(asked) for name, asked in extras.items()}:
            return {name: sorted(others) for name, others in found.items()}


def python_component(name: str, package: metadata.Distribution) -> Json:
    """One package of Python."""
    url = f"pkg:pypi/{name}@{package.version.replace('+', '%2B')}"
    made: Json = {"type": "library", "bom-ref": url, "name": name, "version": package.version, "purl": url}
    if found := licences(licence_of(package)):
        made["licenses"] = found
    return made


def debian_components(root: Path) -> list[Json]:
    """The packages of a root file system, and the system that it is. Raises SbomError."""
    status = root / "var" / "lib" / "dpkg" / "status"
    if not status.is_file():
        raise SbomError(f"{status} is not there: no packages of Debian")
    said = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', (root / "etc" / "os-release").read_text(), re.MULTILINE))
    distribution = f"{said['ID']}-{said['VERSION_ID']}"
    system = {
        "type": "operating-system",
        "bom-ref": f"os:{distribution}",
        "name": said["ID"],
        "version": said["VERSION_ID"],
    }
    found = []
    for stanza in status.read_text(encoding="utf-8").split("\n\n"):
        fields = dict(re.findall(r"^([\w-]+): (.*)$", stanza, re.MULTILINE))
        if not fields.get("Status", "").endswith(" installed"):
            continue
        version = fields["Version"].replace("+", "%2B").replace(":", "%3A")
        url = f"pkg:deb/{said['ID']}/{fields['Package']}@{version}?arch={fields['Architecture']}&distro={distribution}"
        own = {"type": "library", "bom-ref": url, "name": fields["Package"], "version": fields["Version"], "purl": url}  # fmt: skip
        found.append(own)
    return [system, *sorted(found, key=lambda each: each["name"])]


def bill(
    packages: Mapping[str, metadata.Distribution],
    *,
    kind: str = "application",
    debian: Iterable[Json] = (),
    artifacts: Iterable[Path] = (),
    seconds: int,
) -> Json:
    """The document. ``kind``: of what it is about, ``application`` or ``container``; ``seconds``: of its time, since 1970. Raises
    SbomError."""
    if PROJECT not in packages:
        raise SbomError(f"{PROJECT} is not installed there")
    own = python_component(PROJECT, packages[PROJECT])
    about = own | {"type": "application"}
    parts = [python_component(name, packages[name]) for name in sorted(packages.keys() - {PROJECT})]
    refs = {name: python_component(name, package)["bom-ref"] for name, package in packages.items()}
    links = [
        {"ref": refs[name], "dependsOn": [refs[other] for other in others]}
        for name, others in sorted(needs(packages).items())
    ]
    system = list(debian)
    if kind == "container":
        # The image holds the project as one of its parts.
        parts = [own | {"type": "application"}, *parts]
        about = {
            "type": "container",
            "bom-ref": f"image:{PROJECT}",
            "name": PROJECT,
            "version": own["version"],
        }
        links.append({"ref": about["bom-ref"], "dependsOn": sorted([refs[PROJECT], *(each["bom-ref"] for each in system)])})  # fmt: skip
    if files := sorted(artifacts):
        about["externalReferences"] = [
            {
                "type": "distribution",
                "url": path.name,
                "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}],
            }
            for path in files
        ]
    made: Json = {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC_VERSION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds)),
            "tools": {
                "components": [{"type": "application", "name": "scripts/sbom.py", "version": own["version"]}]
            },
            "component": about,
        },
        "components": [*parts, *system],
        "dependencies": links,
    }
    return made | {"serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, json.dumps(made, sort_keys=True))}"}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefix", type=Path, required=True, help="virtual environment")
    parser.add_argument("--lock", type=Path, required=True, help="file of pinned versions")
    parser.add_argument("--kind", choices=("application", "container"), default="application")
    parser.add_argument("--debian", type=Path, help="root file system whose Debian packages are listed, too")
    parser.add_argument("--artifact", type=Path, action="append", default=[], help="file that it is about")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args(arguments)
    try:
        packages = python_packages(given.prefix)
        wrong = differences(packages, pins(given.lock))
        made = bill(
            packages,
            kind=given.kind,
            debian=debian_components(given.debian) if given.debian else (),
            artifacts=given.artifact,
            seconds=int(os.environ.get("SOURCE_DATE_EPOCH") or time.time()),
        )
    except SbomError as error:
        wrong, made = [str(error)], {}
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    given.output.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
