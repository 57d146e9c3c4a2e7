# SPDX-License-Identifier: Apache-2.0
"""Alerts and scaling ask for metrics that exist, with labels that they have, in PromQL."""

import json
import re
from pathlib import Path

import promql_parser
import pytest

from tests.support.chart import EVERYTHING, Doc, Helm, merged, named, nested
from tests.support.promql import KNOWN, SCRAPED, check, groups, selectors

pytestmark = pytest.mark.chart

SCALED = {
    "router": ("Deployment", "rel-twinpool-router"),
    "prefill": ("StatefulSet", "rel-twinpool-tiny-prefill"),
    "decode": ("StatefulSet", "rel-twinpool-tiny-decode"),
}


def alerts(docs: list[Doc]) -> list[Doc]:
    return [
        rule for doc in docs if doc["kind"] == "PrometheusRule" for group in doc["spec"]["groups"] for rule in group["rules"]
    ]  # fmt: skip


def test_every_alert_is_about_series_that_exist(everything: list[Doc]) -> None:
    rules = alerts(everything)
    assert len(rules) >= 10
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        check(rule["expr"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        # What a summary shows is in what the expression gives.
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        given = set(groups(promql_parser.parse(rule["expr"])))
        assert shown <= (given or KNOWN[next(selectors(promql_parser.parse(rule["expr"]))).name] | SCRAPED)


@pytest.mark.parametrize(
    "expression",
    [
        'rate(twinpool_router_rejections_total{namespace="n"}[5m)',
        'twinpool_router_nosuch{namespace="n"} > 1',
        'twinpool_router_rejections{namespace="n"} > 1',
        'twinpool_router_breakers{namespace="n",cause="open"} > 1',
        "twinpool_router_breakers > 1",
        'sum by (reason) (twinpool_router_queue_tokens{namespace="n"})',
    ],
)
def test_a_wrong_expression_would_be_seen(expression: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check(expression)


def test_dashboards_show_series_that_exist(everything: list[Doc]) -> None:
    """Each panel's expressions, with a value for what Grafana fills in."""
    files = named(everything, "ConfigMap", "rel-twinpool-dashboards")["data"]
    shown = [
        target["expr"].replace("$__rate_interval", "5m")
        for text in files.values()
        for panel in json.loads(text)["panels"]
        for target in panel["targets"]
    ]
    assert len(shown) >= 20
    for expression in shown:
        check(expression)


def test_alerts_of_two_releases_are_about_their_own(helm: Helm, everything: list[Doc]) -> None:
    other = helm.docs(EVERYTHING, release="other")
    assert not {rule["expr"] for rule in alerts(everything)} & {rule["expr"] for rule in alerts(other)}


def test_prometheus_finds_the_services_with_metrics(everything: list[Doc]) -> None:
    monitor = named(everything, "ServiceMonitor", "rel-twinpool")["spec"]
    wanted = monitor["selector"]["matchLabels"].items()
    (endpoint,) = monitor["endpoints"]
    found = [
        doc for doc in everything if doc["kind"] == "Service" and wanted <= doc["metadata"]["labels"].items()
    ]
    parts = {doc["metadata"]["labels"]["app.kubernetes.io/component"] for doc in found}
    assert parts == {"router", "prefill", "decode", "control", "etcd"}
    for doc in found:
        assert endpoint["port"] in {port["name"] for port in doc["spec"]["ports"]}
        # Each pod by itself, not one behind a balancer.
        assert doc["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_pools_scale_by_metrics_that_exist(helm: Helm, kind: str) -> None:
    on = {f"{role}.autoscaling": {"enabled": True, "type": kind} for role in SCALED}
    docs = helm.docs(merged(EVERYTHING, nested(on)))
    for workload, name in SCALED.values():
        # A number of replicas would undo at each upgrade what was scaled.
        assert "replicas" not in named(docs, workload, name)["spec"]
        if kind == "hpa":
            spec = named(docs, "HorizontalPodAutoscaler", name)["spec"]
            assert spec["metrics"][0]["pods"]["metric"]["name"] in KNOWN
            target = spec["scaleTargetRef"]
        else:
            spec = named(docs, "ScaledObject", name)["spec"]
            check(spec["triggers"][0]["metadata"]["query"])
            target = spec["scaleTargetRef"]
        assert (target["kind"], target["name"]) == (workload, name)


def test_nothing_scales_by_default(everything: list[Doc]) -> None:
    assert not {"HorizontalPodAutoscaler", "ScaledObject"} & {doc["kind"] for doc in everything}


RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks.md"


def test_every_alert_has_a_runbook_and_links_to_it(everything: list[Doc]) -> None:
    sections = re.findall(r"^## (\w+)$", RUNBOOKS.read_text(), re.MULTILINE)
    rules = alerts(everything)
    assert sorted(sections) == sorted(rule["alert"] for rule in rules)
    for rule in rules:
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{rule['alert'].lower()}"


def test_runbooks_name_what_exists() -> None:
    """Metrics, options, reasons and links to sections."""
    text = RUNBOOKS.read_text()
    named = set(re.findall(r"twinpool_[a-z_]+", text))
    assert named
    assert named <= {name.removesuffix("_bucket") for name in KNOWN}, named - set(KNOWN)
    options = set(re.findall(r"`((?:router|worker|scheduler|transfer|kv|model)\.[a-z_]+)(?:: \w+)?`", text))
    documented = (RUNBOOKS.parent / "configuration.md").read_text()
    assert len(options) >= 8
    assert {option for option in options if f"`{option}`" not in documented} == set()
    links = set(re.findall(r"\]\(#([a-z]+)\)", text))
    assert links <= {name.lower() for name in re.findall(r"^## (\w+)$", text, re.MULTILINE)}
    reasons = set(re.findall(r"\b(?:QUEUE|NO|DEADLINE|RETRY|TENANT|MODEL|CONTEXT)_[A-Z_]*[A-Z]\b", text))
    errors = (RUNBOOKS.parent / "errors.md").read_text()
    assert {reason for reason in reasons if f"`{reason}`" not in errors} <= {"TENANT_"}
