# SPDX-License-Identifier: Apache-2.0
"""Which pool a request goes to."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import until
from twinpool.config import RouterSection, TwinpoolConfig
from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.router.choice import EVERYTHING, Offer, PoolRule, Takes, choose, rules_of
from twinpool.router.models import ModelTable
from twinpool.router.tokenize import TokenizeHop
from twinpool.v1 import control_pb2
from twinpool.v1 import worker_pb2 as pb

SHORT, LONG = Takes((0, 99), (-100, 100)), Takes((100, 1000), (-100, 100))


def ranges(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.lists(st.integers(low, high), min_size=2, max_size=2).map(lambda ends: (min(ends), max(ends)))


OFFERS = st.lists(
    st.builds(
        Offer,
        st.sampled_from("abcd"),
        st.builds(Takes, ranges(0, 9), ranges(-3, 3), st.booleans()),
        st.booleans(),
        st.integers(1, 3),
    ),
    max_size=6,
)


def model_choice(offers: list[Offer], tokens: int, priority: int) -> list[Offer]:
    """Those among which the choice is by name alone, written as the rules are said: one class of answers after the other."""

    def suits(offer: Offer) -> bool:
        lengths, priorities = offer.takes.prompt_tokens, offer.takes.priorities
        return tokens in range(lengths[0], lengths[1] + 1) and priority in range(
            priorities[0], priorities[1] + 1
        )

    for group in (
        [offer for offer in offers if suits(offer) and offer.ready],
        [offer for offer in offers if offer.takes.overflow and offer.ready],
        [offer for offer in offers if suits(offer)],
    ):
        if group:
            narrowest = min(len(range(*offer.takes.prompt_tokens)) for offer in group)
            group = [offer for offer in group if len(range(*offer.takes.prompt_tokens)) == narrowest]
            urgent = min(len(range(*offer.takes.priorities)) for offer in group)
            group = [offer for offer in group if len(range(*offer.takes.priorities)) == urgent]
            most = max(offer.workers for offer in group)
            return [offer for offer in group if offer.workers == most]
    return []


@given(OFFERS, st.integers(0, 9), st.integers(-3, 3))
def test_the_choice_is_that_of_the_rules(offers: list[Offer], tokens: int, priority: int) -> None:
    chosen, allowed = choose(offers, tokens, priority), model_choice(offers, tokens, priority)
    if chosen is None:
        assert allowed == []
        return
    at, why = chosen
    assert offers[at] in allowed
    assert offers[at].pool == min(offer.pool for offer in allowed)
    assert why.startswith("takes ")
    again = choose(offers[::-1], tokens, priority)
    assert again is not None
    # In whatever order they come.
    assert offers[::-1][again[0]] == offers[at] or offers[::-1][again[0]].pool == offers[at].pool


def test_reasons_are_said_in_words() -> None:
    short, long = Offer("short", SHORT, True, 2), Offer("long", LONG, True, 2)
    assert choose([short, long], 99, 0) == (0, "takes prompts of 0 to 99 tokens")
    assert choose([short, long], 100, 0) == (1, "takes prompts of 100 to 1000 tokens")
    assert choose([short, long], 1001, 0) is None
    down = Offer("short", SHORT, False, 1)
    assert choose([down, long], 5, 0) == (0, "takes prompts of 0 to 99 tokens; it is not ready")
    spare = Offer("spare", Takes((500, 1000), (-100, 100), overflow=True), True, 1)
    assert choose([down, spare], 5, 0) == (1, "takes what overflows: short is not ready")
    assert choose([spare], 5, 0) == (0, "takes what overflows: its own pool has no workers")
    urgent = Offer("urgent", Takes((0, 99), (5, 100)), True, 1)
    assert choose([short, urgent], 5, 5) == (1, "takes prompts of 0 to 99 tokens, priorities 5 to 100")
    assert choose([short, urgent], 5, 4) == (0, "takes prompts of 0 to 99 tokens")
    assert choose([Offer("any", EVERYTHING, True, 1)], 5, 4) == (0, "takes all requests")


def test_rules_come_from_the_configuration() -> None:
    config = TwinpoolConfig.model_validate(
        {
            "model": {"path": "/models/big"},
            "pools": {
                "prompt_tokens_most": 99,
                "further": {
                    "long": {"prompt_tokens_least": 100, "overflow": True},
                    "chat": {"model": {"path": "/models/chat", "name": "talk"}, "priority_least": 0},
                },
            },
        }
    )
    limit = EVERYTHING.prompt_tokens[1]
    assert rules_of(config) == {
        "default": PoolRule(Takes((0, 99), (-100, 100)), "big", "/models/big"),
        "long": PoolRule(Takes((100, limit), (-100, 100), overflow=True), "big", "/models/big"),
        "chat": PoolRule(Takes((0, limit), (0, 100)), "talk", "/models/chat"),
    }
    only = config.model_copy(update={"router": RouterSection(pools=("chat", "elsewhere"))})
    assert rules_of(only) == {
        "chat": rules_of(config)["chat"],
        "elsewhere": PoolRule(EVERYTHING, "", "/models/big"),
    }


# --- the table of models ----------------------------------------------------------------------


class World:
    """A table of which the test says which workers there are."""

    def __init__(self, table: ModelTable, path: Path) -> None:
        self.table, self.path = table, path

    def add(self, pool: str, model: str = "big", *, decode: bool = True, **fields: object) -> None:
        """A pair of workers, or a prefill worker alone."""
        for role in (pb.ROLE_PREFILL, pb.ROLE_DECODE) if decode else (pb.ROLE_PREFILL,):
            base: dict[str, object] = {
                "pool": pool, "model": model, "fingerprint": "fp", "role": role, "num_blocks": 64,
                "block_tokens": 16, "max_context_tokens": 100, "vocab_size": 258, "model_path": str(self.path),
                "state": control_pb2.WORKER_STATE_READY,
            }  # fmt: skip
            record = control_pb2.WorkerRecord(**(base | fields))  # type: ignore[arg-type]
            record.worker.name, record.worker.incarnation = f"{pool}-{model}-{role}", 1
            self.table.upsert(WorkerKey(record.worker.name, 1), record)

    def remove(self, pool: str, model: str = "big") -> None:
        for role in (pb.ROLE_PREFILL, pb.ROLE_DECODE):
            self.table.remove(WorkerKey(f"{pool}-{model}-{role}", 1))

    def pool(self, tokens: int, priority: int = 0, model: str = "big") -> str:
        return self.table.place(self.table.resolve(model), tokens, priority).group.pool

    def refusal(self, tokens: int, priority: int = 0) -> TwinpoolError:
        with pytest.raises(TwinpoolError) as caught:
            self.pool(tokens, priority)
        return caught.value


@pytest.fixture
async def world(model_path: Path) -> AsyncIterator[World]:
    rules = {
        "short": PoolRule(SHORT, "big"),
        "long": PoolRule(LONG, "big"),
        "chat": PoolRule(EVERYTHING, "talk"),
    }
    tokenize = TokenizeHop(RouterSection())
    made = World(ModelTable(tokenize, rules), model_path)
    made.add("chat", "talk")
    await until(lambda: made.table.servable)
    yield made
    made.table.close()
    tokenize.close()


async def test_a_model_is_listed_once_with_the_workers_of_all_its_pools(world: World) -> None:
    world.add("short", max_context_tokens=100)
    world.add("long", max_context_tokens=1000)
    found = {model.name: model for model in world.table.models()}
    assert sorted(found) == ["big", "talk"]
    big = found["big"]
    assert (big.prefill_workers, big.decode_workers, big.max_context_tokens) == (2, 2, 1000)
    assert world.table.resolve("big").tokenizer is world.table.resolve("talk").tokenizer, "of one path"


async def test_model_then_length(world: World) -> None:
    world.add("short")
    world.add("long")
    assert [world.pool(tokens) for tokens in (1, 99, 100, 1000)] == ["short", "short", "long", "long"]
    assert world.pool(500, model="talk") == "chat"
    assert world.table.place(world.table.resolve("talk"), 5, 0).why == "", "there is no choice"
    error = world.refusal(1001)
    assert error.reason == "NO_POOL"
    assert "1001 tokens" in error.message
    assert "long: prompts of 100 to 1000 tokens; short: prompts of 0 to 99 tokens" in error.message
    assert "chat" not in error.message, "it is another model's"


async def test_a_pool_without_workers_is_named(world: World) -> None:
    world.add("short")
    error = world.refusal(100)
    assert (error.reason, error.retry_after) == ("NO_WORKERS", 1.0)
    assert "pool long" in error.message
    # One that is only not ready keeps its requests: they wait in its queue.
    world.add("long", decode=False)
    assert world.pool(100) == "long"


async def test_what_overflows_goes_to_a_pool_that_takes_it(world: World, model_path: Path) -> None:
    rules = {"short": PoolRule(SHORT), "long": PoolRule(Takes((100, 1000), (-100, 100), overflow=True))}
    own = World(ModelTable(TokenizeHop(RouterSection()), rules), model_path)
    own.add("long")
    await until(lambda: own.table.servable)
    assert own.pool(5) == "long"
    own.add("short", decode=False)
    assert own.pool(5) == "long"
    own.add("short")
    assert own.pool(5) == "short"
    own.remove("long")
    own.add("long", decode=False)
    own.remove("short")
    assert own.refusal(5).reason == "NO_WORKERS", "who is not ready helps nobody"
    own.table.close()


async def test_whoever_stays_in_a_pool_is_not_taken_elsewhere(world: World) -> None:
    world.add("short")
    world.add("long")
    assert world.table.resolve("big", "fp", "long").group.pool == "long"
    world.remove("long")
    with pytest.raises(TwinpoolError) as caught:
        world.table.resolve("big", "fp", "long")
    assert caught.value.reason == "NO_WORKERS"


async def test_workers_that_have_gone_meanwhile_may_come_back(world: World) -> None:
    target = world.table.resolve("talk")
    world.remove("chat", "talk")
    assert world.table.place(target, 5, 0) is target


async def test_a_tokenizer_is_kept_when_its_directory_has_gone(model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(model_path, path)
    own = World(ModelTable(TokenizeHop(RouterSection())), path)
    own.add("short")
    await until(lambda: own.table.servable)
    target = own.table.resolve("big")
    shutil.rmtree(path)
    assert own.table.tokenizer(target.group) is target.tokenizer
    own.table.close()
