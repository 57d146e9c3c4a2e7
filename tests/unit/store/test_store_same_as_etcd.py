# SPDX-License-Identifier: Apache-2.0
"""The embedded server answers any sequence of requests as a real etcd does, errors included."""

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

import etcd3.etcdrpc as pb
import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.stores import launch
from twinpool.store import StoreServer

KEYS = [b"a", b"a/1", b"a/2", b"ab", b"b"]
ENDS = [b"", b"", b"a0", b"b", b"\0"]


class Peer:
    """A store's stubs. Revisions are told relative to where a test began."""

    def __init__(self, server: StoreServer) -> None:
        self.channel = grpc.insecure_channel(server.endpoint)
        self.kv = pb.KVStub(self.channel)
        self.lease = pb.LeaseStub(self.channel)
        self.begin()

    def begin(self) -> None:
        self.prefix = secrets.token_hex(4).encode() + b":"
        self.base = self.kv.Range(pb.RangeRequest(key=b"none")).header.revision

    def key(self, key: bytes) -> bytes:
        return self.prefix + key

    def end(self, end: bytes) -> bytes:
        # The whole range stays inside of this test's prefix.
        return self.prefix[:-1] + b";" if end == b"\0" else end and self.prefix + end

    def told(self, message: Any) -> Any:
        """A message without what may differ: member, term, absolute revisions and the prefix."""
        if isinstance(message, bytes):
            return message.removeprefix(self.prefix)
        if not hasattr(message, "ListFields"):
            return message
        plain: dict[str, Any] = {}
        for field, value in message.ListFields():
            if field.name in ("cluster_id", "member_id", "raft_term"):
                continue
            if field.name in ("revision", "create_revision", "mod_revision"):
                plain[field.name] = value - self.base
            elif field.is_repeated:
                plain[field.name] = [self.told(entry) for entry in value]
            else:
                plain[field.name] = self.told(value)
        return plain

    def ask(self, method: Any, request: Any) -> Any:
        try:
            return self.told(method(request, timeout=60))
        except grpc.RpcError as error:
            call: Any = error
            return call.code(), call.details()


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Peer]]:
    with contextlib.ExitStack() as cleanup:
        found = []
        for kind in ("etcd", "embedded"):
            server = launch(kind, tmp_path_factory.mktemp(kind))
            cleanup.callback(server.stop)
            found.append(Peer(server))
            cleanup.callback(found[-1].channel.close)
        version = pb.MaintenanceStub(found[0].channel).Status(pb.StatusRequest()).version
        if not version.startswith("3.4."):
            pytest.skip(f"the embedded store follows etcd 3.4, not {version}")
        yield found


keys = st.sampled_from(KEYS)
ends = st.sampled_from(ENDS)
values = st.binary(max_size=2)
flags = st.booleans()
puts = st.tuples(
    st.just("put"),
    keys,
    values,
    flags,
    st.sampled_from([0, 0, 0, 12345]),
    st.sampled_from(["", "", "ignore_value", "ignore_lease"]),
)
deletes = st.tuples(st.just("delete"), keys, ends, flags)
ranges = st.tuples(
    st.just("range"),
    keys,
    ends,
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(0, 4),
    st.sampled_from(["", "", "keys_only", "count_only"]),
    st.sampled_from([None, None, -100, -1, 0, 1]),
    st.sampled_from(
        ["", "", "min_mod_revision", "max_mod_revision", "min_create_revision", "max_create_revision"]
    ),
)
compares = st.tuples(
    keys, st.sampled_from([b"", b"", b"a0"]), st.integers(0, 4), st.integers(0, 3), values, st.integers(0, 3)
)
simple = st.one_of(puts, deletes, ranges)
txns = st.tuples(
    st.just("txn"), st.lists(compares, max_size=2), st.lists(simple, max_size=3), st.lists(simple, max_size=2)
)


def build(peer: Peer, op: Any) -> Any:
    kind = op[0]
    if kind == "put":
        _, key, value, prev, lease, ignore = op
        request = pb.PutRequest(
            key=peer.key(key), value=b"" if ignore == "ignore_value" else value, prev_kv=prev
        )
        if ignore != "ignore_lease":
            request.lease = lease
        if ignore:
            setattr(request, ignore, True)
        return request
    if kind == "delete":
        return pb.DeleteRangeRequest(key=peer.key(op[1]), range_end=peer.end(op[2]), prev_kv=op[3])
    if kind == "range":
        _, key, end, limit, order, target, only, revision, bound = op
        request = pb.RangeRequest(
            key=peer.key(key), range_end=peer.end(end), limit=limit, sort_order=order, sort_target=target
        )
        if only:
            setattr(request, only, True)
        if revision is not None:
            request.revision = max(1, peer.base + revision)
        if bound:
            setattr(request, bound, peer.base + 2)
        return request
    request = pb.TxnRequest()
    for key, end, target, result, value, number in op[1]:
        compare = request.compare.add(
            key=peer.key(key), range_end=peer.end(end), target=target, result=result
        )
        field = ("version", "create_revision", "mod_revision", "value", "lease")[target]
        setattr(
            compare,
            field,
            value if target == 3 else number + (peer.base if target in (1, 2) and number else 0),
        )
    for ops, into in ((op[2], request.success), (op[3], request.failure)):
        for inner in ops:
            field = {"put": "request_put", "delete": "request_delete_range", "range": "request_range"}[
                inner[0]
            ]
            getattr(into.add(), field).CopyFrom(build(peer, inner))
    return request


METHOD = {"put": "Put", "delete": "DeleteRange", "range": "Range", "txn": "Txn"}


@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(ops=st.lists(st.one_of(puts, deletes, ranges, txns, txns), min_size=1, max_size=12))
def test_any_requests_have_the_same_answers(peers: list[Peer], ops: list[Any]) -> None:
    for peer in peers:
        peer.begin()
    for op in ops:
        real, embedded = (peer.ask(getattr(peer.kv, METHOD[op[0]]), build(peer, op)) for peer in peers)
        assert embedded == real, op


def test_the_lease_service_has_the_same_answers(peers: list[Peer]) -> None:
    def told(peer: Peer) -> list[Any]:
        peer.begin()
        lease = 7_000_000_000 + secrets.randbits(20)
        grant = pb.LeaseGrantRequest(ID=lease, TTL=60)
        put = pb.PutRequest(key=peer.key(b"k"), value=b"v", lease=lease)

        def renew(request: Any, timeout: float) -> Any:
            return next(peer.lease.LeaseKeepAlive(iter([request]), timeout=timeout))

        ask = peer.ask
        answers = [
            ask(peer.lease.LeaseGrant, grant),
            ask(peer.lease.LeaseGrant, grant),
            ask(peer.kv.Put, put),
            ask(renew, pb.LeaseKeepAliveRequest(ID=lease)),
            ask(peer.lease.LeaseTimeToLive, pb.LeaseTimeToLiveRequest(ID=lease, keys=True)),
            ask(peer.lease.LeaseRevoke, pb.LeaseRevokeRequest(ID=lease)),
            ask(peer.lease.LeaseRevoke, pb.LeaseRevokeRequest(ID=lease)),
            ask(renew, pb.LeaseKeepAliveRequest(ID=lease)),
            ask(peer.lease.LeaseTimeToLive, pb.LeaseTimeToLiveRequest(ID=lease, keys=True)),
            ask(peer.kv.Put, put),
            ask(peer.kv.Range, pb.RangeRequest(key=peer.key(b"k"))),
        ]
        for answer in answers:
            if isinstance(answer, dict):
                answer.pop("ID", None)
                # Whole seconds of what remains: the clock may have moved on by one.
                answer["TTL"] = {59: 60}.get(answer.get("TTL"), answer.get("TTL"))
        return answers

    real, embedded = (told(peer) for peer in peers)
    assert embedded == real


PUT, DELETE = 0, 1
NO_PUT, NO_DELETE = 0, 1


def finish(peer: Peer) -> None:
    """The last two events of a test."""
    peer.kv.Put(pb.PutRequest(key=peer.key(b"last"), value=b"x"))
    peer.kv.DeleteRange(pb.DeleteRangeRequest(key=peer.key(b"last")))


def watch_answers(peer: Peer, start: int | None, **fields: Any) -> list[Any]:
    request = pb.WatchCreateRequest(key=peer.prefix, range_end=peer.end(b"\0"), **fields)
    if start is not None:
        request.start_revision = peer.base + start
    final = PUT if fields.get("filters") == [NO_DELETE] else DELETE
    answers: list[Any] = []
    call = pb.WatchStub(peer.channel).Watch(iter([pb.WatchRequest(create_request=request)]), timeout=60)
    try:
        for response in call:
            told = peer.told(response)
            # How events are cut into responses is the server's choice.
            answers += told.pop("events", [])
            told.pop("header")
            if told:
                answers.append(told)
            if response.canceled or any(
                event.kv.key.endswith(b"last") and event.type == final for event in response.events
            ):
                return answers
            if response.created and start is None:
                finish(peer)
        return answers
    finally:
        call.cancel()


@pytest.mark.parametrize("fields", [{}, {"prev_kv": True}, {"filters": [NO_PUT]}, {"filters": [NO_DELETE]}])
@pytest.mark.parametrize("start", [None, 1, 2, 4])
def test_watches_report_the_same_events(peers: list[Peer], start: int | None, fields: dict[str, Any]) -> None:
    answers = []
    for peer in peers:
        peer.begin()
        for key, value in ((b"a", b"1"), (b"b", b"1"), (b"a", b"2")):
            peer.kv.Put(pb.PutRequest(key=peer.key(key), value=value))
        peer.kv.DeleteRange(pb.DeleteRangeRequest(key=peer.key(b"a"), range_end=peer.key(b"c")))
        finish(peer)
        answers.append(watch_answers(peer, start, **fields))
    assert answers[1] == answers[0]


@pytest.mark.parametrize("start", [1, 3, 4])
def test_watches_on_a_compacted_history_end_alike(peers: list[Peer], start: int) -> None:
    answers = []
    for peer in peers:
        peer.begin()
        for number in range(5):
            peer.kv.Put(pb.PutRequest(key=peer.key(b"a"), value=b"%d" % number))
        peer.kv.Compact(pb.CompactionRequest(revision=peer.base + 4))
        finish(peer)
        answers.append(watch_answers(peer, start))
    # etcd words the reason differently from version to version, and reports it absolute.
    for peer, told in zip(peers, answers, strict=True):
        for answer in told:
            answer.pop("cancel_reason", None)
            if "compact_revision" in answer:
                answer["compact_revision"] -= peer.base
    assert answers[1] == answers[0]
