# SPDX-License-Identifier: Apache-2.0
"""An API server that a real kubectl talks to: it lists what a test puts in, refuses what a test denies, and stores nothing.

It is no Kubernetes: there is no admission, no watch and no port-forward.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import parse_qs, urlsplit

import yaml

Doc = dict[str, Any]

CORE: Final = "v1"
KINDS: Final[dict[str, tuple[str, str, bool]]] = {
    "pods": (CORE, "Pod", True),
    "services": (CORE, "Service", True),
    "persistentvolumeclaims": (CORE, "PersistentVolumeClaim", True),
    "nodes": (CORE, "Node", False),
    "statefulsets": ("apps/v1", "StatefulSet", True),
    "poddisruptionbudgets": ("policy/v1", "PodDisruptionBudget", True),
    "leases": ("coordination.k8s.io/v1", "Lease", True),
    "storageclasses": ("storage.k8s.io/v1", "StorageClass", False),
    "selfsubjectaccessreviews": ("authorization.k8s.io/v1", "SelfSubjectAccessReview", False),
}
"""Resource: group and version, kind, whether it has a namespace."""


class KubeApi:
    """One API server on a port of this machine. A context manager."""

    def __init__(self, directory: Path) -> None:
        self.objects: dict[str, list[Doc]] = {}
        self.denied: set[str] = set()
        """Resources that may not be listed; "create pods/portforward" and its like may not be done."""
        self.kinds = dict(KINDS)
        self.version = "v1.33.2"
        self.asked: list[str] = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                api.asked.append(self.path)
                self._answer(*api.get(self.path))

            def do_POST(self) -> None:
                self._answer(201, api.review(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, code: int, body: Doc) -> None:
                data = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.kubeconfig = directory / "kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(self._config()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def put(
        self, resource: str, name: str, namespace: str = "", labels: Doc | None = None, **parts: Any
    ) -> Doc:
        """Adds an object."""
        version, kind, _ = self.kinds[resource]
        meta: Doc = {"name": name, "labels": labels or {}} | ({"namespace": namespace} if namespace else {})
        made = {"apiVersion": version, "kind": kind, "metadata": meta | parts.pop("metadata", {})} | parts
        self.objects.setdefault(resource, []).append(made)
        return made

    def knows(self, resource: str, version: str, kind: str) -> None:
        """A kind of an operator, as its definition makes the server know it."""
        self.kinds[resource] = (version, kind, True)

    # --- what is asked ----------------------------------------------------------------------

    def get(self, path: str) -> tuple[int, Doc]:
        """The answer to a GET."""
        parts = urlsplit(path)
        words = parts.path.strip("/").split("/")
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if words == ["version"]:
            major, minor = self.version.lstrip("v").split(".")[:2]
            return 200, {"major": major, "minor": minor, "gitVersion": self.version}
        if words == ["api"]:
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if words == ["apis"]:
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": self._groups()}
        group = words[1] if words[0] == "api" else "/".join(words[1:3])
        rest = words[2:] if words[0] == "api" else words[3:]
        if not rest:
            return self._resources(group)
        namespace = ""
        if rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        return self._list(rest[0], namespace, query)

    def review(self, body: bytes) -> Doc:
        """The answer to a SelfSubjectAccessReview, which kubectl sends as protobuf."""
        asked = _resource_attributes(body)
        verb, resource, sub = asked[2], asked[5], asked.get(6, "")
        words = f"{verb} {resource}/{sub}" if sub else f"{verb} {resource}"
        denied = words in self.denied or (not sub and resource in self.denied)
        return {
            "kind": "SelfSubjectAccessReview",
            "apiVersion": "authorization.k8s.io/v1",
            "spec": {},
            "status": {"allowed": not denied},
        }

    def _groups(self) -> list[Doc]:
        versions = sorted({version for version, _, _ in self.kinds.values() if version != CORE})
        return [
            {
                "name": one.partition("/")[0],
                "versions": [{"groupVersion": one, "version": one.partition("/")[2]}],
                "preferredVersion": {"groupVersion": one, "version": one.partition("/")[2]},
            }
            for one in versions
        ]

    def _resources(self, version: str) -> tuple[int, Doc]:
        found = [
            {"name": name, "singularName": kind.lower(), "kind": kind, "namespaced": inside, "verbs": ["get", "list", "create"]}
            for name, (own, kind, inside) in self.kinds.items()
            if own == version
        ]  # fmt: skip
        return 200, {"kind": "APIResourceList", "groupVersion": version, "resources": found}

    def _list(self, resource: str, namespace: str, query: Doc) -> tuple[int, Doc]:
        version, kind, _ = self.kinds[resource]
        if resource in self.denied:
            text = f'{resource} is forbidden: User "tester" cannot list resource "{resource}" in the namespace "{namespace}"'
            return 403, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": text, "reason": "Forbidden", "code": 403,
                         "details": {"kind": resource}}  # fmt: skip
        found = [
            one
            for one in self.objects.get(resource, ())
            if (not namespace or one["metadata"].get("namespace") == namespace)
            and _selected(one["metadata"]["labels"], query.get("labelSelector", ""))
            and _in_phase(one, query.get("fieldSelector", ""))
        ]
        return 200, {"kind": f"{kind}List", "apiVersion": version, "metadata": {}, "items": found}

    def _config(self) -> Doc:
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"}}
            ],
            "users": [{"name": "u", "user": {}}],
            "contexts": [
                {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "llm"}},
                {"name": "other", "context": {"cluster": "c", "user": "u", "namespace": "empty"}},
            ],
            "current-context": "here",
        }


def _resource_attributes(body: bytes) -> dict[int, str]:
    """Fields of the ResourceAttributes: 2 verb, 5 resource, 6 subresource."""
    assert body.startswith(b"k8s\0"), body[:40]
    review = _fields(_fields(body[4:])[2])
    return {number: text.decode() for number, text in _fields(_fields(review[2])[1]).items()}


def _fields(message: bytes) -> dict[int, bytes]:
    """Fields of a protobuf message that have a length, by number; of several the last."""
    found, at = {}, 0
    while at < len(message):
        tag, at = _varint(message, at)
        length, at = _varint(message, at)
        if tag & 7 == 2:
            found[tag >> 3] = message[at : at + length]
            at += length
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at


def _selected(labels: Doc, selector: str) -> bool:
    """Equality, and "KEY in (A,B)" as the last part."""
    plain, _, among = selector.partition(" in (")
    parts = [part for part in plain.split(",") if part]
    if among:
        key = parts.pop()
        if labels.get(key) not in among.rstrip(")").split(","):
            return False
    return all(labels.get(part.partition("=")[0]) == part.partition("=")[2] for part in parts)


def _in_phase(one: Doc, selector: str) -> bool:
    return not selector or one.get("status", {}).get("phase") == selector.partition("=")[2]
