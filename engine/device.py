# SPDX-License-Identifier: Apache-2.0
"""The device of a thread."""

import torch


def enter_device(name: str) -> str:
    """Makes a CUDA device (``cuda:1``) the current one of this thread; nothing for others. Returns ``name``.

    Triton launches on the current device, whatever its operands lie on, and a new thread begins with the first: a worker of another one
    would hand that one pointers into its own memory.
    """
    device = torch.device(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return name
