# SPDX-License-Identifier: Apache-2.0
"""Nothing that arrives is run: no pickle, no marshal, no eval, no loader that does one of them, anywhere in the product."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("router", "prefill_worker", "decode_worker", "control", "engine", "transfer", "twinpool")
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
BUILTINS = {"eval", "exec", "__import__"}
CALLS = {
    "torch.load", "torch.jit.load", "torch.hub.load", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load",
    "pandas.read_pickle",
}  # fmt: skip
# NIXL's own serialisation of descriptor lists is pickle; multiprocessing's connections unpickle what they receive.
ATTRIBUTES = {"get_serialized_descs", "deserialize_descs", "recv_pyobj", "send_pyobj", "read_pickle"}
LOADERS_OF_ARRAYS = {"np.load", "numpy.load"}


def findings(source: str) -> Iterator[str]:
    """What a source does that could run what it reads, with its line."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names if alias.name.split(".")[0] in MODULES]
            names += [alias.name for alias in node.names if alias.name.startswith("multiprocessing")]
        elif isinstance(node, ast.ImportFrom) and node.module:
            top = node.module.split(".")[0]
            names = [node.module] if top in MODULES or top == "multiprocessing" else []
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            pickled = any(
                word.arg == "allow_pickle" and ast.unparse(word.value) != "False" for word in node.keywords
            )
            if called in BUILTINS | CALLS or called.rpartition(".")[2] in ATTRIBUTES or pickled:
                names = [called]
            elif called in LOADERS_OF_ARRAYS and not any(
                word.arg == "allow_pickle" for word in node.keywords
            ):
                names = [f"{called} without allow_pickle=False"]
        yield from (f"{node.lineno}: {name}" for name in names)


def sources() -> list[Path]:
    """All but what protoc makes."""
    made = ROOT / "twinpool" / "v1"
    files = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in files if not path.is_relative_to(made)]


def test_no_source_runs_what_it_reads() -> None:
    files = sources()
    assert len(files) > 200
    found = [f"{path.relative_to(ROOT)}:{what}" for path in files for what in findings(path.read_text())]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import torch\ntorch.load('x')", "eval('1')", "exec(text)",
        "import yaml\nyaml.load(text)", "agent.get_serialized_descs(d)", "np.load('x')", "np.load('x', allow_pickle=True)",
        "socket.recv_pyobj()", "import multiprocessing.connection", "from multiprocessing import Pipe", "import marshal",
    ],
)  # fmt: skip
def test_it_would_be_seen(source: str) -> None:
    assert list(findings(source))


@pytest.mark.parametrize(
    "source", ["model.eval()", "yaml.safe_load(t)", "np.load('x', allow_pickle=False)", "json.loads(t)"]
)
def test_what_is_harmless_is_left(source: str) -> None:
    assert not list(findings(source))
