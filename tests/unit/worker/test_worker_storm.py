# SPDX-License-Identifier: Apache-2.0
"""Any order of commands, cancels, breaks and delays: no token is wrong or doubled, and nothing is held at the end."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worker_pair import (
    BLOCK,
    Answer,
    Pair,
    cancel_command,
    decode_command,
    prefill_command,
    prefix_source,
    random_prompt,
    reference,
)

LENGTHS = (3, BLOCK, BLOCK + 5, 4 * BLOCK, 6 * BLOCK + 1)
MAX_TOKENS = 9
_EXPECTED: dict[int, list[int]] = {}

_operations = st.lists(
    st.tuples(
        st.sampled_from(
            (
                "start",
                "start",
                "start-fetch",
                "start-fetch",
                "start-local",
                "turn",
                "turn",
                "cancel-both",
                "cancel-decode",
                "cancel-prefill",
                "stop-owner",
                "resume-owner",
                "evict",
                "cut",
                "cut-fetch",
                "router-dies",
                "late",
            )
        ),
        st.integers(0, len(LENGTHS) - 1),
    ),
    min_size=4,
    max_size=40,
)


def _expected(index: int) -> list[int]:
    if index not in _EXPECTED:
        _EXPECTED[index] = reference(random_prompt(LENGTHS[index], seed=index), MAX_TOKENS)
    return _EXPECTED[index]


class Storm:
    """Plays a careless router: it sends prefill for whatever is reserved and looks at what comes back."""

    def __init__(self) -> None:
        self.pair = Pair(prefill_blocks=16, decode_blocks=18, max_num_seqs=4, lease_seconds=20.0)
        self.prompts: dict[str, int] = {}
        self.answers: dict[str, Answer] = {}
        self.ended: set[str] = set()
        self.fetching: set[str] = set()
        self.local: set[str] = set()

    def apply(self, kind: str, number: int) -> None:
        pair = self.pair
        last = f"r{len(self.prompts) - 1 - number}"
        if kind.startswith("start"):
            name = f"r{len(self.prompts)}"
            if kind == "start-fetch":
                self.fetching.add(name)
            self.prompts[name], self.answers[name] = number, Answer(1)
            prompt = random_prompt(LENGTHS[number], seed=number)
            local = kind == "start-local"
            if local:
                self.local.add(name)
            pair.decode.do(decode_command(pair, prompt, name, local=local, max_tokens=MAX_TOKENS))
        elif kind.startswith("cancel"):
            for worker in (pair.decode, pair.prefill):
                if kind in ("cancel-both", f"cancel-{worker.key.name.split('-')[0]}"):
                    worker.do(cancel_command(last))
        elif kind == "stop-owner":
            pair.fabric.stop((pair.prefill, pair.decode)[number % 2].key)
        elif kind == "resume-owner":
            self.resume()
        elif kind == "evict":
            for worker in (pair.prefill, pair.decode)[: 1 + number % 2]:
                worker.assembly.loop.post(worker.stack.blocks.reset_cache)
        elif kind == "cut" and pair.linked:
            pair.cut()
        elif kind == "cut-fetch" and any(link.reader is pair.prefill for link in pair.links):
            pair.cut(pair.prefill, pair.decode)
        elif kind == "router-dies":
            for worker in (pair.decode, pair.prefill):
                role = worker.assembly.loop.role
                worker.assembly.loop.post(lambda role=role: role.on_session_closed(1))  # type: ignore[misc]
        elif kind == "late":
            pair.clock.now += 7.0
        for _ in range(1 + number):
            self.turn()

    def resume(self) -> None:
        for worker in (self.pair.prefill, self.pair.decode):
            self.pair.fabric.resume(worker.key)

    def turn(self) -> None:
        pair = self.pair
        pair.turn()
        for message in pair.decode.take("reserved"):
            name, cached = message.reserved.id.request_id, message.reserved.cached_blocks
            if name in self.local:
                continue
            prompt = random_prompt(LENGTHS[self.prompts[name]], seed=self.prompts[name])
            full = len(prompt) // BLOCK
            prefix = prefix_source(pair.decode, full) if name in self.fetching and full else None
            pair.prefill.do(prefill_command(pair, prompt, name, cached, prefix=prefix, max_tokens=MAX_TOKENS))
        for message in (*pair.prefill.take("prefill_done"), *pair.decode.take("prefill_done")):
            for first in message.prefill_done.first_tokens:
                self.answers[message.prefill_done.id.request_id]._add(0, 0, first.token_id, first.finish)
        for message in pair.decode.take("step"):
            for token in message.step.tokens:
                name = message.step.ids[token.slot].request_id
                assert name not in self.ended, "a token after the leg's last word"
                self.answers[name]._add(token.index, token.offset, token.token_id, token.finish)
        for message in (*pair.decode.take("failed"), *pair.decode.take("cancelled")):
            kind = message.WhichOneof("message")
            self.ended.add(getattr(message, str(kind)).id.request_id)


@given(_operations)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_nothing_is_lost_doubled_or_kept(operations: list[tuple[str, int]]) -> None:
    storm = Storm()
    for kind, number in operations:
        storm.apply(kind, number)
    storm.resume()
    for _ in range(80):
        storm.turn()
    # Whoever was promised something and died without a word is found out by its lease.
    storm.pair.clock.now += 25.0
    for _ in range(8):
        storm.turn()
    for name, answer in storm.answers.items():
        expected = _expected(storm.prompts[name])
        assert answer.tokens[0] == expected[: len(answer.tokens[0])], name
        if answer.finished:
            assert answer.tokens[0] == expected
    storm.pair.assert_quiet()
