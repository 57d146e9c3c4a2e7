# SPDX-License-Identifier: Apache-2.0
"""Which prefixes a worker that leaves offers, to whom, and what another one accepts of an offer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.errors import TwinpoolError
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.control_pb2 import WORKER_STATE_DRAINING, WORKER_STATE_READY, WorkerRecord
from twinpool.worker.chains import CHAINS_MAX, chain_message, parse_chains
from twinpool.worker.commands import Limits
from twinpool.worker.heat import Chain, PromptHeat, hottest
from twinpool.worker.prefix_offer import TAKERS_MAX, share_out, takers

ROOT = bytes(16)
LIMITS = Limits(block_tokens=16, num_blocks=8, max_context_tokens=1024, max_num_seqs=4, vocab_size=100)


def chain(path: str) -> Chain:
    """A prompt with a block a letter; a block's hash is the path to it, as in a real chain."""
    rows = [np.frombuffer(path[: at + 1].rjust(16, ".").encode()[-16:], np.uint8) for at in range(len(path))]
    return Chain(ROOT, np.array(rows, np.uint8).reshape(-1, 16))


def paths(chains: list[Chain]) -> list[str]:
    return [found.hashes[-1].tobytes().decode().lstrip(".") for found in chains]


def test_what_most_prompts_share_comes_first() -> None:
    prompts = [chain(path) for path in ("sxy", "sab", "sac", "q")]
    assert paths(hottest(prompts, 1)) == ["s"]
    assert paths(hottest(prompts, 2)) == ["sa"]
    assert paths(hottest(prompts, 3)) == ["sx", "sa"]
    assert sorted(paths(hottest(prompts, 100))) == ["q", "sab", "sac", "sxy"]
    assert hottest(prompts, 0) == []
    assert hottest([], 5) == []


def test_of_equal_use_the_newest_comes_first() -> None:
    assert paths(hottest([chain("new"), chain("old")], 3)) == ["new"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=8), st.integers(0, 20))
def test_an_offer_is_whole_chains_within_its_bound(prompts: list[str], blocks_max: int) -> None:
    found = hottest([chain(path) for path in prompts], blocks_max)
    blocks = {row.tobytes() for offered in found for row in offered.hashes}
    assert len(blocks) <= blocks_max
    distinct = {path[: at + 1] for path in prompts for at in range(len(path))}
    assert len(blocks) == min(blocks_max, len(distinct)), "room was left while there was something to offer"
    for path in paths(found):
        assert any(prompt.startswith(path) for prompt in prompts)


def test_the_memory_of_prompts_is_bounded() -> None:
    heat = PromptHeat(prompts=3, hashes=6)
    for path in ("aa", "bb", "cc", "dd"):
        heat.saw(ROOT, chain(path).hashes)
    assert paths(heat.newest()) == ["dd", "cc", "bb"]
    heat.saw(ROOT, chain("eeeee").hashes)
    assert paths(heat.newest()) == ["eeeee"]
    heat.saw(ROOT, chain("fffffff").hashes)  # alone too much
    heat.saw(ROOT, np.empty((0, 16), np.uint8))
    assert paths(heat.newest()) == ["eeeee"]


def record(name: str, role: int = pb.ROLE_DECODE, fingerprint: str = "f", state: int = WORKER_STATE_READY):  # type: ignore[no-untyped-def]
    return WorkerRecord(
        worker=pb.WorkerId(name=name, incarnation=1),
        role=role,  # type: ignore[arg-type]
        fingerprint=fingerprint,
        state=state,  # type: ignore[arg-type]
    )


def test_takers_are_ready_alike_and_of_the_same_role_if_there_are_any() -> None:
    own = record("own", state=WORKER_STATE_DRAINING)
    others = [
        own,
        record("p", role=pb.ROLE_PREFILL),
        record("d"),
        record("leaving", state=WORKER_STATE_DRAINING),
        record("other", fingerprint="g"),
    ]
    assert [found.worker.name for found in takers(others, own)] == ["d"]
    assert [found.worker.name for found in takers(others[:2], own)] == ["p"]
    assert takers([own], own) == []
    assert len(takers([record(f"d{at}") for at in range(9)], own)) == TAKERS_MAX


def test_shares_are_even() -> None:
    chains = [chain(path) for path in ("aaaa", "bb", "cc", "d")]
    assert [paths(share) for share in share_out(chains, 2)] == [["aaaa", "d"], ["bb", "cc"]]


def test_an_offer_comes_over_the_wire_unchanged() -> None:
    (found,) = parse_chains([chain_message(chain("abc"))], LIMITS)
    assert (paths([found]), found.root) == (["abc"], ROOT)


@pytest.mark.parametrize(
    "message",
    [
        pb.PrefixChain(block_hashes=b"x" * 15, root_hash=ROOT),
        pb.PrefixChain(block_hashes=b"", root_hash=ROOT),
        pb.PrefixChain(block_hashes=b"x" * 16 * 9, root_hash=ROOT),
        pb.PrefixChain(block_hashes=b"x" * 16, root_hash=b"x"),
    ],
)
def test_an_offer_that_no_worker_makes_is_refused(message: pb.PrefixChain) -> None:
    with pytest.raises(TwinpoolError) as caught:
        parse_chains([message], LIMITS)
    assert caught.value.reason == "INVALID_ARGUMENT"


def test_too_large_an_offer_is_refused() -> None:
    with pytest.raises(TwinpoolError):
        parse_chains([pb.PrefixChain()] * (CHAINS_MAX + 1), LIMITS)
