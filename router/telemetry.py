# SPDX-License-Identifier: Apache-2.0
"""RouterService with what the control process collects: load, the last minute, requests, prefixes."""

import asyncio
import hashlib
from typing import Any, Final

from twinpool.router.admission import Admission
from twinpool.router.beginnings import Beginnings
from twinpool.router.inspection import ROLES, Context, RouterInspection
from twinpool.router.recent import Recent
from twinpool.router.summaries import listed
from twinpool.rpc import Caller
from twinpool.v1 import router_pb2 as pb
from twinpool.v1 import telemetry_pb2, worker_pb2

PREFIXES: Final = 32
PREFIXES_MAX: Final = 256
_TENANT_DIGEST_CHARS: Final = 12


class RouterTelemetry(RouterInspection):
    """Serves GetTelemetry, ListRouterRequests and ListHotPrefixes as well."""

    def __init__(
        self, admission: Admission, recent: Recent, beginnings: Beginnings, *inspected: Any, **limits: Any
    ) -> None:
        """``inspected`` and ``limits``: see ``RouterInspection``."""
        super().__init__(*inspected, **limits)
        self._admission = admission
        self._recent = recent
        self._beginnings = beginnings

    async def GetTelemetry(
        self, request: pb.GetTelemetryRequest, context: Context
    ) -> pb.GetTelemetryResponse:
        """See the protocol."""
        self._tenants.admit_operator(Caller.of(context))
        stats = self._core.stats()
        telemetry = telemetry_pb2.RouterTelemetry(
            queued_requests=stats["queued"],
            queued_tokens=stats["queued_tokens"],
            running_requests=max(0, self._admission.active - stats["queued"]),
            open_breakers=self._fleet.breakers.not_closed,
            conditions=[f"LocalityDegraded:{one.cause}" for one in self._locality.condition.causes],
            pools=[
                telemetry_pb2.PoolQueue(
                    pool=pool,
                    model=model,
                    queued_requests=load.queued,
                    queued_tokens=load.queued_tokens,
                    running_requests=load.running,
                )
                for (pool, model), load in self._admission.loads.loads().items()
            ],
        )
        self._recent.tell(telemetry)
        return pb.GetTelemetryResponse(router=self._name, incarnation=self._incarnation, telemetry=telemetry)

    async def ListRouterRequests(
        self, request: pb.ListRouterRequestsRequest, context: Context
    ) -> pb.ListRouterRequestsResponse:
        """See the protocol."""
        self._tenants.admit_operator(Caller.of(context))
        return listed(self._traces, self._name, self._shown, request)

    async def ListHotPrefixes(
        self, request: pb.ListHotPrefixesRequest, context: Context
    ) -> pb.ListHotPrefixesResponse:
        """See the protocol."""
        self._tenants.admit_operator(Caller.of(context))
        limit = min(request.limit or PREFIXES, PREFIXES_MAX)
        # Ranking takes longer than a stream's message may wait.
        found = await asyncio.to_thread(self._beginnings.ranked(limit))
        rows = {row["name"]: row for row in self._rows()}
        return pb.ListHotPrefixesResponse(
            prefixes=[
                telemetry_pb2.HotPrefix(
                    block_hash=one.hashes[-1].tobytes(),
                    model=one.group.model,
                    blocks=len(one.hashes),
                    tokens=len(one.hashes) * one.group.block_tokens,
                    uses=one.uses,
                    holders=[
                        telemetry_pb2.PrefixShare(
                            worker=worker_pb2.WorkerId(name=name, incarnation=rows[name]["incarnation"]),
                            role=ROLES[rows[name]["role"]],
                            blocks=blocks,
                        )
                        for name, blocks in one.holders
                        if name in rows
                    ],
                )
                for one in found
            ]
        )

    def _shown(self, tenant: str) -> str:
        """A name that a client made up may say anything, so only those of the operators' own file are shown."""
        if not tenant or self._tenants.known(tenant):
            return tenant
        return f"sha256:{hashlib.sha256(tenant.encode()).hexdigest()[:_TENANT_DIGEST_CHARS]}"
