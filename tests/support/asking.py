# SPDX-License-Identifier: Apache-2.0
"""One request of a client to a cluster of real processes, checked against the oracle however it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.support.oracle import Greedy
from twinpool.client import Client, request
from twinpool.errors import TABLE, TwinpoolError
from twinpool.v1 import inference_pb2 as pb


@dataclass
class Outcome:
    """What a client got. Exactly one of: ``finished``; ``error``; neither, if it left."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: pb.GenerateFinished | None = None
    error: TwinpoolError | None = None

    @property
    def reason(self) -> str:
        """Of the error; fails if there is none."""
        assert self.error is not None, "the request did not fail"
        return self.error.reason

    @property
    def done(self) -> pb.GenerateFinished:
        """The last event; fails if the request did not end well."""
        assert self.finished is not None, f"failed: {self.error}"
        return self.finished


async def ask(
    client: Client,
    oracle: Greedy | None,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    leave: Callable[[Outcome], bool] = lambda _outcome: False,
    timeout: float = 240.0,
    tenant: str = "",
    stop: Sequence[str] = (),
    request_id: str = "",
) -> Outcome:
    """Sends a greedy request and reads its answer; leaves it after an event for which ``leave`` is true.

    Whatever came, also before a failure or a leave, is a prefix of the oracle's answer with every token once; a whole
    answer is all of it.
    """
    message = request(
        prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, stop=stop, request_id=request_id
    )
    message.tenant = tenant
    outcome = Outcome()
    stream = client.stream(message, timeout=timeout)
    try:
        async for event in stream:
            assert outcome.finished is None, "an event after the last"
            if event.HasField("tokens"):
                assert event.tokens.offset == len(outcome.tokens), "a token was skipped or came twice"
                outcome.tokens += event.tokens.token_ids
                outcome.text += event.tokens.text
            elif event.HasField("finished"):
                outcome.finished = event.finished
            if leave(outcome):
                break
    except TwinpoolError as error:
        outcome.error = error
    finally:
        await stream.aclose()  # type: ignore[attr-defined]
    if outcome.error is not None:
        # What went over the wire: a reason of the table, under the code that the table gives it.
        assert "grpc_code" not in outcome.error.metadata, f"no reason came with {outcome.error}"
        code = outcome.error.__cause__.code()  # type: ignore[union-attr]
        assert code is TABLE[outcome.error.reason].code, f"{outcome.error.reason} came as {code}"
    # Only now: where many ask at once, nobody is to stand still for the oracle before it has sent its request.
    expected: list[int] = []
    if outcome.tokens and oracle is not None:
        expected = oracle.greedy(prompt, max_tokens, ignore_eos=True)
    assert outcome.tokens == expected[: len(outcome.tokens)], "tokens of another prompt"
    if outcome.finished is not None and not stop:
        assert outcome.tokens == expected
    return outcome


async def ask_again(
    client: Client, oracle: Greedy, prompt: Sequence[int], max_tokens: int, *, tenant: str = ""
) -> tuple[Outcome, Outcome]:
    """Asks until a pair of workers answers for the second time: the first answer of all, and that one. The router may
    have its reasons to choose another pair for a while."""
    seen: set[tuple[str, str]] = set()
    first: Outcome | None = None
    while True:
        outcome = await ask(client, oracle, prompt, max_tokens, tenant=tenant)
        first = first or outcome
        pair = (outcome.done.prefill_worker, outcome.done.decode_worker)
        if pair in seen:
            return first, outcome
        seen.add(pair)
