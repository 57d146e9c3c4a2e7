# SPDX-License-Identifier: Apache-2.0
"""A router process for benchmarks: the real router, its workers given on standard input instead of by etcd.

Reads one line of JSON (records as ``bench._router_mocks`` prints them), prints its address, ends with its standard input.
"""

import argparse
import asyncio
import base64
import json
import sys
from collections.abc import Callable

from twinpool import logs
from twinpool.config import TwinpoolConfig
from twinpool.ids import WorkerKey
from twinpool.router.app import Router
from twinpool.rpc import run
from twinpool.v1 import control_pb2


async def _main(args: argparse.Namespace) -> int:
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    settings = {
        "port": args.port,
        "reuse_port": args.port > 0,
        "local_prefill": False,
        "prefill_window_tokens": 1 << 24,
        "max_message_bytes": 64 << 20,
        "token_cache_bytes": args.token_cache_bytes,
    }
    config = TwinpoolConfig.model_validate(
        {"router": settings, "rpc": {"transport": args.transport}, "log": {"level": "warning"}}
    )
    router = Router(config, f"router-bench-{args.port}")
    endpoint = await router.start()
    records = [control_pb2.WorkerRecord.FromString(base64.b64decode(each)) for each in json.loads(line)]
    for record in records:
        router.fleet.upsert(record)
    await until(lambda: _ready(router, records))
    await router.serve()
    print(endpoint, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await router.stop(0.0)
    return 0


def _ready(router: Router, records: list[control_pb2.WorkerRecord]) -> bool:
    keys = [WorkerKey(record.worker.name, record.worker.incarnation) for record in records]
    sessions = [router.fleet.session(key) for key in keys]
    return router.models.servable and all(session is not None and session.up for session in sessions)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits for a condition. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--port", type=int, default=0, help="share this port with other routers; 0: a free one of its own"
    )
    parser.add_argument("--token-cache-bytes", type=int, default=64 << 20, help="of tokenised text")
    parser.add_argument("--transport", default="auto", help="auto, python, native")
    logs.setup("warning", False)
    run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
