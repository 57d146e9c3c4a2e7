# SPDX-License-Identifier: Apache-2.0
"""Whatever is lost, repeated, overtaken or restarted: in the end the index is the workers' true sets."""

import pytest

from tests.support.event_world import EventWorld

CAUSES = {"start", "gap", "too_old", "incarnation"}


def run(events: int, seed: int) -> EventWorld:
    world = EventWorld(seed)
    checked = 0
    while world.events < events:
        world.step()
        if world.events >= checked + 250:
            checked = world.events
            world.check()
    world.check()
    return world


@pytest.mark.parametrize("seed", range(4))
def test_index_is_exact_after_faults(seed: int) -> None:
    world = run(1250, seed)
    # Else the faults were none.
    assert world.causes.keys() >= CAUSES - {"incarnation"}, world.causes


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_index_is_exact_after_many_faults() -> None:
    world = run(100_000, 99)
    assert world.causes.keys() >= CAUSES, world.causes
