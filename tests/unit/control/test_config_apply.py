# SPDX-License-Identifier: Apache-2.0
"""Keys of the configuration of running processes: taken as a whole or refused as a whole, by one key in etcd."""

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable

import pytest

from tests.support.controls import Control
from tests.support.tcp_proxy import TcpProxy
from tests.support.thread_pools import Site
from tests.support.waiting import until
from twinpool import metrics
from twinpool.config import TwinpoolConfig, check_reloadable, load_config, overlay, reloadable
from twinpool.control.applying import ConfigDesk
from twinpool.control.events import EventLog
from twinpool.control.view import ClusterView
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.live_config import ConfigFollower, LiveConfig, set_log_level
from twinpool.membership import Registration
from twinpool.store import Keys, StoreServer, connect_store
from twinpool.v1 import control_pb2 as pb

BASE = load_config(None, {"router.max_queue_requests": 100, "router.max_choices": 8}, env={})


def asked(*reset: str, **more: object) -> pb.ApplyConfigRequest:
    """Keys of the router by name, "section__key" for others."""
    request = pb.ApplyConfigRequest(reset=reset)
    for name, value in more.items():
        section, _, key = name.partition("__")
        request.values.add(key=f"{section}.{key}" if key else f"router.{name}", value=json.dumps(value))
    return request


_NUMBERS = itertools.count()


# --- one object ---------------------------------------------------------------------------------


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_reloadable(
            ["kv.num_blocks", "router.max_queue_requests", "router.max_quue_requests", "nonsense"]
        )
    text = caught.value.message
    assert "kv.num_blocks: is read at the start of a process alone, so it needs a restart" in text
    assert "router.max_quue_requests: there is no such key; nearest: router.max_queue_requests" in text
    assert "nonsense: there is no such key" in text
    with pytest.raises(ConfigError) as caught:
        overlay(BASE, {"router.max_choices": 17, "router.queue_ttl_seconds": -1, "log.level": "loud"})
    for part in (
        "router.max_choices = 17 (applied)",
        "router.queue_ttl_seconds = -1 (applied)",
        "log.level = 'loud'",
    ):
        assert part in caught.value.message


def test_rules_between_keys_hold_for_the_whole() -> None:
    with pytest.raises(ConfigError, match=r"rpc\.max_message_bytes"):
        overlay(BASE, {"router.max_prompt_tokens": 1 << 26})
    with pytest.raises(ConfigError, match=r"rebalance\.utilisation_low"):
        overlay(BASE, {"rebalance.utilisation_low": 0.9})


def test_a_refusal_of_one_part_leaves_all_as_it_was() -> None:
    live = LiveConfig(BASE)
    router, taken = live.following.router, list[str]()

    def takes(config: TwinpoolConfig) -> Callable[[], None]:
        return lambda: taken.append(f"{config.router.max_choices}")

    def refuses(config: TwinpoolConfig) -> Callable[[], None]:
        if config.router.max_choices == 3:
            raise ConfigError("three is no good")
        return lambda: None

    live.on_change(takes)
    live.on_change(refuses)
    before = metrics.CONFIG_REFUSALS._value.get()
    assert not live.take(5, {"router.max_choices": 3})
    assert (router.max_choices, taken, live.generation) == (8, [], 0)
    assert (live.refused, live.refusal) == (5, "three is no good")
    assert metrics.CONFIG_REFUSALS._value.get() == before + 1
    assert live.take(6, {"router.max_choices": 4})
    assert (router.max_choices, taken, live.generation, live.refused) == (4, ["4"], 6, 0)
    assert live.take(7, {})
    assert router.max_choices == 8, "as it was started"


def test_the_log_level_is_that_of_the_process() -> None:
    live = LiveConfig(BASE)
    live.on_change(set_log_level)
    root, before = logging.getLogger(), logging.getLogger().level
    try:
        assert live.take(1, {"log.level": "error"})
        assert root.level == logging.ERROR
        assert live.take(2, {"log.level": "debug"})
        assert root.level == logging.DEBUG
    finally:
        root.setLevel(before)


# --- one key ------------------------------------------------------------------------------------


class Office:
    """A desk with a follower of its own, over a store that can be cut off."""

    def __init__(self, server: StoreServer, cluster: str, base: TwinpoolConfig = BASE) -> None:
        self.proxy = TcpProxy(server.endpoint)
        config = base.model_copy(
            update={
                "cluster": base.cluster.model_copy(
                    update={
                        "name": cluster,
                        "etcd_endpoints": (self.proxy.endpoint,),
                        "etcd_timeout_seconds": 1.0,
                    }
                )
            }
        )
        self.config = config
        self.store = connect_store(config.cluster)
        self.live = LiveConfig(config)
        self.follower = ConfigFollower(self.live, self.store, cluster)
        self.view = ClusterView(self.store, config)
        self.events = EventLog(self.store, cluster)
        self.desk = ConfigDesk(self.follower, self.store, cluster, self.view, self.events, "default")
        self.key = Keys(cluster).applied_config

    async def open(self) -> "Office":
        await self.view.start()
        await self.events.start()
        await self.follower.start(5.0)
        return self

    async def close(self) -> None:
        await self.follower.stop()
        await self.events.stop()
        await self.view.stop()
        await asyncio.to_thread(self.store.close)
        self.proxy.close()

    async def apply(self, *reset: str, **more: object) -> dict[str, list[object]]:
        answer = await self.desk.apply(asked(*reset, **more))
        return {each.key: [json.loads(each.before), json.loads(each.after)] for each in answer.changes}

    def reasons(self) -> list[str]:
        return [event.reason for event in self.events.all()]


@pytest.fixture
async def office(server: StoreServer) -> AsyncIterator[Office]:
    made = await Office(server, f"c{next(_NUMBERS)}").open()
    yield made
    await made.close()


async def test_a_change_is_one_generation_and_everybody_takes_it(server: StoreServer, office: Office) -> None:
    other = await Office(
        server, office.config.cluster.name, load_config(None, {"router.max_choices": 4}, env={})
    ).open()
    changes = await office.apply(max_queue_requests=7, log__level="warning")
    assert changes == {"log.level": ["info", "warning"], "router.max_queue_requests": [100, 7]}
    for each in (office, other):
        await until(lambda each=each: each.live.generation == 1)
        assert each.live.following.router.max_queue_requests == 7
    assert (office.live.present.router.max_choices, other.live.present.router.max_choices) == (8, 4)
    assert await office.apply(max_queue_requests=7) == {}
    assert await office.apply(max_queue_requests=9) == {"router.max_queue_requests": [7, 9]}
    await until(lambda: other.live.generation == 2)
    assert other.live.present.log.level == "warning", "what was applied before stays"
    assert await office.apply("log.level") == {"log.level": ["warning", "info"]}
    assert await office.apply("*") == {"router.max_queue_requests": [9, 100]}
    await until(lambda: other.live.generation == 4)
    assert other.live.present.router.max_queue_requests == 4096, "as that one was started"
    await until(lambda: office.reasons().count("ConfigApplied") == 4)
    assert "router.max_queue_requests: 100 to 7" in office.events.all()[0].message
    late = await Office(server, office.config.cluster.name).open()
    assert late.live.generation == 4
    for each in (other, late):
        await each.close()


async def test_a_dry_run_and_a_bad_key_write_nothing(office: Office) -> None:
    request = asked(max_queue_requests=7)
    request.dry_run = True
    answer = await office.desk.apply(request)
    assert (answer.generation, len(answer.changes)) == (0, 1)
    for bad, words in (
        (asked(max_queue_requests=7, kv__num_blocks=64), "kv.num_blocks: is read at the start"),
        (asked(max_queue_requests=7, max_choices=99), "router.max_choices = 99"),
        (asked(max_queue_requests=7, nothing=1), "router.nothing: there is no such key"),
        (asked("router.nothing"), "router.nothing: there is no such key"),
        (asked("router.max_choices", max_choices=3), "named twice"),
        (asked(call_format="x" * 5000), "the limit is 4096"),
        (pb.ApplyConfigRequest(values=[pb.ConfigValue(key="log.level", value="loud")]), "not JSON"),
        (pb.ApplyConfigRequest(values=[pb.ConfigValue(key="log.level", value="[" * 4000)]), "not JSON"),
    ):
        with pytest.raises(TwinpoolError) as caught:
            await office.desk.apply(bad)
        assert caught.value.reason == "CONFIG_REFUSED"
        assert words in caught.value.message
    assert office.store.get(office.key) is None
    assert office.live.generation == 0


async def test_of_two_changes_at_the_same_time_one_is_refused(server: StoreServer, office: Office) -> None:
    other = await Office(server, office.config.cluster.name).open()
    await office.apply(max_choices=7)
    stale = asked(max_choices=5)
    stale.generation = 0
    with pytest.raises(
        TwinpoolError, match="generation 1 is in force, and the change was made for generation 0"
    ) as caught:
        await office.desk.apply(stale)
    assert caught.value.reason == "CONFIG_CHANGED"
    results = await asyncio.gather(
        *(desk.apply(asked(max_choices=1 + at)) for at in range(6) for desk in (office.desk, other.desk)),
        return_exceptions=True,
    )
    lost = [each for each in results if isinstance(each, TwinpoolError)]
    assert {each.reason for each in lost} <= {"CONFIG_CHANGED"}
    item = office.store.get(office.key)
    assert item is not None
    won = [each for each in results if isinstance(each, pb.ApplyConfigResponse) and each.changes]
    assert len({each.generation for each in won}) == len(won), "no generation is written twice"
    assert pb.AppliedConfig.FromString(item.value).generation == max(each.generation for each in won)
    await other.close()


async def test_without_etcd_it_says_so_and_what_was_applied_stays(office: Office) -> None:
    await office.apply(max_choices=3)
    await until(lambda: office.live.generation == 1)
    office.proxy.cut()
    with pytest.raises(TwinpoolError) as caught:
        await office.desk.apply(asked(max_choices=5))
    assert caught.value.reason == "STORE_UNAVAILABLE"
    assert office.live.following.router.max_choices == 3
    office.proxy.heal()


async def test_an_etcd_that_has_lost_the_key_gets_it_again(office: Office) -> None:
    await office.apply(max_choices=3)
    await until(lambda: office.live.generation == 1)
    watching = asyncio.create_task(office.desk.watch())
    office.store.delete(office.key)
    await until(lambda: office.store.get(office.key) is not None)
    await until(lambda: not office.follower.lost)
    assert (office.live.generation, office.live.present.router.max_choices) == (1, 3)
    watching.cancel()


async def test_a_process_that_refuses_is_named_once_and_listed(server: StoreServer, office: Office) -> None:
    """This one was started with a message size that does not let it take so long a prompt."""
    base = load_config(
        None,
        {"rpc.max_message_bytes": 1 << 20, "router.max_prompt_tokens": 1000, "router.max_choices": 2},
        env={},
    )
    other = await Office(server, office.config.cluster.name, base).open()
    record = pb.RouterRecord(name="narrow", incarnation=7, endpoint="127.0.0.1:9")
    registration = Registration(other.store, office.config.cluster.name, record, ttl_seconds=5)
    other.follower.tell(registration.update_config)
    await registration.start()
    watching = asyncio.create_task(office.desk.watch())
    await office.apply(max_prompt_tokens=500_000, max_choices=5)
    await until(lambda: other.live.refused == 1)
    assert other.live.present.router.max_choices == 2, "nothing of it is taken"
    await until(lambda: "ConfigRefused" in office.reasons())
    event = next(event for event in office.events.all() if event.reason == "ConfigRefused")
    assert event.warning
    assert "router narrow keeps generation 0 and refuses 1" in event.message
    assert "rpc.max_message_bytes" in event.message
    (_, shown) = office.desk.get().processes
    assert (shown.kind, shown.name, shown.state.refused) == ("router", "narrow", 1)
    await office.apply("*")
    await until(lambda: office.desk.get().processes[1].state == pb.ConfigState(generation=2))
    assert office.reasons().count("ConfigRefused") == 1
    watching.cancel()
    await registration.stop()
    await other.close()


async def test_a_value_that_nobody_can_read_is_left_alone_and_can_be_reset(office: Office) -> None:
    known = pb.AppliedConfig(generation=3, values=[pb.ConfigValue(key="router.of_tomorrow", value="5")])
    office.store.put(office.key, known.SerializeToString())
    await until(lambda: office.live.refused == 3)
    assert "router.of_tomorrow: there is no such key" in office.live.refusal
    assert await office.apply("router.of_tomorrow") == {"router.of_tomorrow": [5, None]}
    await until(lambda: office.live.generation == 4)
    deep = pb.AppliedConfig(generation=5, values=[pb.ConfigValue(key="log.level", value="[" * 100_000)])
    for damaged in (b"\xff\xff", deep.SerializeToString()):
        office.store.put(office.key, damaged)
        with pytest.raises(TwinpoolError) as caught:
            await office.apply(max_choices=3)
        assert caught.value.reason == "STORE_CORRUPT"
    assert office.live.generation == 4


async def test_it_says_where_each_value_comes_from(office: Office) -> None:
    await office.apply(max_queue_requests=7)
    await until(lambda: office.live.generation == 1)
    answer = office.desk.get()
    found = {each.key: (json.loads(each.value), each.source, each.reloadable) for each in answer.keys}
    assert found["router.max_queue_requests"] == (7, "applied", True)
    assert found["router.max_choices"] == (8, "start", True)
    assert found["router.max_attempts"] == (3, "default", True)
    assert found["kv.num_blocks"] == (1024, "default", False)
    assert answer.applied.generation == 1
    assert {each.key for each in answer.keys if each.reloadable} == set(reloadable())


# --- a whole control process --------------------------------------------------------------------


async def test_a_control_process_takes_it_and_leads_on(server: StoreServer, office: Office) -> None:
    site = Site(office.store, "config-control", 2)
    control = await Control(server, site, prefill_workers=0, decode_workers=0).start()
    try:
        loop = control.controller.rebalance
        assert not loop.settings.dry_run
        await control.controller.applying.apply(asked(rebalance__dry_run=True, rebalance__max_flips=3))
        await until(lambda: control.controller.live.generation == 1)
        assert (loop.settings.dry_run, loop.policy.settings.max_flips) == (True, 3)
        await control.tells("ConfigApplied")
        (own,) = control.controller.applying.get().processes
        assert (own.kind, own.name, own.state.generation) == ("control", control.controller.endpoint, 1)
    finally:
        await control.stop()
