# SPDX-License-Identifier: Apache-2.0
"""The image has what the pods run, as the user that they run as."""

import re
import subprocess
from typing import Any

import pytest
import yaml

from scripts.licences import EXTRAS, needed
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
            # What has a GPU is of the other variant.
            has_gpu = "nvidia.com/gpu" in pod["spec"]["containers"][0]["resources"].get("limits", {})
            assert container["image"] == ("twinpool:0.1.0-cuda" if has_gpu else "twinpool:0.1.0")
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
    assert (
        LAST_STAGE.index("apt-get install")
        < LAST_STAGE.index("COPY --from=packages")
        < LAST_STAGE.index(line)
    )
    assert {"--debian", "/", "--prefix", "/opt/twinpool"} <= set(line.split())


@pytest.mark.parametrize(
    ("image", "shown", "cuda"),
    [
        ({}, "twinpool:0.1.0", "twinpool:0.1.0-cuda"),
        (
            {"repository": "registry.example.com/twinpool", "tag": "next"},
            "registry.example.com/twinpool:next",
            "registry.example.com/twinpool:next-cuda",
        ),
        (
            {"tag": "next", "digest": "sha256:" + "a" * 64, "cudaTag": "gpus"},
            "twinpool@sha256:" + "a" * 64,
            "twinpool:gpus",
        ),
        (
            {"cudaTag": "gpus", "cudaDigest": "sha256:" + "b" * 64},
            "twinpool:0.1.0",
            "twinpool@sha256:" + "b" * 64,
        ),
    ],
)
def test_images_are_named_by_tag_or_digest(helm: Helm, image: dict[str, str], shown: str, cuda: str) -> None:
    docs = helm.docs(merged(EVERYTHING, nested({"image": image})))
    found = {container["image"] for _, pod in workloads(docs) for container in containers(pod)}
    assert found == {shown, cuda}


def test_pools_of_gpus_run_the_image_for_cuda(helm: Helm) -> None:
    docs = helm.docs({}, "values-h200.yaml")
    images = {
        doc["metadata"]["name"]: {container["image"] for container in containers(pod)}
        for doc, pod in workloads(docs)
    }
    assert images["rel-twinpool-deepseek-v3-prefill"] == {"twinpool:0.1.0-cuda"}
    assert images["rel-twinpool-deepseek-v3-decode"] == {"twinpool:0.1.0-cuda"}
    assert images["rel-twinpool-router"] == images["rel-twinpool-control"] == {"twinpool:0.1.0"}


def locked(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_both_variants_are_of_the_same_set() -> None:
    """But for CUDA's libraries, which are pinned, too, and NIXL's build."""
    cpu, cuda = ({name.lower().replace("_", "-"): version for name, version in locked(file).items()}
                 for file in ("constraints.txt", "constraints-cuda.txt"))  # fmt: skip
    own = {name for name in cuda if name not in cpu}
    assert own <= {"setuptools"} | {name for name in own if name.startswith(("nvidia-", "cuda-"))}
    assert {name: version for name, version in cuda.items() if cpu.get(name, version) != version} == {}
    assert {
        "torch",
        "triton",
        "ray",
        "nixl-cu13",
        "nvidia-cublas",
        "nvidia-nccl-cu13",
        "grpcio",
    } <= cuda.keys()
    assert "nixl-cu12" not in cuda
    # The SBOM is held against it, so it has to be whole.
    runtime = {each.name for each in needed("twinpool", EXTRAS)} - {"twinpool", "nixl-cu12"}
    assert runtime <= cuda.keys()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_lock_for_cuda_is_what_pip_resolves() -> None:
    """Of the usual index; skips where there is none."""
    script = [str(ROOT / "scripts" / "lock_cuda.sh"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=500, check=False)
    if re.search(r"NewConnectionError|Temporary failure in name resolution", done.stderr):
        pytest.skip("no index of packages")
    assert done.returncode == 0, done.stdout + done.stderr


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
