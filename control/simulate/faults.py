# SPDX-License-Identifier: Apache-2.0
"""Faults by script: one a line, ``<seconds> <verb> <worker> [factor]``, ``#`` starts a comment.

60   kill  prefill-1        # gone at once, its cache with it
90   start prefill-1        # back, empty, with a new incarnation
120  slow  decode-0  3      # its steps take three times as long
120  link  prefill-0 10     # its transfers do
300  slow  decode-0  1
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinpool.control.simulate.cluster import Cluster

_FACTOR = {"slow", "link"}
_VERBS = ("kill", "start", "slow", "link")


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of a script."""

    at: float
    """Virtual seconds."""
    verb: str
    worker: str
    factor: float = 1.0

    def apply(self, cluster: "Cluster") -> None:
        """Makes it happen. A fault of a worker that is not there does nothing."""
        if self.verb == "start":
            if cluster.find(self.worker) is None:
                cluster.start_worker(self.worker.rpartition("-")[0], self.worker)
            return
        worker = cluster.find(self.worker)
        if worker is None:
            return
        if self.verb == "kill":
            cluster.kill_worker(worker)
        elif self.verb == "slow":
            worker.slowness = self.factor
        else:
            cluster.links.slow(worker.name, self.factor)


def parse_faults(text: str) -> list[Fault]:
    """A script's faults; ValueError names a bad line."""
    faults = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            faults.append(_parse(words))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    return sorted(faults, key=lambda fault: fault.at)


def _parse(words: list[str]) -> Fault:
    verb = words[1] if len(words) > 1 else ""
    if verb not in _VERBS:
        raise ValueError(f"verb {verb!r}; allowed: {', '.join(_VERBS)}")
    if len(words) != (4 if verb in _FACTOR else 3):
        raise ValueError(f"{verb} takes a worker{' and a factor' if verb in _FACTOR else ''}")
    at, worker = float(words[0]), words[2]
    if at < 0:
        raise ValueError(f"{at} s is before the start")
    role, _, index = worker.rpartition("-")
    if role not in ("prefill", "decode") or not index.isdigit():
        raise ValueError(f"worker {worker!r}; allowed: prefill-N, decode-N")
    factor = float(words[3]) if verb in _FACTOR else 1.0
    if factor <= 0:
        raise ValueError(f"factor {factor:g}; allowed: above 0")
    return Fault(at, verb, worker, factor)
