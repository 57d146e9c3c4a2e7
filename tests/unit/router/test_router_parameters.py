# SPDX-License-Identifier: Apache-2.0
"""What ends an answer and how it is drawn, the same by gRPC, chat and plain completion: each over its own socket, streamed.

Every token is one byte, so that characters and stop strings lie across tokens.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.support.byte_tokenizer import EOS
from tests.support.chat_world import chat_cluster, write_chat_model
from tests.support.fake_cluster import FakeCluster, generate
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import worker_pb2

TEXT = "Grüße 🙂 ENDE und mehr"
REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}

protocols = pytest.mark.parametrize("protocol", ["grpc", "chat", "completions"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


class Asker:
    """Asks in one protocol; fields have the names of the HTTP API."""

    def __init__(self, cluster: FakeCluster, protocol: str, client: AsyncOpenAI) -> None:
        self.cluster, self._protocol, self._client = cluster, protocol, client

    async def ask(self, *, max_tokens: int = 100, **fields: Any) -> tuple[str, str]:
        """The text and why it ended. No piece of it has half a character."""
        ask = self._grpc if self._protocol == "grpc" else self._http
        pieces, reason = await ask(max_tokens, fields)
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces), pieces
        return "".join(pieces), reason

    async def _grpc(self, max_tokens: int, fields: dict[str, Any]) -> tuple[list[str], str]:
        request = generate(max_tokens=max_tokens, sampling=pb.SamplingParams(seed=fields.get("seed")))
        request.stop.stop_strings.extend(fields.get("stop", ()))
        request.stop.include_stop = fields.get("include_stop_str_in_output", False)
        request.stop.min_tokens = fields.get("min_tokens", 0)
        request.stop.ignore_eos = fields.get("ignore_eos", False)
        for token, bias in fields.get("logit_bias", {}).items():
            request.sampling.logit_bias.add(token_id=int(token), bias=bias)
        answer = await self.cluster.ask(request)
        return [event.tokens.text for event in answer.events], REASONS[answer.finished.choices[0].reason]

    async def _http(self, max_tokens: int, fields: dict[str, Any]) -> tuple[list[str], str]:
        pieces, reasons = [], []
        common: dict[str, Any] = {
            "model": "fake", "max_tokens": max_tokens, "stream": True, "extra_body": fields,
        }  # fmt: skip
        if self._protocol == "chat":
            messages: Any = [{"role": "user", "content": "Rain?"}]
            async for chunk in await self._client.chat.completions.create(messages=messages, **common):
                pieces += [choice.delta.content or "" for choice in chunk.choices]
                reasons += [choice.finish_reason for choice in chunk.choices]
        else:
            async for chunk in await self._client.completions.create(prompt="Rain?", **common):
                pieces += [choice.text for choice in chunk.choices]
                reasons += [choice.finish_reason for choice in chunk.choices]
        (reason,) = [one for one in reasons if one]
        return pieces, reason

    def draws(self) -> list[worker_pb2.DrawSpec]:
        """What both workers were last told of how to draw."""
        workers = self.cluster.workers
        return [workers["p0"].prefills[-1].draw, workers["d0"].decodes[-1].draw]


@asynccontextmanager
async def asker(model: Path, protocol: str, text: str = TEXT) -> AsyncIterator[Asker]:
    async with chat_cluster(model, text) as cluster:
        base = f"http://{cluster.router.apis.http_endpoint}/v1"
        async with AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            yield Asker(cluster, protocol, client)
            await cluster.assert_quiescent()


@protocols
async def test_a_stop_string_ends_the_answer_wherever_tokens_and_characters_part(
    model: Path, protocol: str
) -> None:
    async with asker(model, protocol) as made:
        assert await made.ask(stop=["🙂 EN"]) == ("Grüße ", "stop")
        assert await made.ask(stop=["nothing", "ü"]) == ("Gr", "stop")
        assert await made.ask(stop=["🙂"], include_stop_str_in_output=True) == ("Grüße 🙂", "stop")
        # Three of its four bytes are those of the character in the text.
        assert await made.ask(stop=["🙃", "ENDLICH"]) == (TEXT, "stop")
        assert await made.ask(stop=["G"]) == ("", "stop")


@protocols
async def test_nothing_stops_before_so_many_tokens(model: Path, protocol: str) -> None:
    async with asker(model, protocol, "aXbXcX") as made:
        assert await made.ask(stop=["X"]) == ("a", "stop")
        assert await made.ask(stop=["X"], min_tokens=3) == ("aXb", "stop")
        assert [draw.stop.min_tokens for draw in made.draws()] == [3, 3], "workers draw no end before it"


@protocols
async def test_the_end_token_may_be_ignored(model: Path, protocol: str) -> None:
    async with asker(model, protocol, "ab") as made:
        assert await made.ask(max_tokens=9) == ("ab", "stop")
        assert all(EOS in draw.stop_token_ids for draw in made.draws())
        assert await made.ask(max_tokens=9, ignore_eos=True) == ("ab", "length")
        assert not any(EOS in draw.stop_token_ids for draw in made.draws())


@protocols
async def test_seed_and_biases_reach_both_workers(model: Path, protocol: str) -> None:
    async with asker(model, protocol) as made:
        await made.ask(seed=7, logit_bias={"66": -100, "67": 2.5})
        for draw in made.draws():
            assert draw.sampling.seed == 7
            biases = [(entry.token_id, entry.bias) for entry in draw.sampling.logit_bias]
            assert biases == [(66, -100.0), (67, 2.5)]
        seeds = set()
        for _ in range(2):
            await made.ask()
            first, other = (draw.sampling.seed for draw in made.draws())
            assert first == other
            seeds.add(first)
        assert len(seeds) == 2, "without one each request has its own"
