# SPDX-License-Identifier: Apache-2.0
"""A client in a pod of its own: ``python -m tests.pods.asking ENDPOINT STREAMS MAX_TOKENS`` asks without a pause.

Each answer becomes a line of JSON with its prompt and its tokens, or with the error that it ended in. After SIGTERM it finishes what
it has asked.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from typing import TYPE_CHECKING

from tests.support.steps import prompt
from twinpool.client import request
from twinpool.cluster_client import ClusterClient
from twinpool.errors import TwinpoolError

if TYPE_CHECKING:  # transformers comes with it, which clients have no use for
    from tests.support.oracle import Oracle


async def stream(client: ClusterClient, number: int, max_tokens: int, stopping: asyncio.Event) -> None:
    """One client's requests, one after another."""
    for turn in itertools.count():
        if stopping.is_set():
            return
        tokens = prompt(1 + (37 * turn + 61 * number) % 100, 700 + number)
        message = request(tokens, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        told: dict[str, object] = {"prompt": tokens}
        try:
            answer = await client.complete(message, timeout=240)
            told |= {"tokens": answer.token_ids[0], "resumes": client.resumes, "retries": client.retries}
        except TwinpoolError as error:
            told |= {"error": error.reason, "detail": str(error)}
        print(json.dumps(told), flush=True)


def check(log: str, oracle: Oracle, max_tokens: int) -> int:
    """Fails unless every stream of what was printed came to its end with the tokens of the oracle; how often one was resumed."""
    lines = [json.loads(line) for line in log.splitlines()]
    lost = [line for line in lines if "tokens" not in line]
    assert not lost, lost
    assert lines
    for line in lines:
        assert line["tokens"] == oracle.greedy(line["prompt"], max_tokens, ignore_eos=True), line
    return max(int(line["resumes"]) for line in lines)


async def run(endpoint: str, streams: int, max_tokens: int) -> None:
    """Until it is told to end."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    async with ClusterClient([endpoint]) as client:
        asked = [stream(client, number, max_tokens, stopping) for number in range(streams)]
        await asyncio.gather(*asked)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
