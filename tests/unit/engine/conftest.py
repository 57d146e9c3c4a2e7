# SPDX-License-Identifier: Apache-2.0
"""Small tensors: threads would only fight over the cores."""

import torch

torch.set_num_threads(1)
