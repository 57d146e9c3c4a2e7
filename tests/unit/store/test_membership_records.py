# SPDX-License-Identifier: Apache-2.0
"""Records are checked where they are read: problems have names."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.stores import ONE_KIND, running
from twinpool.membership import Registration, parse, problem_of
from twinpool.membership.records import RecordError
from twinpool.store import EtcdStore, Keys, StoreServer
from twinpool.v1.control_pb2 import (
    WORKER_STATE_STARTING,
    RouterRecord,
    WorkerRecord,
)
from twinpool.v1.worker_pb2 import ROLE_PREFILL, WorkerId


@pytest.fixture(scope="module", params=ONE_KIND)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    yield from running(request.param, tmp_path_factory.mktemp("store"))


def worker(name: str = "w", incarnation: int = 7, **fields: Any) -> WorkerRecord:
    values: dict[str, Any] = {
        "worker": WorkerId(name=name, incarnation=incarnation),
        "pool": "default",
        "role": ROLE_PREFILL,
        "state": WORKER_STATE_STARTING,
        "endpoint": "127.0.0.1:1000",
        "num_blocks": 8,
        "block_tokens": 16,
        "max_num_seqs": 4,
    }
    return WorkerRecord(**(values | fields))


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (worker(""), "name"),
        (worker("Upper"), "name"),
        (worker("a/b"), "name"),
        (worker(incarnation=0), "incarnation"),
        (worker(pool=""), "pool"),
        (worker(role=0), "role"),
        (worker(state=0), "state"),
        (worker(endpoint=""), "endpoint"),
        (worker(endpoint="h:99999"), "endpoint"),
        (worker(endpoint="h:" + "9" * 5000), "endpoint"),
        (worker(num_blocks=0), "num_blocks"),
        (worker(block_tokens=(1 << 32) - 1), "block_tokens"),
        (worker(max_num_seqs=0), "max_num_seqs"),
        (worker(metrics_endpoint="h"), "metrics endpoint"),
        (worker(model="m" * 5000), "model"),
        (RouterRecord(name="r", endpoint="h:1"), "incarnation"),
    ],
)
def test_problems_of_records_are_named(store: EtcdStore, record: Any, problem: str) -> None:
    assert problem in problem_of(record)
    with pytest.raises(ValueError, match="cannot be registered"):
        Registration(store, "c", record, ttl_seconds=2)


def test_parse_checks_that_a_record_is_where_it_belongs() -> None:
    keys = Keys("c")
    value = worker().SerializeToString()
    assert parse(keys, WorkerRecord, keys.worker("default", "w"), value) == worker()
    for key in (keys.worker("other", "w"), keys.worker("default", "v"), "/elsewhere"):
        with pytest.raises(RecordError) as caught:
            parse(keys, WorkerRecord, key, value)
        assert caught.value.cause == "key"
