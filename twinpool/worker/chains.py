# SPDX-License-Identifier: Apache-2.0
"""Prefixes on the wire, as the hashes of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from twinpool.errors import TwinpoolError
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.commands import HASH_BYTES, Limits
from twinpool.worker.heat import Chain

CHAINS_MAX: Final = 4096
"""Most chains of one offer."""


def chain_message(chain: Chain) -> pb.PrefixChain:
    """A chain for the wire."""
    return pb.PrefixChain(block_hashes=chain.hashes.tobytes(), root_hash=chain.root)


def parse_chains(messages: Sequence[pb.PrefixChain], limits: Limits) -> list[Chain]:
    """Chains from the wire. Raises INVALID_ARGUMENT for what no worker would have sent."""
    if len(messages) > CHAINS_MAX:
        raise TwinpoolError("INVALID_ARGUMENT", f"chains: {len(messages)}; the limit is {CHAINS_MAX}")
    chains = []
    for message in messages:
        raw, root = message.block_hashes, message.root_hash
        blocks, rest = divmod(len(raw), HASH_BYTES)
        if rest or not 0 < blocks <= limits.num_blocks or len(root) != HASH_BYTES:
            detail = (
                f"a chain of {len(raw)} bytes with a root of {len(root)}; at most {limits.num_blocks} blocks"
            )
            raise TwinpoolError("INVALID_ARGUMENT", detail)
        chains.append(Chain(root, np.frombuffer(raw, np.uint8).reshape(-1, HASH_BYTES)))
    return chains
