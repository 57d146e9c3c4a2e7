# SPDX-License-Identifier: Apache-2.0
"""All targets, by name. A module is imported when one of its targets is asked for: some need torch."""

from importlib import import_module

from tests.fuzz.target import Target

MODULES = {
    "inference": "requests",
    "http": "requests",
    "cluster": "cluster",
    "session": "commands",
    "worker": "workers",
    "handoff_owner": "handoff",
    "handoff_reader": "handoff",
    "descriptor": "handoff",
    "kv_events": "events",
    "kv_snapshot": "events",
    "kv_requests": "events",
    "segments": "store",
    "records": "store",
    "resume": "store",
    "config_json": "checkpoints",
    "safetensors": "checkpoints",
    "tokenizer": "checkpoints",
}
"""Where each target is."""


def target(name: str) -> Target:
    """A target by its name. Raises KeyError."""
    found: dict[str, Target] = import_module(f"{__name__}.{MODULES[name]}").TARGETS
    return found[name]
