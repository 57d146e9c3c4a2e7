# SPDX-License-Identifier: Apache-2.0
"""Starts the pods of tests.support.netns_pods as the kubelet does: init containers in their order, probes."""

import asyncio
import subprocess

from tests.support.netns_pods import NetPod, NetWorld
from tests.support.waiting import until_told

START_SECONDS = 240.0
RESTARTS_MAX = 3


async def ready(world: NetWorld, pod: NetPod, container: str = "", kind: str = "readinessProbe") -> None:
    """Returns once a probe of a container is content."""
    probe = pod.container(container)[kind]
    name = pod.container(container)["name"]
    ends = 0
    if "grpc" in probe:
        service = probe["grpc"].get("service", "")
        command = ["twinpool", "health", pod.ip, "--port", str(probe["grpc"]["port"]), "--service", service]
    elif "httpGet" in probe:
        ports = {port["name"]: port["containerPort"] for port in pod.container(container)["ports"]}
        url = f"http://{pod.ip}:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"
        command = ["python", "-c", f"import urllib.request; urllib.request.urlopen('{url}')"]
    else:
        command = probe["exec"]["command"]

    async def content() -> bool:
        nonlocal ends
        if pod.processes[name].poll() is not None:
            # As restartPolicy: Always has it; Ray's nodes give up on a head that is slow to start.
            ends += 1
            assert ends <= RESTARTS_MAX, (
                f"{pod.name} ends again and again\n{world.log(pod, container)[-3000:]}"
            )
            world.start(pod, name)
        try:
            await asyncio.to_thread(world.execute, pod, *command, container=container)
        except (AssertionError, subprocess.TimeoutExpired):
            return False
        return True

    try:
        await until_told(content, START_SECONDS)
    except TimeoutError:
        raise AssertionError(f"{pod.name} is not ready\n{world.log(pod, container)[-3000:]}") from None


async def run_inits(world: NetWorld, pod: NetPod) -> None:
    """Runs the init containers of a pod, one after the other; one that stays is left running once its probe is content."""
    for init in pod.spec.get("initContainers", []):
        process = world.start(pod, init["name"])
        if init.get("restartPolicy") == "Always":
            await ready(world, pod, init["name"], "startupProbe")
        else:
            code = await asyncio.to_thread(process.wait, START_SECONDS)
            assert code == 0, f"{pod.name} {init['name']}\n{world.log(pod, init['name'])[-3000:]}"


async def begin(world: NetWorld, pod: NetPod) -> None:
    """Starts a pod as the kubelet does."""
    await run_inits(world, pod)
    for container in pod.spec["containers"]:
        world.start(pod, container["name"])
