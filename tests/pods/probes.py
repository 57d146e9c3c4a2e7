# SPDX-License-Identifier: Apache-2.0
"""What the kubelet asks of containers, from the node that they run on."""

from __future__ import annotations

import asyncio
import urllib.request

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.manifests import Doc
from tests.support.sandbox import Sandbox


async def content(probe: Doc, ip: str, container: Doc, sandbox: Sandbox) -> bool:
    """Whether a probe succeeds."""
    seconds = float(probe.get("timeoutSeconds", 1))
    if "exec" in probe:
        code, _ = await sandbox.execute(*probe["exec"]["command"], seconds=seconds)
        return code == 0
    if "httpGet" in probe:
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        url = f"http://{ip}:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"
        return await asyncio.to_thread(_page, url, seconds)
    asked = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
    async with grpc.aio.insecure_channel(f"{ip}:{probe['grpc']['port']}") as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=seconds)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _page(url: str, seconds: float) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            return bool(200 <= answer.status < 400)
    except OSError:
        return False
