# SPDX-License-Identifier: Apache-2.0
"""An answer that goes on: what its client has stands at the prompt's end and counts as drawn."""

import pytest
from worker_pair import Pair, random_prompt, reference
from worker_requests import BLOCK, decode_command

from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.inference_pb2 import FinishReason
from twinpool.worker.commands import CommandError


def go_on(pair: Pair, prompt: list[int], had: list[int], *, local: bool, **spec: object) -> list[int]:
    """The whole answer once the workers have drawn the rest of it."""
    spec |= {"drawn": len(had)}
    if local:
        pair.decode.do(decode_command(pair, prompt + had, local=True, **spec))  # type: ignore[arg-type]
    else:
        pair.start(prompt + had, **spec)
    tokens = list(had)
    ended: list[int] = []

    def drawn() -> bool:
        for worker in (pair.prefill, pair.decode):
            assert not worker.take("failed")
            for done in worker.take("prefill_done"):
                (first,) = done.prefill_done.first_tokens
                tokens.append(first.token_id)
                ended.extend([first.finish] if first.finish else [])
        for message in pair.decode.take("step"):
            (token,) = message.step.tokens
            assert token.offset == len(tokens), "offsets are those of the whole answer"
            tokens.append(token.token_id)
            ended.extend([token.finish] if token.finish else [])
        return bool(ended)

    pair.run(drawn)
    assert ended == [FinishReason.FINISH_REASON_LENGTH]
    return tokens


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("had", [1, BLOCK - 1, BLOCK, 19])
def test_the_rest_is_that_of_the_answer_nobody_interrupted(local: bool, temperature: float, had: int) -> None:
    pair, prompt = Pair(), random_prompt(2 * BLOCK + 3)
    whole = reference(prompt, 20, temperature=temperature)
    assert go_on(pair, prompt, whole[:had], local=local, max_tokens=20, temperature=temperature) == whole
    pair.assert_quiet()


@pytest.mark.parametrize("local", [False, True])
def test_what_is_not_preemptible_needs_room_for_the_rest_alone(local: bool) -> None:
    """Prompt and answer fill the pool; counting what was drawn twice would find no room."""
    pair, prompt = Pair(decode_blocks=6), random_prompt(BLOCK)
    whole = reference(prompt, 4 * BLOCK)
    rest = go_on(pair, prompt, whole[: 3 * BLOCK], local=local, max_tokens=4 * BLOCK, preemptible=False)
    assert rest == whole
    pair.assert_quiet()


@pytest.mark.parametrize("spec", [{"n": 2, "drawn": 3}, {"max_tokens": 3, "drawn": 3}, {"drawn": 2 * BLOCK}])
def test_what_cannot_have_been_drawn_is_refused(spec: dict[str, int]) -> None:
    pair = Pair()
    spec = {"max_tokens": 3 * BLOCK} | spec
    with pytest.raises(CommandError, match=r"draw\.drawn") as caught:
        pair.decode.do(decode_command(pair, random_prompt(2 * BLOCK), local=True, **spec))  # type: ignore[arg-type]
    assert caught.value.reason == pb.FAILURE_REASON_INVALID
