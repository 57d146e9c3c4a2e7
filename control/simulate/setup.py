# SPDX-License-Identifier: Apache-2.0
"""What is simulated: how many workers of which model, how large, and what goes wrong when."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from twinpool.config import RebalanceSection
from twinpool.control.replay.figures import Objectives
from twinpool.control.simulate.faults import Fault
from twinpool.control.simulate.model import WorkerModel


@dataclass(frozen=True)
class Setup:
    """One run but for its trace and its policy."""

    model: WorkerModel
    prefill: int = 1
    decode: int = 1
    block_tokens: int = 64
    prefill_blocks: int = 0
    """Blocks of a prefill worker; 0: what the model's memory holds."""
    decode_blocks: int = 0
    closed: bool = False
    """Requests wait for the answers that they followed in the recording."""
    report_seconds: float = 0.25
    """Between two load reports of a worker."""
    objectives: Objectives = field(default_factory=Objectives)
    faults: Sequence[Fault] = ()
    core: Mapping[str, float] = field(default_factory=dict)
    """Options of the router core's AdmissionConfig."""
    horizon: float = float("inf")
    """Requests that would come later, in virtual seconds, are not sent."""
    rebalance: RebalanceSection | None = None
    """Workers change their roles by the rebalancer's policy; None: they keep them."""
    flip_seconds: float = 2.0
    """What a change of role takes once nothing runs on the worker."""
    max_new_tokens: int = 1
    """What every client asks for; the longest answer of the trace."""

    def blocks(self, role: str) -> int:
        """Blocks of a worker of this role."""
        if role == "prefill":
            return self.prefill_blocks or self.model.prefill_tokens // self.block_tokens
        return self.decode_blocks or self.model.decode_tokens // self.block_tokens
