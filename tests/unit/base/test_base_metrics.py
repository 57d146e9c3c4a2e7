# SPDX-License-Identifier: Apache-2.0
import re
import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, Info

from twinpool import launch, metrics
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.metrics.page import render

METRICS = {
    name: value
    for name, value in vars(metrics).items()
    if isinstance(value, Counter | Gauge | Histogram | Info)
}
ROOT = Path(__file__).parents[3]
BOUNDED = {
    "direction",
    "reason",
    "result",
    "outcome",
    "code",
    "role",
    # Those of the configuration.
    "pool",
    "model",
    "state",
    "kind",
    "cause",
    "operation",
    "watch",
    "source",
    "finished_reason",
    # Only tenants of the operator's file, and "other".
    "tenant",
}


def test_all_metrics_follow_the_naming_rules() -> None:
    for name, metric in METRICS.items():
        (family,) = list(metric.describe())
        assert family.name.startswith("twinpool_"), name
        assert re.fullmatch(r"[a-z0-9_]+", family.name), name
        assert not re.search(r"_(time|size|counter|total)$", family.name), name
        assert family.documentation.endswith("."), name


def test_the_page_is_made_from_the_metrics() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == render(), (
        "python -m twinpool.metrics > docs/metrics.md"
    )
    rows = re.findall(r"^\| `(twinpool_\w+)` \|", render(), re.MULTILINE)
    assert len(rows) == len(set(rows)) == len({id(metric) for metric in METRICS.values()})


def test_labels_are_bounded() -> None:
    for name, metric in METRICS.items():
        assert set(metric._labelnames) <= BOUNDED, name


def test_times_say_seconds() -> None:
    for name, metric in METRICS.items():
        (family,) = list(metric.describe())
        if isinstance(metric, Histogram) and ("time" in family.name or "latency" in family.name):
            assert family.name.endswith("_seconds"), name


def test_buckets_rise() -> None:
    for name in dir(metrics):
        if name.endswith("_BUCKETS"):
            buckets = getattr(metrics, name)
            assert list(buckets) == sorted(set(buckets)), name


def test_suffixes_that_dashboards_know_exist() -> None:
    names = {family.name for metric in METRICS.values() for family in metric.describe()}
    for suffix in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_success",
        "nixl_xfer_time_seconds",
        "nixl_bytes_transferred",
        "nixl_num_failed_transfers",
        "nixl_num_kv_expired_reqs",
    ):
        assert any(name.endswith(suffix) for name in names), suffix


def test_http_serves_the_registry_on_a_free_port() -> None:
    metrics.MEMBERSHIP_REGISTERED.set(1)
    port = metrics.start_http()
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    assert "twinpool_membership_registered 1.0" in text
    assert "twinpool_build_info{" in text
    assert REGISTRY.get_sample_value("twinpool_membership_registered") == 1.0


def test_a_taken_port_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TwinpoolError, match=str(port)) as caught:
            metrics.start_http(port=port)
    assert caught.value.reason == "PORT_UNAVAILABLE"


@pytest.mark.parametrize("entry", [*launch.PROCESSES.values(), *launch.ROLES.values()])
def test_every_entry_exists(entry: str) -> None:
    # By its file, not by an import: some need the engine's libraries.
    module, _, attribute = entry.partition(":")
    path = ROOT / (module.replace(".", "/") + ".py")
    assert f"def {attribute}(" in path.read_text()


def test_entries_are_resolved_by_name() -> None:
    assert launch.resolve("twinpool.launch:resolve") is launch.resolve
    with pytest.raises(ConfigError, match="'routers'; known: router, prefill, decode, control"):
        launch.process_entry("routers")
    with pytest.raises(ConfigError, match="unknown role"):
        launch.role_factory("router")
    with pytest.raises(AttributeError):
        launch.resolve("twinpool.launch:nothing")


def test_what_users_of_nixl_know_is_there_under_its_known_name() -> None:
    """The names that dashboards for other engines use, behind our prefix."""
    known = (
        "xfer_time_seconds",
        "post_time_seconds",
        "bytes_transferred",
        "num_descriptors",
        "num_failed_transfers",
        "num_failed_notifications",
        "num_kv_expired_reqs",
    )
    names = {family.name for family in REGISTRY.collect()}
    assert {f"twinpool_worker_nixl_{name}" for name in known} <= names
    assert {"twinpool_worker_offers", "twinpool_worker_kv_blocks", "twinpool_worker_fence_failures"} <= names
