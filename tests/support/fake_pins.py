# SPDX-License-Identifier: Apache-2.0
"""The calls of a worker that pin: the real books over the real block manager of a fake worker's cache."""

import time
from typing import Any

import grpc.aio

from tests.support.fake_cache import FakeCache
from twinpool import errors
from twinpool._core import SchedulerConfig, StepScheduler
from twinpool.config import SessionsSection
from twinpool.errors import TwinpoolError
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1 import worker_pb2_grpc
from twinpool.worker.commands import Limits
from twinpool.worker.prefix_pins import PrefixPins

MAX_CONTEXT_TOKENS, MAX_NUM_SEQS, VOCAB_SIZE = 4096, 8, 258


class FakePins:
    """``evictions``: how often all that is cached is evicted before the next pin."""

    def __init__(self, cache: FakeCache, config: SessionsSection | None = None) -> None:
        self.cache = cache
        self.evictions = 0
        self.asked: list[pb.PinPrefixRequest] = []
        blocks = cache.blocks
        scheduler = StepScheduler(blocks, SchedulerConfig(max_num_seqs=MAX_NUM_SEQS))
        limits = Limits(cache.block_tokens, blocks.num_blocks, MAX_CONTEXT_TOKENS, MAX_NUM_SEQS, VOCAB_SIZE)
        self.books = PrefixPins(
            blocks, cache.generations, scheduler, limits, config or SessionsSection(), time.monotonic
        )

    def pin(self, request: pb.PinPrefixRequest) -> pb.PinPrefixResponse:
        self.asked.append(request)
        if self.evictions and not request.renew:
            self.evictions -= 1
            self.cache.evict()
        self.books.check_pin(request)
        return self.books.pin(request)

    def release(self, request: pb.ReleasePrefixRequest) -> pb.ReleasePrefixResponse:
        self.books.check_release(request)
        return self.books.release(request)


class PinningWorker(worker_pb2_grpc.WorkerServiceServicer):
    """What a fake worker inherits. ``pins`` is None as long as it has no cache."""

    pins: FakePins | None = None

    async def PinPrefix(
        self, request: pb.PinPrefixRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.PinPrefixResponse:
        try:
            return self.pins.pin(request) if self.pins is not None else pb.PinPrefixResponse()
        except TwinpoolError as error:
            await errors.abort(context, error)

    async def ReleasePrefix(
        self, request: pb.ReleasePrefixRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ReleasePrefixResponse:
        try:
            return self.pins.release(request) if self.pins is not None else pb.ReleasePrefixResponse()
        except TwinpoolError as error:
            await errors.abort(context, error)
