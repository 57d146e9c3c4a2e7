# SPDX-License-Identifier: Apache-2.0
"""RouterService with what routers ask of one another."""

from collections.abc import Callable
from typing import Any

from twinpool.router.inspection import Context
from twinpool.router.kept import Kept, KeptBook
from twinpool.router.resume_token import TokenSeal
from twinpool.router.telemetry import RouterTelemetry
from twinpool.v1 import router_pb2 as pb
from twinpool.v1.resume_pb2 import PortableState


class RouterPeer(RouterTelemetry):
    """Serves HandOver as well."""

    def __init__(
        self,
        book: KeptBook,
        claimed: Callable[[bytes], bool],
        seal: TokenSeal,
        *inspected: Any,
        **limits: Any,
    ) -> None:
        """``claimed``: whether a request with an idempotency key is about to start. ``inspected`` and ``limits``: see
        ``RouterTelemetry``."""
        super().__init__(*inspected, **limits)
        self._book = book
        self._claimed = claimed
        self._seal = seal

    async def HandOver(self, request: pb.HandOverRequest, context: Context) -> pb.HandOverResponse:
        """See the protocol."""
        self._seal.check(request)
        kept = self._find(request)
        if kept is None:
            return pb.HandOverResponse(pending=bool(request.key) and self._claimed(request.key))
        if request.forget:
            useful = self._book.cancel(kept)
            return pb.HandOverResponse(state=PortableState(request=kept.portable) if useful else None)
        if not request.stream_id and request.digest != kept.portable.digest:
            return pb.HandOverResponse(error_reason="IDEMPOTENCY_MISMATCH")
        return self._book.hand_over(kept)

    def _find(self, request: pb.HandOverRequest) -> Kept | None:
        return self._book.find(request.stream_id) if request.stream_id else self._book.find_key(request.key)
