# SPDX-License-Identifier: Apache-2.0
"""Placement policies: ours is the router core itself; the others are other systems' published rules, one file each."""

from collections.abc import Callable, Mapping

from twinpool.control.simulate.policies.additive import Additive
from twinpool.control.simulate.policies.least_loaded import LeastLoaded
from twinpool.control.simulate.policies.longest_prefix import LongestPrefix
from twinpool.control.simulate.policies.ours import CoreRouter
from twinpool.control.simulate.policies.round_robin import RoundRobin
from twinpool.control.simulate.policies.threshold import Threshold
from twinpool.control.simulate.router import Router
from twinpool.control.simulate.setup import Setup

POLICIES: Mapping[str, Callable[[Setup], Router]] = {
    "ours": CoreRouter,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "longest_prefix": LongestPrefix,
    "threshold": Threshold,
    "additive": Additive,
}


def make_router(policy: str, setup: Setup) -> Router:
    """A fresh router of a policy; ValueError names the known ones."""
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; known: {', '.join(POLICIES)}")
    return POLICIES[policy](setup)
