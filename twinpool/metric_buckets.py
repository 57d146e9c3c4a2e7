# SPDX-License-Identifier: Apache-2.0
"""Upper bounds of the histograms' buckets."""

from typing import Final

# Seconds. As vLLM, so that its dashboards fit.
TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS: Final = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
SHORT_BUCKETS: Final = (
    10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
)  # fmt: skip
TOKEN_BUCKETS: Final = (*(float(m * 10**e) for e in range(6) for m in (1, 2, 5)), 1e6)
BYTE_BUCKETS: Final = tuple(float(1 << e) for e in range(12, 37, 2))
COUNT_BUCKETS: Final = tuple(float(1 << e) for e in range(0, 15))
RATIO_BUCKETS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
