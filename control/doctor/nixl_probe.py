# SPDX-License-Identifier: Apache-2.0
"""In a child: which NIXL there is, whether its UCX plug-in makes an agent, and which transports UCX has here.

NIXL and UCX load plug-ins and may take the process down; the child pays for that. Prints one line of JSON, also half-way, so
that the last line says how far it came.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

MODULES: Final = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
_FIELD_FEATURES: Final = 1
_FEATURE_RMA: Final = 2
_PARAMS_WORDS: Final = 64
_RESOURCE: Final = re.compile(r"resource \d+ .* -- (\S+)/(\S+)")


def main() -> None:
    """Entry point of ``python -m twinpool.control.doctor.nixl_probe``."""
    told: dict[str, Any] = {"stage": "import"}
    _say(told)
    api = None
    for name in MODULES:
        try:
            api = importlib.import_module(name)
        except ImportError as error:
            told.setdefault("error", str(error))
            if not str(getattr(error, "name", "") or "").startswith("nixl"):
                told["error"] = f"{name}: {error}"
            continue
        told |= {"module": name.partition(".")[0]}
        break
    if api is None:
        _say(told)
        return
    told |= {"stage": "ucx", "transports": None, "error": ""}
    _say(told)
    with contextlib.suppress(OSError, AttributeError, IndexError):
        told["transports"] = transports(str(told["module"]))
    told["stage"] = "agent"
    _say(told)
    try:
        api.nixl_agent("doctor", api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        told["stage"] = "made"
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {error}"
        told["plugin"] = plugin_fault(str(told["module"]))
    _say(told)


def transports(module: str) -> list[tuple[str, str]]:
    """Pairs of transport and device that the UCX beside ``module`` has on this machine, whatever UCX_TLS says.

    Raises OSError, AttributeError or IndexError where it carries no UCX that can be asked.
    """
    os.environ.pop("UCX_TLS", None)
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    here = Path(spec.origin).parent
    (found,) = sorted((here.parent / f"{here.name}.libs").glob("libucp-*.so*"))[:1]
    ucp = ctypes.CDLL(str(found))
    numbers = [ctypes.c_uint() for _ in range(3)]
    ucp.ucp_get_version(*(ctypes.byref(number) for number in numbers))
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    if ucp.ucp_config_read(None, None, ctypes.byref(config)):
        raise OSError("ucp_config_read failed")
    params = (ctypes.c_uint64 * _PARAMS_WORDS)(_FIELD_FEATURES, _FEATURE_RMA)
    init = ucp.ucp_init_version
    init.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    if init(numbers[0], numbers[1], params, config, ctypes.byref(context)):
        raise OSError("ucp_init failed")
    return _RESOURCE.findall(_printed(ucp, context))


def plugin_fault(module: str) -> str:
    """Why the loader does not take NIXL's UCX plug-in; "" if it does."""
    given = os.environ.get("NIXL_PLUGIN_DIR", "")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    here = Path(spec.origin).parent
    path = Path(given or here.parent / f"{here.name}.libs" / "nixl") / "libplugin_UCX.so"
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return str(error)
    return ""


def _printed(ucp: Any, context: ctypes.c_void_p) -> str:
    """What ucp_context_print_info writes to a C stream."""
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    ucp.ucp_context_print_info.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    with tempfile.TemporaryFile() as file:
        stream = ctypes.c_void_p(libc.fdopen(os.dup(file.fileno()), b"w"))
        ucp.ucp_context_print_info(context, stream)
        libc.fclose(stream)
        file.seek(0)
        return file.read().decode(errors="replace")


def _say(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # Agents end with the process; their destructors would only take time.
    os._exit(0)
