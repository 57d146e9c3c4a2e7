# SPDX-License-Identifier: Apache-2.0
"""What rendered manifests give to pods: ConfigMaps, Secrets, and the variables of containers."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from typing import Any

Doc = dict[str, Any]
Files = Mapping[str, bytes]


class Manifests:
    """The documents of a release, and the Secrets that somebody else makes."""

    def __init__(self, docs: list[Doc], secrets: Mapping[str, Files]) -> None:
        self.docs = docs
        self._secrets = dict(secrets)

    def find(self, kind: str, name: str) -> Doc:
        """The one document of a kind and name."""
        (found,) = (doc for doc in self.docs if doc["kind"] == kind and doc["metadata"]["name"] == name)
        return found

    def secret(self, name: str) -> Files:
        """The content of a Secret."""
        if name in self._secrets:
            return self._secrets[name]
        doc = self.find("Secret", name)
        coded = {key: base64.b64decode(value) for key, value in doc.get("data", {}).items()}
        return coded | {key: value.encode() for key, value in doc.get("stringData", {}).items()}

    def set_secret(self, name: str, content: Files) -> None:
        """What whoever starts from now on gets of a Secret."""
        self._secrets[name] = content

    def content(self, volume: Doc) -> Files:
        """The files of a volume; none of one that is empty at first."""
        if "configMap" in volume:
            data = self.find("ConfigMap", volume["configMap"]["name"])["data"]
            return {name: text.encode() for name, text in data.items()}
        if "secret" in volume:
            source = volume["secret"]
            found = self.secret(source["secretName"])
            chosen = source.get("items") or [{"key": key, "path": key} for key in found]
            return {item["path"]: found[item["key"]] for item in chosen}
        return {}

    def environment(
        self,
        container: Doc,
        base: Mapping[str, str],
        fields: Mapping[str, str],
        translate: Callable[[str], str] = lambda text: text,
    ) -> dict[str, str]:
        """The variables of a container over those of its image. ``fields``: of its pod, by path; ``translate``: values that are
        written out."""
        env = dict(base)
        for entry in container.get("env", []):
            if "value" in entry:
                value = re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], entry["value"])
                env[entry["name"]] = translate(value)
            elif "fieldRef" in entry["valueFrom"]:
                env[entry["name"]] = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            else:
                reference = entry["valueFrom"]["secretKeyRef"]
                env[entry["name"]] = self.secret(reference["name"])[reference["key"]].decode()
        return env

    @staticmethod
    def command(container: Doc, env: Mapping[str, str]) -> list[str]:
        """What a container runs; the image's own command is `twinpool`."""
        words = [*container.get("command", ["twinpool"]), *container.get("args", [])]
        return [re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), word) for word in words]
