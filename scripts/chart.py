# SPDX-License-Identifier: Apache-2.0
"""Writes what the Helm chart has from elsewhere: values.schema.json (with the product's options) and the chart's README.

``python -m scripts.chart`` writes both; ``--check`` says whether they are as they would be written.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from twinpool.config import config_schema

ROOT: Final = Path(__file__).resolve().parents[1]
HELM: Final = ROOT / "deploy" / "helm"
CHART: Final = HELM / "twinpool"
DASHBOARDS: Final = ROOT / "deploy" / "grafana"
POD_MARK: Final = "<<pod"

OWNED: Final[dict[str, frozenset[str] | None]] = {
    "cluster": frozenset(
        {
            "name",
            "etcd_endpoints",
            "etcd_user",
            "etcd_password_file",
            "etcd_ca_file",
            "etcd_cert_file",
            "etcd_key_file",
        }
    ),
    "model": frozenset({"path", "name"}),
    "kv_events": frozenset({"port"}),
    "router": frozenset(
        {
            "host",
            "port",
            "reuse_port",
            "http_port",
            "name",
            "pool",
            "pools",
            "tenants_file",
            "resume_key_file",
        }
    ),
    "worker": frozenset({"host", "port", "name", "pool"}),
    "metrics": frozenset({"enabled", "host", "port"}),
    "tls": None,
    # Of commands, not of processes.
    "client": None,
    "control": frozenset({"host", "port"}),
    # Kubernetes runs the workers.
    "pools": frozenset(
        {
            "prefill_workers",
            "decode_workers",
            "prefill_least",
            "prefill_most",
            "decode_least",
            "decode_most",
            "prefill_resources",
            "decode_resources",
            "prefill_placement",
            "decode_placement",
            "prompt_tokens_least",
            "prompt_tokens_most",
            "priority_least",
            "priority_most",
            "overflow",
            "further",
            "pending_timeout_seconds",
            "stop_workers",
            "routers",
            "ray_address",
            "worker_options",
        }
    ),
}
"""Options that the chart sets itself, by section (None: all of it). Values can't."""


def schema() -> str:
    """values.schema.json."""
    source: Any = yaml.safe_load((HELM / "values.schema.in.yaml").read_text())
    pod = source["$defs"].pop("pod")
    for holder in (*source["properties"].values(), *source["$defs"].values()):
        if POD_MARK in holder.get("properties", {}):
            del holder["properties"][POD_MARK]
            holder["properties"] |= pod
    source["$defs"]["config"] = _options()
    return json.dumps(source, indent=1) + "\n"


def _options() -> dict[str, Any]:
    product = config_schema()
    sections: dict[str, Any] = {}
    for section, reference in product["properties"].items():
        owned = OWNED.get(section, frozenset())
        if owned is None:
            continue
        known: Any = product["$defs"][reference["$ref"].rpartition("/")[2]]
        sections[section] = {
            "type": ["object", "null"],
            "additionalProperties": False,
            "properties": {
                name: {key: value for key, value in option.items() if key not in ("default", "title")}
                for name, option in known["properties"].items()
                if name not in owned
            },
        }
    return {"type": "object", "additionalProperties": False, "properties": sections}


def readme() -> str:
    """The chart's README: its head, and a row for each value."""
    rows = "\n".join(
        f"| `{key}` | {_shown(default)} | {text} |"
        for key, default, text in documented(CHART / "values.yaml")
    )
    head = (HELM / "README.in.md").read_text()
    return f"{head}\n## Values\n\n| value | default | meaning |\n|---|---|---|\n{rows}\n"


def documented(path: Path) -> list[tuple[str, object, str]]:
    """(dotted key, default, text of the "# --" comment above it or "") for each key without keys of its own."""
    found: list[tuple[str, object, str]] = []
    values: Any = yaml.safe_load(path.read_text())
    stack: list[tuple[int, str]] = []
    text: list[str] = []
    for line in path.read_text().splitlines():
        if comment := re.match(r"\s*# ?(-- )?(.*)", line):
            # A comment without the mark continues one that has it.
            if comment[1]:
                text = [comment[2]]
            elif text:
                text.append(comment[2])
            continue
        key = re.match(r"( *)([A-Za-z_][\w]*):", line)
        if key is None:
            text = []
            continue
        indent = len(key[1])
        stack = [(depth, name) for depth, name in stack if depth < indent]
        names = [*(name for _, name in stack), key[2]]
        stack.append((indent, key[2]))
        value = values
        for name in names:
            value = value[name] if isinstance(value, dict) else None
        if value is None:
            continue  # inside a list
        leaf = not isinstance(value, dict) or not value or "{" in line
        if leaf or text:
            found.append((".".join(names), value, " ".join(text)))
        text = []
    return found


def _shown(value: object) -> str:
    if value == "":
        return "empty"
    text = json.dumps(value)
    return "" if isinstance(value, dict) and value and len(text) > 80 else f"`{text}`"


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    stale = []
    made = {CHART / "values.schema.json": schema(), CHART / "README.md": readme()}
    # Helm reads files of the chart alone.
    made |= {CHART / "dashboards" / path.name: path.read_text() for path in DASHBOARDS.glob("*.json")}
    for path, content in made.items():
        if path.is_file() and path.read_text() == content:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if arguments != ["--check"]:
            path.write_text(content)
    if arguments == ["--check"] and stale:
        print(f"run python -m scripts.chart: {', '.join(stale)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
