# SPDX-License-Identifier: Apache-2.0
"""An etcd server in Python for machines without the binary: the etcd v3 gRPC API over :class:`Mvcc`.

One node, memory only: a restart is a wiped etcd, which every client of ours survives. Any etcd client can talk to it.
``python -m twinpool.store.embedded --port 2379`` runs it as a process.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc

from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger, setup
from twinpool.store.embedded_kv import Refusal, apply_txn, delete, put, read
from twinpool.store.embedded_watch import WatchHub, WatchStream
from twinpool.store.mvcc import Change, Mvcc, MvccError
from twinpool.store.protocol import pb

_log = get_logger(__name__)

MAX_MESSAGE_BYTES: Final = 64 << 20
MAX_CALLS: Final = 512
"""Calls at a time. A watch and a keep-alive stream are a call, and hold a thread, for as long as they live."""

_MIN_TTL_SECONDS: Final = 1
_MAX_TTL_SECONDS: Final = 9_000_000_000
_VERSION: Final = "3.4.0-twinpool-embedded"

_REFUSALS: Final = {
    "compacted": Refusal(
        grpc.StatusCode.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted"
    ),
    "future": Refusal(
        grpc.StatusCode.OUT_OF_RANGE, "etcdserver: mvcc: required revision is a future revision"
    ),
    "lease": Refusal(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found"),
    "lease_exists": Refusal(grpc.StatusCode.FAILED_PRECONDITION, "etcdserver: lease already exists"),
}


class EmbeddedEtcd:
    """The server. Start it once; ``stop`` ends all streams."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Binds, so that ``endpoint`` is known. Raises PORT_UNAVAILABLE."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._state = Mvcc()
        self._hub = WatchHub(self._state, self._header)
        self._stopping = False
        self._cluster_id = secrets.randbits(63) or 1
        self._member_id = secrets.randbits(63) or 1
        self._server = grpc.server(
            # Threads are made on demand, so a high limit costs nothing.
            ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="embedded-etcd"),
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        service = _Service(self)
        for name in ("KV", "Lease", "Watch", "Maintenance", "Cluster"):
            getattr(pb, f"add_{name}Servicer_to_server")(service, self._server)
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            bound = 0
        if not bound:
            raise TwinpoolError("PORT_UNAVAILABLE", f"the store cannot listen on {host}:{port}")
        self.endpoint = f"{host}:{bound}"
        self._reaper = threading.Thread(target=self._reap, name="embedded-etcd-leases", daemon=True)

    def start(self) -> None:
        """Starts to answer."""
        self._reaper.start()
        self._server.start()

    def stop(self) -> None:
        """Ends all streams and stops. Idempotent."""
        with self._lock:
            self._stopping = True
            self._hub.close()
            self._changed.notify_all()
        self._server.stop(grace=0.5).wait()
        if self._reaper.is_alive():
            self._reaper.join()

    def _header(self) -> Any:
        return pb.ResponseHeader(
            cluster_id=self._cluster_id,
            member_id=self._member_id,
            revision=self._state.revision,
            raft_term=1,
        )

    def _publish(self, changes: list[Change]) -> None:
        """With the lock held: tells the watches, and the reaper when leases may have changed."""
        if changes:
            self._hub.publish(self._state.revision, changes)

    def _reap(self) -> None:
        """Ends leases on a clock, whether or not anyone calls."""
        with self._lock:
            while not self._stopping:
                now = time.monotonic()
                for lease in self._state.expired(now):
                    self._publish(self._state.revoke(lease))
                deadline = self._state.next_deadline()
                self._changed.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))


class _Service:
    """The servicers of all services: gRPC's registration asks for method names only."""

    def __init__(self, owner: EmbeddedEtcd) -> None:
        self._owner = owner
        self._state = owner._state
        self._lock = owner._lock

    # KV

    def Range(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._lock:
            return self._answer(context, lambda: read(self._state, request))

    def Put(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._write(context, lambda: put(self._state, request))

    def DeleteRange(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._write(context, lambda: delete(self._state, request))

    def Txn(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._write(context, lambda: apply_txn(self._state, request))

    def Compact(self, request: Any, context: grpc.ServicerContext) -> Any:
        def compact() -> Any:
            self._state.compact(request.revision)
            return pb.CompactionResponse()

        with self._lock:
            return self._answer(context, compact)

    def _write(self, context: grpc.ServicerContext, change: Any) -> Any:
        def run() -> Any:
            answers: list[Any] = []
            self._owner._publish(self._state.write(lambda: answers.append(change())))
            return answers[0]

        with self._lock:
            return self._answer(context, run)

    def _answer(self, context: grpc.ServicerContext, call: Any) -> Any:
        """With the lock held: the call's response with a header, or the refusal that etcd would give."""
        try:
            response = call()
        except (MvccError, Refusal) as error:
            refusal = error if isinstance(error, Refusal) else _REFUSALS[error.kind]
            context.abort(refusal.code, refusal.text)
        response.header.CopyFrom(self._owner._header())
        return response

    # leases

    def LeaseGrant(self, request: Any, context: grpc.ServicerContext) -> Any:
        if request.TTL > _MAX_TTL_SECONDS:
            context.abort(grpc.StatusCode.OUT_OF_RANGE, "etcdserver: too large lease TTL")
        ttl = max(_MIN_TTL_SECONDS, request.TTL)
        lease = request.ID or secrets.randbits(62) or 1

        def grant() -> Any:
            self._state.grant(time.monotonic(), lease, ttl)
            self._owner._changed.notify_all()
            return pb.LeaseGrantResponse(ID=lease, TTL=ttl)

        with self._lock:
            return self._answer(context, grant)

    def LeaseRevoke(self, request: Any, context: grpc.ServicerContext) -> Any:
        def revoke() -> Any:
            self._owner._publish(self._state.revoke(request.ID))
            return pb.LeaseRevokeResponse()

        with self._lock:
            return self._answer(context, revoke)

    def LeaseKeepAlive(self, requests: Any, context: grpc.ServicerContext) -> Any:
        for request in requests:
            with self._lock:
                ttl = self._state.renew(time.monotonic(), request.ID)
                header = self._owner._header()
            yield pb.LeaseKeepAliveResponse(header=header, ID=request.ID, TTL=ttl)

    def LeaseTimeToLive(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._lock:
            found = self._state.leases.get(request.ID)
            response = pb.LeaseTimeToLiveResponse(header=self._owner._header(), ID=request.ID, TTL=-1)
            if found is not None:
                response.TTL = max(0, int(found.deadline - time.monotonic()))
                response.grantedTTL = found.ttl
                if request.keys:
                    response.keys.extend(sorted(found.keys))
            return response

    # watch

    def Watch(self, requests: Any, context: grpc.ServicerContext) -> Any:
        stream = WatchStream(self._owner._hub, self._lock)
        if not context.add_callback(stream.end):
            return iter(())
        threading.Thread(
            target=stream.consume, args=(requests,), name="embedded-etcd-watch", daemon=True
        ).start()
        return stream.responses()

    # the rest that clients ask for

    def Status(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._lock:
            return pb.StatusResponse(
                header=self._owner._header(), version=_VERSION, leader=self._owner._member_id, raftTerm=1
            )

    def MemberList(self, request: Any, context: grpc.ServicerContext) -> Any:
        url = f"http://{self._owner.endpoint}"
        member = pb.Member(ID=self._owner._member_id, name="embedded", clientURLs=[url])
        with self._lock:
            return pb.MemberListResponse(header=self._owner._header(), members=[member])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def unimplemented(request: Any, context: grpc.ServicerContext) -> Any:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"the embedded store has no {name}")

        return unimplemented


def main() -> None:
    """Runs the server until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="Serve the etcd v3 API from memory.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=2379)
    arguments = parser.parse_args()
    setup("info")
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    server = EmbeddedEtcd(arguments.host, arguments.port)
    server.start()
    _log.info("embedded_store_started", endpoint=server.endpoint)
    stopped.wait()
    server.stop()


if __name__ == "__main__":
    main()
