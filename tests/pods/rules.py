# SPDX-License-Identifier: Apache-2.0
"""NetworkPolicies and Services as rules of nftables, in the network namespace of each pod.

What a policy selects may do what a rule of it names; the rest is refused by ICMP, so that a refusal of the policy is told from a
port on which nobody listens, and is written down. Connections that are there go on when the rules change, as with the CNIs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tests.support.manifests import Doc
from tests.support.netns import Host
from tests.support.policies import End, is_peer, rules_of

_BASE: Final = """
add table inet pod
add set inet pod denied_in { type ipv4_addr . inet_service; flags dynamic; size 4096; }
add set inet pod denied_out { type ipv4_addr . inet_service; flags dynamic; size 4096; }
add chain inet pod services { type nat hook output priority -100; }
add chain inet pod in { type filter hook input priority 0; policy accept; }
add chain inet pod out { type filter hook output priority 0; policy accept; }
flush chain inet pod services
flush chain inet pod in
flush chain inet pod out
"""


@dataclass(frozen=True)
class Address:
    """A Service's own address: a port of it, and who answers there."""

    ip: str
    protocol: str
    port: int
    ends: tuple[str, ...]


def pod_rules(
    policies: list[Doc],
    at: End,
    ends: Mapping[str, End],
    addresses: Sequence[Address],
    node: str,
    services: str,
) -> str:
    """All rules of a pod. ``ends``: the pods by address; ``node``: that of the machine, whose kubelet always comes through;
    ``services``: the network of Services."""
    lines = [_BASE, *map(_translation, addresses)]
    for chain, peer, side, key in (("in", "saddr", "ingress", "from"), ("out", "daddr", "egress", "to")):
        lines += [
            f"add rule inet pod {chain} {'iif' if chain == 'in' else 'oif'} lo accept",
            f"add rule inet pod {chain} ct state established,related accept",
        ]
        if chain == "in":
            lines += [f"add rule inet pod in ip saddr {node} accept"]
        else:
            # A Service that nobody answers for.
            lines += [
                f"add rule inet pod out ip daddr {services}.0/24 reject with icmpx type port-unreachable"
            ]
        rules = rules_of(policies, side, at)
        if rules is None:
            continue
        for rule in rules:
            lines += _accepts(rule, chain, peer, key, ends, at.namespace)
        note = f"add @denied_{chain} {{ ip {peer} . %s dport }}"
        syn = "tcp flags & (fin|syn|rst|ack) == syn"
        lines += [
            f"add rule inet pod {chain} {syn} {note % 'tcp'}",
            f"add rule inet pod {chain} meta l4proto udp ct state new {note % 'udp'}",
            f"add rule inet pod {chain} reject with icmpx type admin-prohibited",
        ]
    return "\n".join(lines) + "\n"


def _translation(address: Address) -> str:
    """To one of those who answer, in equal shares."""
    if not address.ends:
        return ""
    numbered = ", ".join(f"{number} : {end}" for number, end in enumerate(address.ends))
    where = f"ip daddr {address.ip} {address.protocol.lower()} dport {address.port}"
    return f"add rule inet pod services {where} dnat ip to numgen random mod {len(address.ends)} map {{ {numbered} }}"


def _accepts(
    rule: Doc, chain: str, peer: str, key: str, ends: Mapping[str, End], namespace: str
) -> list[str]:
    meant = ""
    if rule.get(key):
        found = [ip for ip, end in ends.items() if any(is_peer(one, end, namespace) for one in rule[key])]
        if not found:
            return []
        meant = f"ip {peer} {{ {', '.join(found)} }} "
    ports = rule.get("ports")
    if not ports:
        return [f"add rule inet pod {chain} {meant}accept"]
    lines = []
    for entry in ports:
        wanted = (
            f"{entry['port']}-{entry.get('endPort', entry['port'])}" if "endPort" in entry else entry["port"]
        )
        lines += [f"add rule inet pod {chain} {meant}{entry['protocol'].lower()} dport {wanted} accept"]
    return lines


def denied(host: Host) -> set[tuple[str, str, int]]:
    """(in or out, other end, port) of every connection that a pod's policy has refused."""
    found = set()
    for side in ("in", "out"):
        told = json.loads(host.sh(f"nft -j list set inet pod denied_{side}"))
        for part in told["nftables"]:
            for element in part.get("set", {}).get("elem", ()):
                plain = element.get("elem", {}).get("val", element) if isinstance(element, dict) else element
                ip, port = plain["concat"]
                found.add((side, str(ip), int(port)))
    return found
