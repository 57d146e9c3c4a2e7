# SPDX-License-Identifier: Apache-2.0
"""The image has what the pods run, as the user that they run as."""

import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.support.chart import CHART, EVERYTHING, ROOT, Doc, Helm, containers, merged, nested, workloads

pytestmark = pytest.mark.chart

DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
LAST_STAGE = DOCKERFILE.rpartition("\nFROM ")[2]
COMMANDS = {"twinpool", "ray", "python", "etcd", "/bin/sh", "test"}
"""From the project and what it needs, etcd's package and the base."""


def instruction(name: str) -> str:
    (found,) = re.findall(rf"^{name} (.+)$", LAST_STAGE, re.MULTILINE)
    return str(found)


def test_pods_run_what_the_image_has(everything: list[Doc]) -> None:
    entry = yaml.safe_load(instruction("ENTRYPOINT"))
    packages = set(re.findall(r"[\w.+-]+", LAST_STAGE.partition("apt-get install")[2].partition("&&")[0]))
    assert {"etcd-server", "etcd-client"} <= packages
    for _, pod in workloads(everything):
        for container in containers(pod):
            assert container["image"] == "twinpool:0.1.0"
            command = container.get("command", entry)
            assert command[0] in COMMANDS, command
            probes = [container.get(f"{kind}Probe", {}) for kind in ("startup", "liveness", "readiness")]
            for probe in probes:
                if "exec" in probe:
                    assert probe["exec"]["command"][0] in COMMANDS


def test_pods_run_as_the_user_of_the_image() -> None:
    values: Any = yaml.safe_load((CHART / "values.yaml").read_text())["securityContext"]
    assert instruction("USER") == f"{values['runAsUser']}:{values['runAsGroup']}"
    assert f"--uid {values['runAsUser']} " in LAST_STAGE


def test_the_set_is_pinned() -> None:
    """All that pip installs is held by constraints.txt, torch before all else."""
    installs = [line for line in DOCKERFILE.splitlines() if "pip install" in line]
    assert all("-c constraints.txt" in line for line in installs), installs
    script = (ROOT / "deploy" / "docker" / "venv.sh").read_text()
    first, second = (line for line in script.splitlines() if line.startswith("pip install"))
    assert "^torch==" in first
    assert '-c "$constraints"' in second


def test_the_image_lists_what_is_in_it() -> None:
    """After everything is in it; the venv's packages and Debian's."""
    (line,) = (each for each in LAST_STAGE.split("\nRUN ") if "scripts.sbom" in each)
    assert LAST_STAGE.index("apt-get install") < LAST_STAGE.index("COPY --from=packages") < LAST_STAGE.index(line)
    assert {"--debian", "/", "--prefix", "/opt/twinpool"} <= set(line.split())


@pytest.mark.parametrize(
    ("image", "shown"),
    [
        ({}, "twinpool:0.1.0"),
        (
            {"repository": "registry.example.com/twinpool", "tag": "next"},
            "registry.example.com/twinpool:next",
        ),
        ({"tag": "next", "digest": "sha256:" + "a" * 64}, "twinpool@sha256:" + "a" * 64),
    ],
)
def test_images_are_named_by_tag_or_digest(helm: Helm, image: dict[str, str], shown: str) -> None:
    docs = helm.docs(merged(EVERYTHING, nested({"image": image})))
    found = {container["image"] for _, pod in workloads(docs) for container in containers(pod)}
    assert found == {shown}


def test_scripts_are_valid(everything: list[Doc]) -> None:
    """Those in manifests and beside the chart, as the shell reads them."""
    scripts = [(CHART / "files" / "etcd-auth.sh").read_text()]
    for _, pod in workloads(everything):
        for container in containers(pod):
            if container.get("command", [])[:2] == ["/bin/sh", "-c"]:
                scripts.append([*container["command"][2:], *container["args"]][0])
    assert len(scripts) >= 3
    for script in scripts:
        found = subprocess.run(["/bin/sh", "-n"], input=script, capture_output=True, text=True, check=False)
        assert found.returncode == 0, f"{found.stderr}\n{script}"
