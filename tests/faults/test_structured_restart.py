# SPDX-License-Identifier: Apache-2.0
"""An answer that must have a form goes on elsewhere in the state of its grammar that it had."""

import re

import pytest

from tests.faults.test_restarts import DECODERS, restart
from tests.support.fleet import BLOCK, Fleet
from tests.support.steps import prompt
from twinpool.client import Completion, request
from twinpool.v1 import inference_pb2 as pb

pytestmark = [pytest.mark.integration, pytest.mark.faults]

FORM = "([a-f]{3} ){40}end"


def structured(number: int, seed: int) -> pb.GenerateRequest:
    message = request(prompt(2 * BLOCK, number), max_tokens=300, seed=seed, temperature=1.0)
    message.structured.regex = FORM
    return message


async def test_a_decode_worker_that_dies_under_a_structured_answer(routed: Fleet) -> None:
    before = {name: routed.faults(name).count("to_owner:release") for name in DECODERS}
    async with routed.client() as client:
        killed = ""
        answer = Completion()
        async for event in client.stream(structured(91, seed=17), timeout=240):
            if event.WhichOneof("event") == "tokens":
                answer.add(event.tokens)
            elif event.WhichOneof("event") == "finished":
                answer.finished = event.finished
            if not killed and answer.token_ids and len(answer.token_ids[0]) >= 10:
                (killed,) = (n for n in DECODERS if routed.faults(n).count("to_owner:release") > before[n])
                routed.workers[killed].kill()
        assert killed
        assert answer.finished.attempts > 1
        assert re.fullmatch(FORM, answer.texts[0])
        await restart(routed, killed)
        whole = await client.complete(structured(91, seed=17), timeout=240)
        assert whole.finished.attempts == 1
        assert answer.token_ids == whole.token_ids, "as if nobody had interrupted it"
