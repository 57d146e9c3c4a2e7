# SPDX-License-Identifier: Apache-2.0
"""Which devices a benchmark of two processes is asked to use, and whether this machine has them."""

import torch


def devices_of(text: str) -> tuple[str, str]:
    """The first and the second of ``text``, as ``cuda:0,cuda:1``; one name stands for both. Ends the program with a sentence
    that says what to ask for instead if this machine lacks one."""
    names = [name.strip() for name in text.split(",")]
    if len(names) > 2 or not all(names):
        raise SystemExit(f"--devices {text}: name one device or two, such as cuda:0,cuda:1")
    for name in names:
        _check(name)
    if len({torch.device(name).type for name in names}) > 1:
        raise SystemExit(f"--devices {text}: both have to be of one kind")
    return names[0], names[-1]


def _check(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SystemExit(f"--devices: {name} is no device; name cpu or cuda:INDEX") from None
    if device.type == "cpu":
        return
    count = torch.cuda.device_count() if device.type == "cuda" and torch.cuda.is_available() else 0
    if device.type != "cuda" or device.index is None:
        raise SystemExit(f"--devices: {name} cannot be used; name cpu or cuda:INDEX")
    if count == 0:
        raise SystemExit(
            f"--devices: {name} is not there: this machine has no GPU; cpu runs the same script on its cores"
        )
    if device.index >= count:
        raise SystemExit(
            f"--devices: {name} is not there: this machine has {count} GPU{'s' * (count > 1)}; "
            "cuda:0,cuda:0 runs both processes on one"
        )
