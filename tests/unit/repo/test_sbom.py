# SPDX-License-Identifier: Apache-2.0
"""Bills of materials: valid by the standard's own schema, whole, and never of something else than the lock file has."""

import importlib.metadata as metadata
import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from packaging.utils import canonicalize_name
from referencing import Registry, Resource

from scripts import sbom
from scripts.licences import EXTRAS, licence_of, needed

ROOT = Path(__file__).resolve().parents[3]
DATA = Path(__file__).parent / "data"
STATUS = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u13
Description: a library
 whose description has Version: 1 in it

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: etcd-server
Status: install ok installed
Architecture: amd64
Version: 3.4.23-4+b4
"""
RELEASE = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\nVERSION_ID="12"\n'


def problems(document: dict[str, Any]) -> list[str]:
    """What the schema of CycloneDX has against a document."""
    schemas = {path.name: json.loads(path.read_text()) for path in DATA.glob("*.schema.json")}
    registry: Registry[Any] = Registry().with_resources(
        (f"http://cyclonedx.org/schema/{name}", Resource.from_contents(schema))
        for name, schema in schemas.items()
    )
    checker = jsonschema.Draft7Validator(
        schemas["bom-1.6.schema.json"], registry=registry, format_checker=jsonschema.FormatChecker()
    )
    return [f"{error.json_path}: {error.message[:200]}" for error in checker.iter_errors(document)]


@pytest.fixture(scope="module")
def packages() -> dict[str, metadata.Distribution]:
    """Of the environment of the tests, what a release needs."""
    names = {each.name for each in needed("twinpool", EXTRAS)}
    found = {canonicalize_name(each.metadata["Name"]): each for each in metadata.distributions()}
    return {name: found[name] for name in names}


@pytest.fixture(scope="module")
def made(
    packages: dict[str, metadata.Distribution], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """As of an image."""
    root = tmp_path_factory.mktemp("root")
    for name, content in (("var/lib/dpkg/status", STATUS), ("etc/os-release", RELEASE)):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(content)
    return sbom.bill(packages, kind="container", debian=sbom.debian_components(root), seconds=0)


def test_it_is_valid(made: dict[str, Any], packages: dict[str, metadata.Distribution]) -> None:
    assert problems(made) == []
    assert problems(sbom.bill(packages, artifacts=[ROOT / "LICENSE"], seconds=0)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"specVersion": 1.6},
        {"components": [{"name": "without-a-type"}]},
        {"components": [{"type": "library", "name": "a", "licenses": [{"license": {"id": "Apache 2"}}]}]},
        {"components": [{"type": "library", "name": "a"}] * 2},
        {"serialNumber": "urn:uuid:1"},
        {"more": 1},
    ],
    ids=json.dumps,
)
def test_what_is_not_valid_would_be_seen(made: dict[str, Any], change: dict[str, Any]) -> None:
    assert problems(made | change)


def test_it_has_everything_that_a_release_needs(
    made: dict[str, Any], packages: dict[str, metadata.Distribution]
) -> None:
    listed = {(each["name"], each["version"]) for each in made["components"]}
    assert {(name, each.version) for name, each in packages.items()} <= listed
    assert {"torch", "ray", "nixl-cu12", "grpcio", "pydantic"} <= packages.keys()
    assert {("libc6", "2.36-9+deb12u13"), ("etcd-server", "3.4.23-4+b4"), ("debian", "12")} <= listed
    assert "gone" not in {name for name, _ in listed}


def test_every_reference_is_to_a_component_and_the_whole_hangs_together(made: dict[str, Any]) -> None:
    links = {each["ref"]: each["dependsOn"] for each in made["dependencies"]}
    about = made["metadata"]["component"]["bom-ref"]
    refs = [each["bom-ref"] for each in made["components"]]
    assert len(set(refs)) == len(refs)
    assert {*links, *(ref for others in links.values() for ref in others)} <= {about, *refs}
    reached, waiting = set(), [about]
    while waiting:
        ref = waiting.pop()
        if ref not in reached:
            reached.add(ref)
            waiting += links.get(ref, [])
    assert reached == {about, *refs}
    url = {each["name"]: each["bom-ref"] for each in made["components"]}
    assert url["typing-extensions"] in links[url["torch"]]
    # Of an extra that pydantic-settings is asked for with.
    assert url["pyyaml"] in links[url["pydantic-settings"]]


def test_licences_are_named_as_the_standard_has_them() -> None:
    assert sbom.licences("") == []
    assert sbom.licences("MIT") == sbom.licences("mit license") == [{"license": {"id": "MIT"}}]
    assert sbom.licences("Mozilla Public License 2.0 (MPL 2.0)") == [{"license": {"id": "MPL-2.0"}}]
    assert sbom.licences("MIT OR Apache Software License") == [{"expression": "MIT OR Apache-2.0"}]
    for expression in ("(MIT OR Apache-2.0) AND ISC", "Apache-2.0 WITH LLVM-exception"):
        assert sbom.licences(expression) == [{"expression": expression}]
    assert sbom.licences("Ours, see the file") == [{"license": {"name": "Ours, see the file"}}]


def test_every_allowed_licence_has_its_identifier(packages: dict[str, metadata.Distribution]) -> None:
    for name, package in packages.items():
        (found,) = sbom.licences(licence_of(package))
        assert "expression" in found or "id" in found["license"], name


def test_bytes_follow_from_what_is_listed(packages: dict[str, metadata.Distribution]) -> None:
    one, two = (json.dumps(sbom.bill(packages, seconds=1767225600), sort_keys=True) for _ in range(2))
    assert one == two
    assert '"2026-01-01T00:00:00Z"' in one
    fewer = {name: each for name, each in packages.items() if name != "rich"}
    assert sbom.bill(fewer, seconds=1767225600)["serialNumber"] not in one


def test_an_installation_that_is_not_the_locked_one_is_refused(
    tmp_path: Path, packages: dict[str, metadata.Distribution], capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "constraints.txt").read_text()
    assert sbom.differences(packages, sbom.pins(ROOT / "constraints.txt")) == []
    lock = tmp_path / "lock.txt"
    changed = re.sub(r"^rich==.*$", "rich==1.0", text, flags=re.MULTILINE)
    lock.write_text(re.sub(r"^numpy==.*\n", "", changed, flags=re.MULTILINE))
    site = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    for name in ("rich", "numpy", "twinpool", "torch"):
        version = {"torch": f"{packages[name].version.partition('+')[0]}+cpu"}.get(
            name, packages[name].version
        )
        (site / f"{name}-{version}.dist-info").mkdir()
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(about)
    out = tmp_path / "out.json"
    given = ["--prefix", str(tmp_path / "venv"), "-o", str(out), "--lock"]
    assert sbom.main([*given, str(lock)]) == 1
    said = capsys.readouterr().err
    assert f"rich {packages['rich'].version} is installed, 1.0 locked" in said
    assert f"numpy {packages['numpy'].version} is not in the lock file" in said
    assert "torch" not in said
    assert not out.exists()
    assert sbom.main([*given, str(ROOT / "constraints.txt")]) == 0
    assert problems(json.loads(out.read_text())) == []


def test_what_is_no_installation_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--prefix", str(tmp_path)], "no virtual environment"),
        (["--prefix", str(Path(sys.prefix)), "--debian", str(tmp_path)], "no packages of Debian"),
    ):
        lock = ["--lock", str(ROOT / "constraints.txt"), "-o", str(tmp_path / "out.json")]
        assert sbom.main([*arguments, *lock]) == 1
        assert words in capsys.readouterr().err
