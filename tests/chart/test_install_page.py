# SPDX-License-Identifier: Apache-2.0
"""What a newcomer types: the commands of the README and of docs/operations.md are ones that the tools take, with the chart's own values."""

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise

import pytest
import yaml
from typer.testing import CliRunner

from tests.support.chart import CHART, ROOT, Helm
from twinpool.control.cli.main import app

pytestmark = pytest.mark.chart

PAGES = ("README.md", "docs/operations.md", "docs/pools.md", "deploy/helm/twinpool/README.md")
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()


def lines(page: str) -> Iterator[str]:
    """Commands in a page's blocks, each on one line."""
    for block in re.findall(r"^```(?:sh)?\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()


def words(line: str, tool: str) -> list[str]:
    """The arguments of a tool that a line runs, in a pod or here; none if it runs another one."""
    found = re.match(rf"(?:kubectl exec .* -- )?(?:\.venv/bin/)?{tool} (.*)$", line)
    return shlex.split(found[1], comments=True) if found else []


COMMANDS = [(page, line) for page in PAGES for line in lines(page) if words(line, "twinpool")]
HELM = [(page, line) for page in PAGES for line in lines(page) if words(line, "helm")]


def test_there_are_commands_to_try() -> None:
    assert len(COMMANDS) >= 20
    assert {page for page, _ in COMMANDS} >= {"README.md", "docs/operations.md"}
    assert len(HELM) >= 5


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_twinpool_takes_what_the_pages_type(page: str, line: str) -> None:
    """With --help a command refuses what it does not know, and does nothing."""
    result = CliRunner().invoke(app, [*words(line.partition(" > ")[0], "twinpool"), "--help"])
    assert result.exit_code == 0, f"{page}: {line}\n{result.output}"


def test_a_command_that_there_is_not_would_be_seen() -> None:
    for line in ("twinpool get nodes", "twinpool scale chat --prefil 3", "twinpool restart"):
        arguments = words(line, "twinpool")
        result = CliRunner().invoke(app, [*arguments, *([] if line.endswith("restart") else ["--help"])])
        assert result.exit_code == 2, line


@pytest.mark.parametrize(("page", "line"), HELM)
def test_helm_takes_what_the_pages_type(helm: Helm, page: str, line: str) -> None:
    """As far as that goes without a cluster: an install that is only tried, and the others' options."""
    arguments = words(line, "helm")
    own = str(CHART / "values-dev.yaml")
    arguments = [own if each == "my-values.yaml" else each for each in arguments]
    arguments = [str(ROOT / each) if each.startswith("deploy/") else each for each in arguments]
    if arguments[0] == "install":
        done = helm.run(*arguments, "--dry-run=client")
        assert "STATUS: pending-install" in done.stdout, f"{page}: {line}\n{done.stderr}"
        assert "NOTES:" in done.stdout
    else:
        done = helm.run(*arguments, "--help")
        assert done.returncode == 0, f"{page}: {line}\n{done.stderr}"


def test_the_notes_name_models_and_pools(helm: Helm) -> None:
    files = ("-f", str(CHART / "values-two-models.yaml"))
    done = helm.run("install", "rel", str(CHART), "-n", "ns", *files, "--dry-run=client")
    notes = done.stdout.partition("NOTES:")[2]
    assert "chat: pool chat, takes promptTokensMost 127" in notes
    assert "chat: pool chat-long, takes overflow true promptTokensLeast 128" in notes
    assert "code-model: pool code\n" in notes


def test_docker_takes_what_the_page_types() -> None:
    """The file is there, and what is given to it is something that it asks for."""
    builds = [
        found for line in lines("docs/operations.md") if (found := words(line, "docker"))[:1] == ["build"]
    ]
    assert len(builds) == 2
    for words_of_it in builds:
        given = dict(pairwise(words_of_it))
        assert (ROOT / given["-f"]).is_file()
        assert words_of_it[-1] == "."
        for argument in (each.partition("=")[0] for flag, each in given.items() if flag == "--build-arg"):
            assert re.search(rf"^ARG {argument}\b", DOCKERFILE, re.MULTILINE)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    tags = {each.rpartition(":")[2] for found in builds for each in found if each.startswith("REGISTRY/")}
    assert tags == {chart["appVersion"], f"{chart['appVersion']}-cuda"}
