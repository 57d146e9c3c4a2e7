# SPDX-License-Identifier: Apache-2.0
"""The table of ports in docs/operations.md is what the NetworkPolicies allow."""

import re

import pytest

from tests.chart.test_network import design
from tests.support.chart import ROOT, Doc, Helm, named

pytestmark = pytest.mark.chart

PAGE = (ROOT / "docs" / "operations.md").read_text()
WORKERS = ("prefill", "decode")


def kinds(name: str) -> set[str]:
    """Parts by the words of the table."""
    return {"workers": set(WORKERS), "clients": {"client"}, "Prometheus": {"prometheus"}}.get(name, {name})


def written() -> set[tuple[str, str, int]]:
    """(from, to, port); of a range its ends."""
    table = PAGE.partition("| from | to | TCP ports |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()[2:]]
    found = set()
    for sources, targets, ports in rows:
        for number in re.findall(r"\d+", re.sub(r"\([^)]*\)", "", ports)):
            for source in sources.split(", "):
                for target in targets.split(", "):
                    found |= {(one, two, int(number)) for one in kinds(source) for two in kinds(target)}
    return found


def test_the_page_has_what_the_policies_have() -> None:
    """`design` is what the policies allow, as test_network.py holds."""
    pools = re.compile("^(tiny|chat|chat-long)-(?=prefill|decode)")
    outside = {"stranger", "foreigner", "dns", "world"}
    real = set()
    for source, target, port in design():
        # Anybody may be a client of routers; that Prometheus may be one, too, is nothing for the page.
        who = "client" if source in outside else source
        if (who, port) not in {("prometheus", 50051), ("prometheus", 8000)}:
            real.add((pools.sub("", who), pools.sub("", target), port))
    assert written() == real


def test_the_page_says_the_ports_of_the_values(helm: Helm) -> None:
    """The table's numbers are those that a release has by default."""
    docs: list[Doc] = helm.docs({}, "values-dev.yaml")
    for workload in ("router", "tiny-prefill"):
        kind = "Deployment" if workload == "router" else "StatefulSet"
        (container,) = named(docs, kind, f"rel-twinpool-{workload}")["spec"]["template"]["spec"]["containers"]
        shown = {port for _, _, port in written()}
        assert {port["containerPort"] for port in container["ports"]} <= shown
