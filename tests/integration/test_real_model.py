# SPDX-License-Identifier: Apache-2.0
"""A real small model through the whole cluster: the latent path, and the plain GQA path, both equal to ``transformers``."""

import asyncio
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest

from tests.support import kserve_asking as kserve
from tests.support.cluster import Cluster, running_cluster
from tests.support.oracle import oracle
from twinpool.client import request
from twinpool.engine.fetch import fetch_model
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1.kserve.open_inference_pb2_grpc import GRPCInferenceServiceStub

pytestmark = pytest.mark.integration

SUBJECTS = [
    "Paris",
    "the moon",
    "a steam engine",
    "the Nile",
    "bread",
    "chess",
    "a violin",
    "gravity",
    "bees",
    "an atom",
]
FORMS = [
    "What is {}?",
    "Write one sentence about {}.",
    "Continue: Once upon a time there was {} and",
    "List three facts about {}. Be brief, be exact, do not repeat yourself, and number each of the facts from one to three.",
]
PROMPTS = [form.format(subject) for subject in SUBJECTS for form in FORMS]
MAX_TOKENS = 6
EXAMPLE = Path(__file__).parents[2] / "examples" / "agent"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return fetch_model("smollm2-135m-instruct")


@pytest.fixture(scope="module", params=["latent", "gqa"])
def cluster(
    request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    settings = {"model.attention": request.param, "kv.num_blocks": 256}
    with running_cluster(tmp_path_factory.mktemp("real"), smollm2, settings) as running:
        yield running


async def test_forty_prompts_equal_the_oracle(cluster: Cluster) -> None:
    reference = oracle(cluster.model)
    wrong = []
    async with cluster.client() as client:

        async def ask(prompt: str) -> None:
            chat = [("user", prompt)]
            message = pb.TokenizeRequest()
            message.chat.messages.add(role="user", content=prompt)
            ids = await client.tokenize(message)
            answer = await client.complete(
                request(chat=chat, max_tokens=MAX_TOKENS, temperature=0.0), timeout=240
            )
            if answer.token_ids[0] != reference.greedy(ids, MAX_TOKENS):
                wrong.append(prompt)

        for start in range(0, len(PROMPTS), 8):
            await asyncio.gather(*(ask(prompt) for prompt in PROMPTS[start : start + 8]))
    assert not wrong
    await cluster.assert_quiescent()


async def test_it_knows_paris(cluster: Cluster) -> None:
    async with cluster.client() as client:
        answer = await client.complete(
            request(chat=[("user", "What is the capital of France?")], max_tokens=16, temperature=0.0),
            timeout=120,
        )
    assert "Paris" in answer.texts[0]
    assert answer.finished.handoff.bytes > 0
    await cluster.assert_quiescent()


async def test_kserve_gives_the_tokens_of_the_oracle(cluster: Cluster) -> None:
    """By text and by ids, whole and in pieces."""
    prompt, parameters = PROMPTS[0], {"max_tokens": MAX_TOKENS, "temperature": 0.0}
    async with cluster.client() as client:
        tokens = await client.tokenize(pb.TokenizeRequest(text=prompt))
    expected = oracle(cluster.model).greedy(tokens, MAX_TOKENS)
    async with grpc.aio.insecure_channel(cluster.state.router_endpoints[0]) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for given in (kserve.text(prompt), kserve.ids(tokens)):
            request = kserve.infer(given, raw=True, parameters=parameters)
            found = kserve.read(await stub.ModelInfer(request, timeout=120))
            assert found["output_ids"] == [expected]
            assert found["num_input_tokens"] == [len(tokens)]
            request = kserve.infer(given, ("stream", "BOOL", [True]), parameters=parameters)
            pieces = [
                kserve.read(piece.infer_response)
                async for piece in stub.ModelStreamInfer(iter([request]), timeout=120)
            ]
            assert [token for piece in pieces for token in piece["output_ids"][0]] == expected
            assert "".join(piece["text_output"][0] for piece in pieces) == found["text_output"][0]
    await cluster.assert_quiescent()


@pytest.fixture(scope="module")
def agent_cluster(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The model's own template shows no tools, so it gets another one."""
    settings = {
        "kv.num_blocks": 512,
        "router.http_port": 0,
        "router.chat_template": str(EXAMPLE / "chatml_tools.jinja"),
    }
    with running_cluster(tmp_path_factory.mktemp("agent"), smollm2, settings) as running:
        yield running


@pytest.mark.parametrize("way", ["--http", "--grpc"])
async def test_the_agent_of_the_examples(agent_cluster: Cluster, way: str) -> None:
    """It plans, calls two tools and answers; each turn finds what the turns before it have computed."""
    state = agent_cluster.state
    address = state.http_endpoints[0] if way == "--http" else state.router_endpoints[0]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLE / "agent.py"), way, address, "--question", f"To Bern by {way}?",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    printed, complaints = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode == 0, complaints.decode()
    turns = [
        re.fullmatch(r" *(\d+) ms +(\d+) of +(\d+) cached  (.*)", line)
        for line in printed.decode().splitlines()
    ]
    assert len(turns) == 3
    found = [turn for turn in turns if turn is not None]
    assert len(found) == 3, printed
    assert found[0].group(4).startswith("weather(")
    assert found[1].group(4).startswith("trains(")
    cached, prompts = ([int(turn.group(part)) for turn in found] for part in (2, 3))
    assert cached[0] < cached[1] < cached[2], "what is cached grows with the conversation"
    for before, now in itertools.pairwise(zip(cached, prompts, strict=True)):
        # The opening of a call that must be made ends a prompt, and is no beginning of the next one.
        assert now[0] >= before[1] - 3 * 16
    await agent_cluster.assert_quiescent()
