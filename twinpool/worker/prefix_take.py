# SPDX-License-Identifier: Apache-2.0
"""Prefixes that a worker which leaves offers, and how another one takes them: by the pull that serves prompts, without a prompt."""

from __future__ import annotations

import asyncio
import itertools
from typing import Final

import numpy as np

from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.transfer.base import AttemptKey
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.chains import parse_chains
from twinpool.worker.commands import Limits, PrefixSource, Prompt
from twinpool.worker.heat import Chain
from twinpool.worker.prefix_fetch import PrefixFetch, PrefixFetcher
from twinpool.worker.step_loop import LoopEndedError, StepLoop, outcome

DEADLINE_SECONDS_MAX: Final = 600.0
"""Longest time for one offer."""

log = get_logger(__name__)


class PrefixTaker:
    """Takes offers one after the other. On the event loop."""

    def __init__(self, loop: StepLoop, fetcher: PrefixFetcher, limits: Limits) -> None:
        self._loop = loop
        self._fetcher = fetcher
        self._limits = limits
        self._turn = asyncio.Lock()
        self._numbers = itertools.count(1)

    async def take(self, request: pb.TakePrefixesRequest) -> pb.TakePrefixesResponse:
        """Pulls what is missing here. What fails is left out. Raises INVALID_ARGUMENT or DRAINING."""
        chains = parse_chains(request.chains, self._limits)
        try:
            owner = WorkerKey(request.owner.name, request.owner.incarnation)
        except ValueError as error:
            raise TwinpoolError("INVALID_ARGUMENT", f"owner: {error}", field="owner") from None
        seconds = min(DEADLINE_SECONDS_MAX, request.deadline.ToNanoseconds() / 1e9)
        taken = pb.TakePrefixesResponse()
        try:
            async with asyncio.timeout(seconds), self._turn:
                for chain in chains:
                    source = PrefixSource(owner, request.endpoint, len(chain.hashes))
                    await self._take(chain, source, taken)
        except TimeoutError:
            log.info("offer_cut_short", owner=str(owner), chains=taken.chains, of=len(chains))
        except LoopEndedError:
            raise TwinpoolError("DRAINING", "the worker has stopped") from None
        log.info("prefixes_taken", owner=str(owner), chains=taken.chains, blocks=taken.blocks)
        return taken

    async def _take(self, chain: Chain, source: PrefixSource, taken: pb.TakePrefixesResponse) -> None:
        aio = asyncio.get_running_loop()
        done: asyncio.Future[pb.PrefixFetched] = aio.create_future()

        def settle(fetched: pb.PrefixFetched) -> None:
            if not done.done():
                done.set_result(fetched)

        # A pull leaves the last token of its prompt out; here there is no token to leave.
        tokens = np.broadcast_to(np.int32(0), (len(chain.hashes) * self._limits.block_tokens + 1,))
        prompt = Prompt(tokens, chain.hashes, chain.root)
        key = AttemptKey(f"offer-{source.owner}-{next(self._numbers)}", 1)

        def ended(fetched: pb.PrefixFetched) -> None:
            aio.call_soon_threadsafe(settle, fetched)

        def start() -> PrefixFetch | None:
            return self._fetcher.start(key, prompt, source, ended)

        fetch = await outcome(self._loop.call(start))
        if fetch is None:
            return
        try:
            fetched = await done
        except asyncio.CancelledError:
            self._loop.post(lambda: self._fetcher.abort(fetch))
            raise
        if not fetched.failure:
            taken.chains += 1
            taken.blocks += fetched.stats.blocks
            taken.bytes += fetched.stats.bytes
