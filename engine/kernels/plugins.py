# SPDX-License-Identifier: Apache-2.0
"""Kernels of other packages: every entry point of the group ``twinpool.kernels`` is called once with the registry."""

from importlib.metadata import entry_points
from weakref import WeakSet

from twinpool.engine.kernels.registry import KernelRegistry
from twinpool.logs import get_logger

GROUP = "twinpool.kernels"

log = get_logger(__name__)
_extended: WeakSet[KernelRegistry] = WeakSet()


def load_plugins(registry: KernelRegistry) -> None:
    """Lets each plug-in add its kernels to ``registry``, once for each registry.

    A plug-in that fails is logged and left out: it must not keep an engine from starting with the built-in kernels.
    """
    if registry in _extended:
        return
    _extended.add(registry)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        before = len(registry.kernels())
        try:
            entry.load()(registry)
        except Exception as error:
            log.error("kernel_plugin_failed", plugin=entry.name, error=f"{type(error).__name__}: {error}")
            continue
        log.info("kernel_plugin_loaded", plugin=entry.name, kernels=len(registry.kernels()) - before)
