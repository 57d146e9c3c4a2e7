# SPDX-License-Identifier: Apache-2.0
"""What a request passes through on its way."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from twinpool.config import RouterSection
from twinpool.router.admission import Admission
from twinpool.router.background import Background
from twinpool.router.locality import Locality
from twinpool.router.placement import Fleet
from twinpool.router.prefix import PrefixSources
from twinpool.router.recent import Recent
from twinpool.router.retry import Retries
from twinpool.router.sessions import Sessions
from twinpool.router.stream import Answer
from twinpool.v1 import inference_pb2 as pb

Write = Callable[[pb.GenerateResponse], Awaitable[None]]
NewAnswer = Callable[[], Answer]


@dataclass(frozen=True, slots=True)
class Hops:
    """One of each a router."""

    limits: RouterSection
    admission: Admission
    fleet: Fleet
    locality: Locality
    prefixes: PrefixSources
    background: Background
    retries: Retries
    sessions: Sessions
    recent: Recent
