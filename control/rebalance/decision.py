# SPDX-License-Identifier: Apache-2.0
"""What the policy decides, with the numbers that it decided by."""

from dataclasses import dataclass
from typing import Literal

from twinpool.control.rebalance.history import Wish
from twinpool.control.rebalance.split import Split
from twinpool.control.rebalance.telemetry import Role

Kind = Literal["nothing", "flip", "scale"]


@dataclass(frozen=True, slots=True)
class Effect:
    """What a change is predicted to do. Utilisation: share of a role's capacity within the objectives that its load takes."""

    split: Split
    after: Split
    prefill: float
    decode: float
    prefill_after: float
    decode_after: float
    served: float
    """Share of requests that the pool has capacity for, 0 to 1."""
    served_after: float
    seconds: float
    """Until the change is done: the drain, then the flip itself."""
    gain: float
    """Served share times seconds that is won within the horizon once it is done."""
    cost: float
    """The same that is lost until then."""

    @property
    def pays(self) -> bool:
        """Whether it wins more than it costs."""
        return self.gain > self.cost


@dataclass(frozen=True, slots=True)
class Decision:
    """Nothing, a flip of one worker, or another number of workers."""

    kind: Kind
    reason: str
    """One word, such as "MoreDecode" or "Cooldown"."""
    message: str
    """The reason for people, with numbers."""
    wish: Wish | None = None
    """What the load asks for, whether it is done or not."""
    worker: str = ""
    to: Role | None = None
    target: Split | None = None
    """Workers of each role afterwards; of a flip: where flips one after the other would lead."""
    effect: Effect | None = None
