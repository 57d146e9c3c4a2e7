# SPDX-License-Identifier: Apache-2.0
"""The style that CI holds and no linter checks: sizes, headers, forbidden words, links."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PYTHON_LINES_MAX = 400
CPP_LINES_MAX = 300
# Tests are lists of cases, bindings lists of an interface's parts.
CPP_LIST_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
# A GPU kernel is one function by nature.
KERNEL_LINES_MAX = 160
KERNEL_FILE_LINES_MAX = 450
LINKS = ("router", "prefill_worker", "decode_worker", "control", "engine", "transfer")
# Unfinished work belongs in the tracker; paths of one machine belong nowhere.
# A test may watch the clock only to see that nothing happens, and says so.
FORBIDDEN = re.compile(
    r"\b(TODO|FIXME|XXX)\b|NotImplementedError|/work/|\.\./shared|time\.sleep\((0*[1-9]|0?\.[1-9])"
)


def tracked(*suffixes: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    paths = (
        ROOT / name for name in listed if name.endswith(suffixes) and not name.startswith("twinpool/v1/")
    )
    return [path for path in paths if path.is_file() and path != Path(__file__)]


def sources() -> list[Path]:
    return tracked(".py", ".cpp", ".h")


def lines_max(path: Path) -> int:
    if path.suffix == ".py":
        return KERNEL_FILE_LINES_MAX if path.parent.name == "kernels" else PYTHON_LINES_MAX
    return CPP_LIST_LINES_MAX if {"tests", "bindings"} & set(path.parts) else CPP_LINES_MAX


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in sources()
        if (count := len(path.read_text().splitlines())) > lines_max(path)
    }
    assert not long


def test_functions_are_short() -> None:
    """Counts bodies: the options of a command are its documentation, not its logic."""
    long = {}
    for path in tracked(".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                limit = KERNEL_LINES_MAX if kernel else FUNCTION_LINES_MAX
                if (count := node.end_lineno - node.body[0].lineno + 1) > limit:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = count
    assert not long


def test_every_source_names_its_licence() -> None:
    missing = [
        str(path.relative_to(ROOT))
        for path in sources()
        if path.read_text().strip() and "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:200]
    ]
    assert not missing


def test_nothing_unfinished_or_local() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked(".py", ".cpp", ".h", ".sh", ".md", ".toml", ".proto", ".yaml")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FORBIDDEN.search(line) and not line.rstrip().endswith("# nothing may happen meanwhile")
    ]
    assert not found


@pytest.mark.parametrize("name", LINKS)
def test_packages_are_links_to_the_top_level_folders(name: str) -> None:
    link = ROOT / "twinpool" / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / name


def test_the_project_alone_pulls_no_torch() -> None:
    """`pip install` of the project must never bring a CUDA build onto a CPU machine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[\[<>=;, ]", requirement)[0] for requirement in project["dependencies"]}
    assert names.isdisjoint(
        {"torch", "triton", "nixl", "nixl-cu12", "nixl-cu13", "accelerate", "transformers"}
    )


def test_pins_cover_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(need for extra in project["optional-dependencies"].values() for need in extra),
    ]
    names = {re.split(r"[\[<>=;, ]", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert names <= pinned
