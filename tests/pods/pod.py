# SPDX-License-Identifier: Apache-2.0
"""A pod: containers on a host of its own, started, asked and ended as the kubelet does it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.pods.probes import content
from tests.support.manifests import Doc, Manifests
from tests.support.netns import Host
from tests.support.policies import End
from tests.support.sandbox import Mount, Processes, Sandbox, image_environment

INIT_SECONDS: Final = 240.0
_PERIOD: Final = 10
_THRESHOLD: Final = 3
"""What Kubernetes takes where a probe does not say it."""


@dataclass
class Place:
    """Where a pod is: ``claims``: directories of claimed volumes by name; ``resolver``: its resolv.conf; ``subdomain``: of its own
    name."""

    host: Host
    directory: Path
    namespace: str
    resolver: str
    claims: Mapping[str, Path] = field(default_factory=dict)
    subdomain: str = ""


class Pod:
    """``ready``: what its probes say; ``was_ready``: whether they have ever said it; ``faults``: what a cluster would have to mend."""

    def __init__(
        self,
        name: str,
        template: Doc,
        place: Place,
        manifests: Manifests,
        changed: Callable[[], object],
        restarts: int = 0,
    ) -> None:
        """``changed``: called when it becomes ready, or is no longer; ``restarts``: how often a container may end by itself."""
        self.name = name
        self._restarts = restarts
        self.place = place
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.spec: Doc = template["spec"]
        self.template = template
        self.ready = False
        self.was_ready = False
        self.terminating = False
        self.faults: list[str] = []
        self.codes: dict[str, int] = {}
        self.sandboxes: dict[str, Sandbox] = {}
        self._manifests = manifests
        self._changed = changed
        self._content: dict[str, bool] = {}
        self._asking: list[asyncio.Task[None]] = []
        self._life: asyncio.Task[None] | None = None
        self._volumes = self._make_volumes()
        # What a pod's containers see of one another.
        self._processes = Processes(place.host) if self.spec.get("shareProcessNamespace") else None

    @property
    def ip(self) -> str:
        """Its address."""
        return self.place.host.ip

    @property
    def component(self) -> str:
        """The part that it plays."""
        return self.labels["app.kubernetes.io/component"]

    @property
    def end(self) -> End:
        """As policies see it."""
        return End(self.name, self.place.namespace, self.labels)

    # --- volumes

    def _make_volumes(self) -> dict[str, Path]:
        found = dict(self.place.claims)
        for volume in self.spec.get("volumes", []):
            found[volume["name"]] = self.place.directory / "volumes" / volume["name"]
        group = self.spec.get("securityContext", {}).get("fsGroup", 0)
        for path in found.values():
            path.mkdir(parents=True, exist_ok=True)
            os.chown(path, 0, group)
            path.chmod(0o2775)
        self.fill()
        return found

    def fill(self) -> None:
        """Gives its volumes of ConfigMaps and Secrets what is in them by now; a running pod gets it, too."""
        for volume in self.spec.get("volumes", []):
            for name, data in self._manifests.content(volume).items():
                path = self.place.directory / "volumes" / volume["name"] / name
                path.parent.mkdir(parents=True, exist_ok=True)
                new = path.with_name(f".{name}")
                new.write_bytes(data)
                os.chown(new, 0, self.spec["securityContext"]["fsGroup"])
                new.chmod(volume.get("secret", {}).get("defaultMode", 0o644))
                new.replace(path)

    def sandbox(self, container: Doc) -> Sandbox:
        """A container of it that is to run."""
        fields = {"metadata.name": self.name, "status.podIP": self.ip}
        env = self._manifests.environment(container, image_environment(), fields)
        mounts = [
            Mount(self._volumes[mount["name"]], mount["mountPath"], bool(mount.get("readOnly")))
            for mount in container.get("volumeMounts", [])
        ]
        name = f"{self.name}.{self.place.subdomain}" if self.place.subdomain else self.name
        files = {
            "/etc/hosts": f"127.0.0.1 localhost\n{self.ip} {name} {self.name}\n",
            "/etc/resolv.conf": self.place.resolver,
        }
        directory = self.place.directory / container["name"]
        command = Manifests.command(container, env)
        user = self.spec.get("securityContext", {}).get("runAsUser", 0)
        return Sandbox(
            self.place.host, directory, command, env, mounts, user, files, processes=self._processes
        )

    # --- life

    def start(self) -> None:
        """Begins to start it; ``ready`` says when it is."""
        self._life = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        for container in self.spec.get("initContainers", []):
            if container.get("restartPolicy") == "Always":
                # It stays beside the others, which wait until it has started.
                await self._started(container, self._keep(container))
            else:
                await self.run_once(container)
        for container in self.spec["containers"]:
            self._keep(container)
        self._judge()

    def _keep(self, container: Doc) -> Sandbox:
        """Starts a container that is to run as long as the pod does."""
        sandbox = self.sandboxes[container["name"]] = self.sandbox(container)
        sandbox.start()
        self._content[container["name"]] = "readinessProbe" not in container
        self._watch(self._ask(container, sandbox))
        self._watch(self._mind(container["name"], sandbox))
        return sandbox

    async def run_once(self, container: Doc) -> None:
        """Runs a container to its end, which has to be a good one."""
        sandbox = self.sandboxes[container["name"]] = self.sandbox(container)
        sandbox.start()
        async with asyncio.timeout(INIT_SECONDS):
            code = await sandbox.ended()
        if code:
            self.faults.append(f"{self.name} {container['name']} ended with {code}\n{sandbox.tail()}")

    def _watch(self, work: Awaitable[None]) -> None:
        self._asking.append(asyncio.ensure_future(work))

    async def _mind(self, name: str, sandbox: Sandbox) -> None:
        """A container that ends by itself is started again, where that is to be expected."""
        while True:
            code = await sandbox.ended()
            if self.terminating:
                return
            if not self._restarts:
                self.faults.append(f"{self.name} {name} ended by itself with {code}\n{sandbox.tail()}")
                return
            self._restarts -= 1
            sandbox.start()

    async def _started(self, container: Doc, sandbox: Sandbox) -> None:
        """Asks the startup probe until it is content."""
        startup = container.get("startupProbe")
        tries = 0
        while startup is not None and not await content(startup, self.ip, container, sandbox):
            tries += 1
            if tries == startup.get("failureThreshold", _THRESHOLD):
                self.faults.append(f"{self.name} does not start\n{sandbox.tail()}")
            await asyncio.sleep(startup.get("periodSeconds", _PERIOD))

    async def _ask(self, container: Doc, sandbox: Sandbox) -> None:
        """Asks the startup probe until it is content, then the others, for ever."""
        await self._started(container, sandbox)
        both = [self._ask_on(container, sandbox, kind) for kind in ("livenessProbe", "readinessProbe")]
        await asyncio.gather(*both)

    async def _ask_on(self, container: Doc, sandbox: Sandbox, kind: str) -> None:
        probe = container.get(kind)
        if probe is None:
            return
        failed = 0
        while True:
            failed = 0 if await content(probe, self.ip, container, sandbox) else failed + 1
            if kind == "readinessProbe":
                if not failed or failed >= probe.get("failureThreshold", _THRESHOLD):
                    self._content[container["name"]] = not failed
                    self._judge()
            elif failed == probe.get("failureThreshold", _THRESHOLD) and not self.terminating:
                self.faults.append(f"{self.name} is not live\n{sandbox.tail()}")
            await asyncio.sleep(probe.get("periodSeconds", _PERIOD))

    def _judge(self) -> None:
        ready = not self.terminating and bool(self._content) and all(self._content.values())
        if ready != self.ready:
            self.ready = ready
            self.was_ready |= ready
            self._changed()

    async def terminate(self) -> None:
        """Ends it: no endpoint any more, preStop, SIGTERM, and SIGKILL when its time is over."""
        self.terminating = True
        self._judge()
        grace = float(self.spec.get("terminationGracePeriodSeconds", 30))
        running = {name: each for name, each in self.sandboxes.items() if each.running}
        stops = [self._stop(container, running) for container in self.spec["containers"]]
        try:
            async with asyncio.timeout(grace):
                await asyncio.gather(*stops)
        except TimeoutError:
            left = [name for name, each in running.items() if each.running]
            self.faults.append(f"{self.name} {left} had to be killed after {grace} s")
        self.close()

    async def _stop(self, container: Doc, running: Mapping[str, Sandbox]) -> None:
        sandbox = running.get(container["name"])
        if sandbox is None:
            return
        await self.hook(container)
        sandbox.signal(signal.SIGTERM)
        self.codes[container["name"]] = await sandbox.ended()

    async def hook(self, container: Doc) -> None:
        """What is to be done before a container is told to end."""
        hook = container.get("lifecycle", {}).get("preStop", {})
        if "sleep" in hook:
            await asyncio.sleep(hook["sleep"]["seconds"])
        elif "exec" in hook:
            grace = float(self.spec["terminationGracePeriodSeconds"])
            code, said = await self.sandboxes[container["name"]].execute(
                *hook["exec"]["command"], seconds=grace
            )
            if code:
                self.faults.append(f"{self.name}: preStop ended with {code}\n{said[-2000:]}")

    async def execute(self, *command: str, container: str = "", seconds: float = 240.0) -> str:
        """Runs a command in a container (the first one) to a good end; what it prints."""
        name = container or self.spec["containers"][0]["name"]
        code, said = await self.sandboxes[name].execute(*command, seconds=seconds)
        assert code == 0, f"{self.name}: {command}: {code}\n{said[-3000:]}"
        return said

    def volume(self, name: str) -> Path:
        """The directory of a volume."""
        return self._volumes[name]

    def close(self) -> None:
        """Ends what is left of it at once."""
        for task in (*self._asking, *filter(None, (self._life,))):
            task.cancel()
        for sandbox in self.sandboxes.values():
            with contextlib.suppress(ProcessLookupError):
                sandbox.kill()
        if self._processes is not None:
            self._processes.close()

    def log(self) -> str:
        """The ends of what its containers have written."""
        return "\n".join(f"--- {self.name} {name}\n{each.tail()}" for name, each in self.sandboxes.items())
