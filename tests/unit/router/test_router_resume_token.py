# SPDX-License-Identifier: Apache-2.0
"""Resume tokens: read by who has the key and the tenant, and by nobody else."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.config import ClusterConfig
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.router.resume_token import TokenSeal, cluster_key, key_digest, key_of_file
from twinpool.store import Keys, connect_store, start_store
from twinpool.v1.resume_pb2 import ResumeTicket

TICKET = ResumeTicket(router="r", incarnation=7, stream_id="s", tenant="t")
KEY = b"0123456789abcdef"


def seal(key: bytes = KEY) -> TokenSeal:
    made = TokenSeal()
    made.use(key)
    return made


def test_any_router_with_the_key_reads_it() -> None:
    assert seal().open(seal().seal(TICKET), "t") == TICKET


def test_what_was_sealed_before_the_cluster_key_came_stays_readable_here() -> None:
    early = TokenSeal()
    token = early.seal(TICKET)
    early.use(KEY)
    assert early.open(token, "t") == TICKET
    with pytest.raises(TwinpoolError, match="RESUME_TOKEN_INVALID"):
        seal().open(token, "t")


@given(st.binary(max_size=200))
def test_what_nobody_sealed_is_refused(token: bytes) -> None:
    with pytest.raises(TwinpoolError, match="RESUME_TOKEN_INVALID"):
        seal().open(token, "t")


@given(st.data())
def test_a_token_that_was_changed_anywhere_is_refused(data: st.DataObject) -> None:
    token = bytearray(seal().seal(TICKET))
    token[data.draw(st.integers(0, len(token) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TwinpoolError, match="RESUME_TOKEN_INVALID"):
        seal().open(bytes(token), "t")


def test_another_tenant_and_another_cluster_get_nothing() -> None:
    token = seal().seal(TICKET)
    with pytest.raises(TwinpoolError, match="PERMISSION_DENIED"):
        seal().open(token, "u")
    with pytest.raises(TwinpoolError, match="RESUME_TOKEN_INVALID"):
        seal(b"another key of 16").open(token, "t")


def test_keys_of_two_tenants_never_meet() -> None:
    digests = {key_digest(*pair) for pair in (("a", "bc"), ("ab", "c"), ("", "abc"), ("1:", "x"))}
    assert len(digests) == 4
    assert key_digest("a", "") == b""


def test_the_first_router_makes_the_key_of_the_cluster(tmp_path: Path) -> None:
    server = start_store(tmp_path)
    store = connect_store(ClusterConfig(etcd_endpoints=(server.endpoint,)))
    try:
        own, others = TokenSeal().key, TokenSeal().key
        assert cluster_key(store, "test", own) == cluster_key(store, "test", others) == own
        assert cluster_key(store, "other", others) == others
        store.delete_prefix(Keys("test").root)
        assert cluster_key(store, "test", own) == own, "an etcd that has lost it gets it again"
        store.put(Keys("test").resume_key, b"short")
        with pytest.raises(TwinpoolError, match="STORE_CORRUPT"):
            cluster_key(store, "test", own)
    finally:
        store.close()
        server.stop()


def test_a_key_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    assert key_of_file(str(path)) == KEY
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="at least 16"):
        key_of_file(str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        key_of_file(str(tmp_path / "none"))
