# SPDX-License-Identifier: Apache-2.0
"""Decode steps of two layers of the model of ``v2_lite_step``, without graphs: for ``compute-sanitizer --tool racecheck``.

``compute-sanitizer --tool racecheck python -m bench.gpu.races``. One token, a few, and more than a tile of an expert's.
"""

import numpy as np
import torch

from bench.gpu.v2_lite_step import build, eager, make_plan, make_pool


def main() -> None:
    model = build(2, None)
    for count in (1, 5, 40):
        context = np.random.default_rng(count).integers(1, 400, count)
        tables = np.random.default_rng(2).permutation(count * 8).reshape(count, 8)
        pool = make_pool(model, tables.size)
        plan = make_plan(np.arange(count) + 7, context, tables)
        logits = eager(model, pool, plan)
        best = model.best(model.scores(torch.randn(count, 2048, device="cuda", dtype=torch.bfloat16)))
        torch.cuda.synchronize()
        print(count, bool(logits.isfinite().all()), bool(best[1].all()), flush=True)


if __name__ == "__main__":
    main()
