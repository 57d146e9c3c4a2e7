# SPDX-License-Identifier: Apache-2.0
"""Whether a PromQL expression asks for series that exist, with labels that they have."""

from collections.abc import Iterator, Mapping
from typing import Any

import prometheus_client
import promql_parser

from twinpool import metrics

SCRAPED = {"namespace", "service", "pod", "instance"}
"""Labels that Prometheus adds."""


def known() -> dict[str, set[str]]:
    """Labels of each series of the product, by name."""
    found: dict[str, set[str]] = {"up": set()}
    for metric in vars(metrics).values():
        if not isinstance(metric, prometheus_client.metrics.MetricWrapperBase):
            continue
        labels = set(metric._labelnames)
        endings = {
            prometheus_client.Counter: ("_total",),
            prometheus_client.Gauge: ("",),
            prometheus_client.Histogram: ("_bucket", "_sum", "_count"),
            prometheus_client.Info: ("_info",),
        }[type(metric)]
        for ending in endings:
            found[metric._name + ending] = labels | ({"le"} if ending == "_bucket" else set())
    return found


KNOWN = known()


def selectors(node: Any) -> Iterator[Any]:
    """All selections of series in an expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    for name in ("expr", "lhs", "rhs", "args", "vector_selector", "param"):
        child = getattr(node, name, None)
        for part in child if isinstance(child, list) else [child]:
            if part is not None and part is not node:
                yield from selectors(part)


def groups(node: Any) -> Iterator[str]:
    """All labels that an expression groups by."""
    if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
        yield from node.modifier.labels
    for name in ("expr", "lhs", "rhs", "args"):
        child = getattr(node, name, None)
        for part in child if isinstance(child, list) else [child]:
            if part is not None and part is not node:
                yield from groups(part)


def check(expression: str, known: Mapping[str, set[str]] = KNOWN) -> None:
    """Fails unless it does. ``known``: labels by the names of series."""
    parsed = promql_parser.parse(expression)
    found = list(selectors(parsed))
    assert found, expression
    labels: set[str] = set(SCRAPED)
    for selector in found:
        assert selector.name in known, f"{selector.name} in {expression}"
        asked = {matcher.name for matcher in selector.matchers.matchers}
        assert asked <= known[selector.name] | SCRAPED, expression
        # Else it would be about every Twinpool that Prometheus knows.
        assert "namespace" in asked, expression
        labels |= known[selector.name]
    assert set(groups(parsed)) <= labels, expression
