# SPDX-License-Identifier: Apache-2.0
"""The parts of the reconciler that keep no company: records of pools, the book of crashes, words for what Ray lacks."""

import re
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import until_told
from twinpool.config import TwinpoolConfig
from twinpool.control import actors as actors_module
from twinpool.control.actors import LOG_LINE_CHARS, Looker, Node, log_tail, missing
from twinpool.control.events import REASONS
from twinpool.control.reconcile import crashes as crash_module
from twinpool.control.reconcile.crashes import LOOP_CRASHES, WINDOW_SECONDS, CrashBook
from twinpool.control.reconcile.spec import PoolSpecs, configured, desired, merged, resized
from twinpool.errors import TwinpoolError
from twinpool.store import Keys, StoreServer, connect_store
from twinpool.v1 import control_pb2 as pb


def config(**pools: object) -> TwinpoolConfig:
    return TwinpoolConfig.model_validate({"pools": pools})


def test_the_configuration_gives_the_first_numbers_and_a_change_of_it_is_a_wish() -> None:
    first = configured(config(prefill_workers=1, decode_workers=2))
    assert desired(first) == {"prefill": 1, "decode": 2}
    scaled = resized(first, 3, 1)
    assert (desired(scaled), scaled.generation) == ({"prefill": 3, "decode": 1}, 2)
    # The same configuration again leaves what an operator has asked for.
    assert merged(scaled, config(prefill_workers=1, decode_workers=2)) == scaled
    # Another number of one role is a wish for this role.
    later = merged(scaled, config(prefill_workers=1, decode_workers=4))
    assert (desired(later), later.generation) == ({"prefill": 3, "decode": 4}, 3)
    assert merged(later, config(prefill_workers=1, decode_workers=4)) == later


def test_bounds_are_those_of_the_configuration_and_hold() -> None:
    spec = configured(config(prefill_workers=2, prefill_least=2, prefill_most=4))
    for wanted in (1, 5):
        with pytest.raises(TwinpoolError) as caught:
            resized(spec, wanted, 1)
        assert caught.value.reason == "POOL_BOUNDS"
        assert "2 and 4 (pools.prefill_least, pools.prefill_most)" in caught.value.message
    assert desired(resized(spec, 4, 1)) == {"prefill": 4, "decode": 1}
    # Bounds that have become narrower move what is wanted.
    narrow = merged(resized(spec, 4, 1), config(prefill_workers=2, prefill_least=1, prefill_most=3))
    assert (desired(narrow)["prefill"], narrow.prefill.least, narrow.prefill.most) == (3, 1, 3)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("scale"), st.integers(0, 6), st.integers(0, 6)),
            st.tuples(st.just("start"), st.integers(0, 6), st.integers(0, 6)),
        ),
        max_size=12,
    )
)
def test_the_last_wish_counts(wishes: list[tuple[str, int, int]]) -> None:
    said = {"prefill": 1, "decode": 1}
    spec, wanted = configured(config()), dict(said)
    for kind, prefill, decode in wishes:
        asked, before = {"prefill": prefill, "decode": decode}, spec.generation
        if kind == "scale":
            spec, wanted = resized(spec, prefill, decode), asked
        else:
            spec = merged(spec, config(prefill_workers=prefill, decode_workers=decode))
            wanted = {role: asked[role] if asked[role] != said[role] else wanted[role] for role in asked}
            said = asked
        assert desired(spec) == wanted
        assert before <= spec.generation <= before + 1


async def test_a_record_outlives_its_process_and_a_damaged_one_is_made_anew(server: StoreServer) -> None:
    made = TwinpoolConfig.model_validate({"cluster": {"name": "specs", "etcd_endpoints": [server.endpoint]}})
    store, key = connect_store(made.cluster), Keys("specs").pool("default")
    try:
        specs = PoolSpecs(store, made)
        with pytest.raises(TwinpoolError) as caught:
            specs.get("default")
        assert caught.value.reason == "POOL_NOT_FOUND"
        assert await specs.load()
        assert (await specs.resize("default", 2, 3)).generation == 2
        assert (await specs.resize("default", 2, 3)).generation == 2, "the same again is no change"
        later = PoolSpecs(store, made)
        assert not await later.load()
        assert desired(later.get("default")) == {"prefill": 2, "decode": 3}
        # Somebody else's change is seen, and not written over by a change of something else.
        await specs.set_auto("default", True)
        changed = await later.resize("default", 1, 3)
        assert changed.auto
        store.put(key, b"\xff\xff")
        assert desired(await later.refresh("default")) == {"prefill": 1, "decode": 3}
        item = store.get(key)
        assert item is not None
        assert desired(pb.PoolSpec.FromString(item.value)) == {"prefill": 1, "decode": 3}, "it was put again"
        store.put(key, b"\xff\xff")
        assert await PoolSpecs(store, made).load()
    finally:
        store.close()


def test_who_crashes_waits_ever_longer_and_old_crashes_are_forgotten() -> None:
    book, waits = CrashBook(), []
    for number in range(1, 12):
        assert book.note("w", "decode", f"cause {number}", 0.0) == number
        assert book.looping("w", 0.0) == (number >= LOOP_CRASHES)
        waits.append(book.hold("w", 0.0))
        assert not book.due("w", waits[-1] - 0.1)
        assert book.due("w", waits[-1])
        assert book.absent() == {"w": "decode"}
        book.started("w")
        assert book.absent() == {}
    assert waits[:3] == [1.0, 2.0, 4.0]
    assert max(waits) == crash_module.LONGEST_WAIT_SECONDS
    assert book.cause("w") == "cause 11"
    assert book.count("w", WINDOW_SECONDS + 1) == 0
    assert not book.looping("w", WINDOW_SECONDS + 1)
    book.forget("w")
    assert (book.cause("w"), book.due("w", 0.0), book.count("x", 0.0)) == ("", True, 0)


def test_restarts_by_ray_are_counted_once() -> None:
    book = CrashBook()
    assert [book.restarted("w", "decode", number) for number in (0, 1, 1, 3)] == [0, 1, 0, 2]
    book.hold("w", 0.0)
    # The next actor of the name counts from 0 again.
    assert book.restarted("w", "decode", 1) == 1


def test_what_is_missing_is_named_with_how_much() -> None:
    small = Node({"CPU": 4.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0})
    large = Node({"CPU": 8.0}, {"CPU": 6.0})
    assert missing({"CPU": 2.0}, [small, large]) == ""
    assert missing({}, [small]) == ""
    assert missing({"CPU": 1.0}, []) == "Ray has no node"
    text = missing({"CPU": 7.0, "rack": 1.0}, [small, large])
    assert "it needs CPU 7, rack 1" in text
    assert "CPU: 7 asked, 6 free on a node, 12 in all" in text
    assert "rack: 1 asked, 0 free on a node, 0 in all" in text
    # Each resource is there, but not on one node.
    assert missing({"CPU": 2.0, "GPU": 1.0}, [small, large]).endswith("no one node has all of it free")
    # Ray's own numbers are not exact.
    assert missing({"CPU": 0.3}, [Node({"CPU": 1.0}, {"CPU": 0.29999999})]) == ""


async def test_what_ray_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    looker = Looker()

    def broken() -> int:
        raise AttributeError("no such table")

    assert await looker.ask("actors", lambda: 7) == 7
    assert looker.trouble == ""
    assert await looker.ask("demands", broken) is None
    assert looker.trouble == "demands: AttributeError: no such table"
    # The one says nothing of the other.
    assert await looker.ask("actors", lambda: 7) == 7
    assert looker.trouble
    assert await looker.ask("demands", lambda: 0) == 0
    assert looker.trouble == ""
    monkeypatch.setattr(actors_module, "LOOK_SECONDS", 0.05)
    held = threading.Event()
    assert await looker.ask("actors", held.wait) is None
    assert looker.trouble == "actors: no answer in 0.05 s"
    # None is asked until that call is back.
    assert await looker.ask("demands", lambda: 7) is None
    held.set()
    monkeypatch.setattr(actors_module, "LOOK_SECONDS", 60.0)

    async def answers() -> bool:
        return await looker.ask("actors", lambda: 7) == 7

    await until_told(answers)
    assert looker.trouble == ""


def test_the_end_of_a_log_is_short(tmp_path: Path) -> None:
    path = tmp_path / "w.log"
    assert log_tail(path) == []
    path.write_text("".join(f"line {number}\n" for number in range(100_000)) + "x" * 1000 + "\n")
    lines = log_tail(path)
    assert lines[:-1] == [f"line {number}" for number in range(99_996, 100_000)]
    assert lines[-1] == "x" * LOG_LINE_CHARS


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"prefill_least": 3, "prefill_most": 2}, "pools.prefill_least"),
        ({"decode_workers": 5, "decode_most": 4}, "pools.decode_workers"),
        ({"stop_workers": False}, "pools.stop_workers"),
        ({"worker_options": "node"}, "pools.worker_options"),
        ({"decode_resources": "GPU"}, "GPU"),
        ({"decode_resources": "GPU=-1"}, "GPU=-1"),
        ({"decode_resources": "GPU=1,GPU=2"}, "twice"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, object], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        config(**given)
    assert config(decode_resources="CPU=2, GPU=0.5").pools.resources("decode") == {"CPU": 2.0, "GPU": 0.5}


def test_the_page_lists_every_reason_of_an_event() -> None:
    """And the code uses each, and no other."""
    root = Path(__file__).parents[3]
    table = re.findall(r"^\| ([A-Z][A-Za-z]+) \| (.+) \|$", (root / "docs" / "pools.md").read_text(), re.M)
    assert dict(table) == REASONS
    text = "".join(path.read_text() for path in (root / "control").rglob("*.py") if path.name != "events.py")
    for reason in REASONS:
        assert f'"{reason}"' in text, f"nothing records {reason}"
