# SPDX-License-Identifier: Apache-2.0
"""Chats that outlive their stream and their router: the events before and after are those of a turn that nobody disturbed."""

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from tests.support.chat_world import chat_pair, weather_chat, write_chat_model
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_pair import FakePair, Stream
from tests.support.turns import ToldChoice, TurnEvents, positions, told
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import chat_pb2_grpc
from twinpool.v1 import inference_pb2 as pb

ARGUMENTS = '{"town": "Zürich 😀"}'
FORCED = f" {ARGUMENTS}}}"
CALL = f'<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}</tool_call>'
TEXT = f"Hm, so ü.\n</think>\n\nI look.\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-resume-model"))


def thoughtful(request: chat.ChatRequest) -> None:
    request.request.chat.variables_json = '{"think": true}'


def forced(request: chat.ChatRequest) -> None:
    request.tool_name = "weather"


def single(request: chat.ChatRequest) -> None:
    thoughtful(request)
    request.single_call = True


def raw(request: chat.ChatRequest) -> None:
    thoughtful(request)
    request.raw_reasoning = True


def form(request: chat.ChatRequest) -> None:
    thoughtful(request)
    request.request.chat.ClearField("tools")
    request.request.structured.json_schema = '{"type": "object"}'


def several(request: chat.ChatRequest) -> None:
    thoughtful(request)
    request.request.n = 2
    request.request.logprobs = 0


def resumable(
    change: Callable[[chat.ChatRequest], object] = thoughtful, *, key: str = "", grace: float = 60.0
) -> chat.ChatRequest:
    request = weather_chat()
    change(request)
    request.request.idempotency_key = key
    if grace:
        request.request.resume_grace.FromNanoseconds(int(grace * 1e9))
    return request


def ask(cluster: FakeCluster, request: chat.ChatRequest) -> TurnEvents:
    return TurnEvents(chat_pb2_grpc.ChatServiceStub(cluster.channel).Chat(request))


def resume(
    cluster: FakeCluster, token: bytes, had: list[chat.ChatPosition] | None = None, tenant: str = ""
) -> TurnEvents:
    request = chat.ChatServiceResumeRequest(token=token, positions=had, tenant=tenant)
    return TurnEvents(chat_pb2_grpc.ChatServiceStub(cluster.channel).Resume(request))


def ran(pair: FakePair) -> int:
    """Requests that reached a decode worker."""
    return len({command.portable.stream_id for made in pair.one.workers.values() for command in made.decodes})


@pytest.mark.parametrize(
    ("where", "change", "text", "n"),
    [
        ("own", thoughtful, TEXT, 1),
        ("own", several, TEXT, 2),
        ("other", thoughtful, TEXT, 1),
        ("lost", thoughtful, TEXT, 1),
        ("lost", forced, FORCED, 1),
        ("lost", single, TEXT, 1),
        ("lost", raw, TEXT, 1),
        ("lost", form, '{"a": [1, "ü"]}', 1),
        ("lost", several, TEXT, 2),
    ],
)
async def test_behind_each_event(
    model: Path, where: str, change: Callable[[chat.ChatRequest], object], text: str, n: int
) -> None:
    """On its router, on one that it is handed over to, and on one that finds it on the workers."""
    async with chat_pair(model, text, step_seconds=0.003) as pair:
        stream = await ask(pair.other, resumable(change)).ended()
        assert stream.reason == ""
        expected, finished = told(stream.events, n), stream.events[-1].finished
        if where == "lost":
            await pair.lose()
        cluster = pair.other if where == "own" else pair.one
        for have in range(1, len(stream.events)):
            before = stream.events[:have]
            after = await resume(cluster, stream.token, positions(before, n)).ended()
            assert after.reason == ""
            assert told([*before, *after.events], n) == expected, f"after {have} events"
            assert after.events[-1].finished.choices == finished.choices
            assert after.events[0].started.request_id == stream.events[0].started.request_id
        assert ran(pair) == 1
        await pair.assert_quiescent()


@pytest.mark.parametrize("where", ["own", "other", "lost"])
@pytest.mark.parametrize(("change", "text"), [(thoughtful, TEXT), (forced, FORCED)])
@pytest.mark.parametrize("part", [0.2, 0.7])
async def test_while_it_is_written(
    model: Path, change: Callable[[chat.ChatRequest], object], text: str, part: float, where: str
) -> None:
    async with chat_pair(model, text, step_seconds=0.01) as pair:
        expected = told((await ask(pair.one, resumable(change, key="undisturbed")).ended()).events)
        stream = ask(pair.other, resumable(change))
        await stream.has(max(1, int(part * len(text))))
        await stream.leave()
        if where == "lost":
            await pair.lose()
        cluster = pair.other if where == "own" else pair.one
        again = resume(cluster, stream.token, positions(stream.events))
        assert (await again.ended()).reason == ""
        whole = told([*stream.events, *again.events])
        assert all(call.id for choice in whole for call in choice.calls)
        assert without_ids(whole) == without_ids(expected)
        assert again.events[-1].finished.usage.completion_tokens == len(text.encode()) + 1
        await pair.assert_quiescent()


def without_ids(choices: list[ToldChoice]) -> list[ToldChoice]:
    for choice in choices:
        for call in choice.calls:
            call.id = ""
    return choices


async def test_log_probabilities_come_once_a_token(model: Path) -> None:
    """Workers do not keep them: the answer is drawn again behind what the client has."""
    async with chat_pair(model, TEXT, step_seconds=0.01) as pair:
        request = resumable(lambda made: (thoughtful(made), setattr(made.request, "logprobs", 0)))
        stream = ask(pair.other, request)
        await stream.has(30)
        await stream.leave()
        await pair.lose()
        again = await resume(pair.one, stream.token, positions(stream.events)).ended()
        assert again.reason == ""
        (choice,) = told([*stream.events, *again.events])
        assert choice.drawn[:-1] == [*TEXT.encode()]
        lost = await resume(pair.one, again.token).ended()
        assert lost.reason == "RESUME_LOST", "those of the first tokens are known to nobody"


# --- idempotency keys ---------------------------------------------------------------------


@pytest.mark.parametrize("router", ["one", "other"])
async def test_the_same_chat_attaches(model: Path, router: str) -> None:
    async with chat_pair(model, TEXT, step_seconds=0.01) as pair:
        request = resumable(key="k", grace=0.0)
        first = ask(pair.one, request)
        await first.has(20)
        second = ask(getattr(pair, router), request)
        assert (await first.ended()).reason == "STREAM_SUPERSEDED"
        answer = await second.ended()
        assert answer.reason == ""
        third = await ask(pair.one, request).ended()
        assert (third.reason, told(third.events)) == ("", told(answer.events)), "ids and all"
        assert third.events[-1] == answer.events[-1]
        had = told(first.events)[0].text[0]
        assert told(answer.events)[0].text[0][1].startswith(had[1])
        assert ran(pair) == 1
        await pair.assert_quiescent()


@pytest.mark.parametrize(
    "change",
    [
        lambda request: setattr(request.request.chat.messages[0], "content", "Snow?"),
        lambda request: setattr(request, "tool_choice", chat.TOOL_CHOICE_MODE_NONE),
        lambda request: setattr(request, "tool_name", "weather"),
        lambda request: setattr(request, "raw_reasoning", True),
        lambda request: setattr(request, "single_call", True),
        lambda request: setattr(request.request.stop, "max_tokens", 299),
    ],
)
async def test_another_chat_under_the_key(model: Path, change: Callable[[chat.ChatRequest], object]) -> None:
    async with chat_pair(model, TEXT) as pair:
        assert (await ask(pair.one, resumable(key="k")).ended()).reason == ""
        request = resumable(key="k")
        change(request)
        for cluster in (pair.one, pair.other):
            assert (await ask(cluster, request).ended()).reason == "IDEMPOTENCY_MISMATCH"
        plain = await pair.one.ask(request.request)
        assert plain.reason == "IDEMPOTENCY_MISMATCH", "to generate is to ask for something else"
        later = resumable(key="k", grace=7.0)
        later.request.repeated = True
        assert (await ask(pair.one, later).ended()).reason == ""
        assert ran(pair) == 1


async def test_a_kept_chat_needs_no_worker(model: Path) -> None:
    async with chat_pair(model, TEXT) as pair:
        first = await ask(pair.one, resumable(key="k")).ended()
        for made in pair.one.workers.values():
            pair.one.router.fleet.remove(made.record())
        again = await ask(pair.one, resumable(key="k")).ended()
        assert (again.reason, told(again.events)) == ("", told(first.events))


async def test_what_nobody_has_is_drawn_again_and_what_is_had_left_out(model: Path) -> None:
    async with chat_pair(model, TEXT, step_seconds=0.01) as pair:
        request = resumable(key="k")
        stream = ask(pair.other, request)
        await stream.has(60)
        await stream.leave()
        await pair.lose()
        for made in pair.one.workers.values():
            made.kept.states.clear()
        assert (
            await resume(pair.one, stream.token, positions(stream.events)).ended()
        ).reason == "RESUME_LOST"
        request.request.repeated = True
        request.positions.extend(positions(stream.events))
        again = await ask(pair.one, request).ended()
        assert again.reason == ""
        expected = told((await ask(pair.one, resumable(key="k")).ended()).events)
        assert told([*stream.events, *again.events]) == expected
        assert ran(pair) == 2


async def test_one_that_parts_when_it_is_drawn_again_is_refused(model: Path) -> None:
    async with chat_pair(model, TEXT) as pair:
        stream = await ask(pair.one, resumable()).ended()
        request = resumable(key="k")
        request.positions.extend(positions(stream.events[:12]))
        request.positions[0].checksum ^= 1
        assert (await ask(pair.one, request).ended()).reason == "INVALID_RESUME"
        await pair.assert_quiescent()


# --- who may, and the end -----------------------------------------------------------------


async def test_only_the_tenant_that_owns_it(model: Path) -> None:
    async with chat_pair(model, TEXT) as pair:
        request = resumable(lambda made: setattr(made.request, "tenant", "a"))
        stream = await ask(pair.one, request).ended()
        assert (await resume(pair.one, stream.token, tenant="b").ended()).reason == "PERMISSION_DENIED"
        assert (await resume(pair.one, stream.token).ended()).reason == "PERMISSION_DENIED"
        forged = stream.token[:-1] + bytes([stream.token[-1] ^ 1])
        assert (await resume(pair.one, forged, tenant="a").ended()).reason == "RESUME_TOKEN_INVALID"
        many = [chat.ChatPosition()] * 17
        assert (await resume(pair.one, stream.token, many, tenant="a").ended()).reason == "INVALID_RESUME"
        assert (await resume(pair.other, stream.token, tenant="a").ended()).reason == ""


async def test_an_answer_that_is_no_chat(model: Path) -> None:
    async with chat_pair(model, TEXT) as pair:
        request = resumable().request
        stream = Stream(pair.one.stub.Generate(request))
        assert (await stream.ended()).error is None
        assert (await resume(pair.one, stream.token).ended()).reason == "INVALID_RESUME"


async def test_a_chat_without_a_grace_cannot_be_resumed(model: Path) -> None:
    async with chat_pair(model, TEXT, step_seconds=0.01) as pair:
        stream = ask(pair.one, resumable(grace=0.0))
        ended = await stream.ended()
        assert (ended.reason, ended.token) == ("", b"")
        assert not any(event.delta.HasField("position") for event in ended.events)
        assert not len(pair.one.router.kept)


@pytest.mark.parametrize("by", ["token", "key"])
@pytest.mark.parametrize("lost", [False, True])
async def test_cancel_reaches_it_anywhere(model: Path, by: str, lost: bool) -> None:
    async with chat_pair(model, "Hm, so ü. " * 200, step_seconds=0.01) as pair:
        stream = ask(pair.other, resumable(key="k"))
        await stream.has(5)
        if lost:
            await pair.lose()
        named = {"token": stream.token} if by == "token" else {"idempotency_key": "k"}
        assert (await pair.one.stub.Cancel(pb.CancelRequest(**named))).found  # type: ignore[arg-type]
        await stream.ended()
        assert (await resume(pair.one, stream.token, positions(stream.events)).ended()).reason != ""
        await pair.assert_quiescent()
        assert not any(made.kept.states for made in pair.one.workers.values())


async def test_what_it_may_read_is_counted_once(model: Path) -> None:
    async with chat_pair(model, TEXT, step_seconds=0.005) as pair:
        request = resumable(lambda made: setattr(made.request, "tenant", "a"))
        stream = ask(pair.one, request)
        await stream.has(30)
        await stream.leave()
        again = await resume(pair.one, stream.token, positions(stream.events), tenant="a").ended()
        assert again.reason == ""
        used = pair.one.router.usage.totals("a")
        assert (used.requests, used.completion_tokens) == (1, len(TEXT.encode()) + 1)


async def test_a_format_that_a_router_does_not_know(model: Path) -> None:
    """A plug-in that not every router has: another one may go on."""
    async with chat_pair(model, TEXT) as pair:
        stream = await ask(pair.one, resumable()).ended()
        (kept,) = pair.one.router.kept._kept.values()
        assert kept.prepared.turn is not None
        kept.prepared.turn.call_format = "of another package"
        asked = resume(pair.one, stream.token)
        assert (await asked.ended()).reason == "RESUME_UNREACHABLE"
        assert asked.error is not None
        assert asked.error.code == grpc.StatusCode.UNAVAILABLE
