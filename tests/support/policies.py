# SPDX-License-Identifier: Apache-2.0
"""What a set of NetworkPolicies allows, by the rules of Kubernetes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

Doc = dict[str, Any]
NAMESPACE_LABEL: Final = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class End:
    """One end of a connection: a pod, or an address outside the cluster (``namespace`` is empty)."""

    name: str
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector picks labels; an empty one picks all."""
    unknown = selector.keys() - {"matchLabels", "matchExpressions"}
    assert not unknown, f"a selector with {unknown}"
    assert not selector.get("matchExpressions"), "expressions are not used here"
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def is_peer(peer: Doc, end: End, namespace: str) -> bool:
    """Whether a rule of a policy in ``namespace`` means an end."""
    assert "ipBlock" not in peer, "blocks of addresses are not used here"
    if not end.namespace:
        return False
    if "namespaceSelector" in peer:
        if not matches(peer["namespaceSelector"], {NAMESPACE_LABEL: end.namespace}):
            return False
    elif end.namespace != namespace:
        return False
    return matches(peer.get("podSelector", {}), end.labels)


def _in_ports(rule: Doc, port: int, protocol: str) -> bool:
    """A rule without ports is for all of them."""
    ports: Sequence[Doc] = rule.get("ports") or ()
    return not ports or any(
        entry["protocol"] == protocol and entry["port"] <= port <= entry.get("endPort", entry["port"])
        for entry in ports
    )


def rules_of(policies: list[Doc], side: str, at: End) -> list[Doc] | None:
    """The rules for a pod, ``side``: ingress or egress; None: no policy is for it, and everything passes."""
    kind = "Ingress" if side == "ingress" else "Egress"
    ours = [
        policy
        for policy in policies
        if at.namespace == policy["metadata"].get("namespace", at.namespace)
        and matches(policy["spec"]["podSelector"], at.labels)
        and kind in policy["spec"]["policyTypes"]
    ]
    if not ours or not at.namespace:
        return None
    return [rule for policy in ours for rule in policy["spec"].get(side) or ()]


def _passes(policies: list[Doc], side: str, at: End, peer: End, port: int, protocol: str) -> bool:
    key = "from" if side == "ingress" else "to"
    rules = rules_of(policies, side, at)
    if rules is None:
        return True
    # A rule without peers, or with an empty list of them, is for everybody.
    return any(
        _in_ports(rule, port, protocol)
        and (not rule.get(key) or any(is_peer(found, peer, at.namespace) for found in rule[key]))
        for rule in rules
    )


class Policies:
    """The policies of releases that lie in one namespace."""

    def __init__(self, docs: list[Doc]) -> None:
        self._policies = [doc for doc in docs if doc["kind"] == "NetworkPolicy"]

    def allow(self, source: End, target: End, port: int, protocol: str = "TCP") -> bool:
        """Whether ``source`` may connect to a port of ``target``: both must let it pass."""
        return _passes(self._policies, "egress", source, target, port, protocol) and _passes(
            self._policies, "ingress", target, source, port, protocol
        )

    def lets(self, side: str, at: End, peer: End, port: int, protocol: str = "TCP") -> bool:
        """Whether one end alone lets a connection with ``peer`` pass; ``side``: ingress or egress."""
        return _passes(self._policies, side, at, peer, port, protocol)

    def edges(self, ends: Sequence[End], ports: Sequence[int]) -> Iterator[tuple[str, str, int]]:
        """(source, target, port) of every connection that is allowed; two pods of a kind have one name."""
        for source in ends:
            for target in ends:
                for port in ports:
                    if target.namespace and self.allow(source, target, port):
                        yield source.name, target.name, port
