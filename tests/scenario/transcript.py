# SPDX-License-Identifier: Apache-2.0
"""Runs transcripts of the router core in virtual time.

A transcript is a text file of blocks: commands, a line of four dashes, what they print, an empty line. A command is a
verb, names and ``key=value`` pairs; see the functions below for what each takes. Time stands still unless ``at`` or
``traffic`` moves it. Lines that begin with ``#`` are comments.

    submit a prompt=100 output=10
    plan
    ----
    a: accepted
    place a attempt=1 p0 -> d0 cached=0/0

Prompts are named by chains of block hashes: ``hashes=A:4`` is four blocks of A, ``hashes=A:4+B:2`` goes on with two of B.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from twinpool import _core

Values = dict[str, str]
Verb = Callable[["Session", list[str], Values], list[str]]


def chain(spec: str) -> NDArray[np.uint8]:
    """``A:4+B:2`` as ``uint8[6, 16]``; equal starts give equal hashes."""
    parent, rows = b"", []
    for part in filter(None, spec.split("+")):
        label, count = part.split(":")
        for index in range(int(count)):
            parent = hashlib.sha256(parent + f"{label}/{index}".encode()).digest()[:16]
            rows.append(np.frombuffer(parent, np.uint8))
    return np.stack(rows) if rows else np.empty((0, 16), np.uint8)


@dataclass
class Session:
    """One core, its virtual clock and the names that the transcript gave to requests."""

    core: _core.RouterCore = field(default_factory=lambda: _core.RouterCore(_core.AdmissionConfig()))
    now: float = 0.0
    ids: dict[str, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def submit(self, name: str, values: Values) -> _core.Submission:
        """Submits under a name; remembers its id if accepted."""
        hashes = chain(values.get("hashes", ""))
        submission = self.core.submit(
            self.now,
            name,
            values.get("pool", "m"),
            int(values.get("prompt", 100)),
            int(values.get("output", 10)),
            hashes,
            n=int(values.get("n", 1)),
            priority=int(values.get("priority", 0)),
            tenant=values.get("tenant", ""),
            deadline=float(values.get("deadline", 0)),
            bytes=int(values.get("bytes", 0)),
            preemptible=values.get("preemptible", "1") == "1",
            adapter=values.get("adapter", ""),
        )
        if submission.accepted:
            self.ids[name] = submission.request
            self.names[submission.request] = name
        return submission


def config(session: Session, _names: list[str], values: Values) -> list[str]:
    """config key=value...: a new core with these limits."""
    session.core = _core.RouterCore(
        _core.AdmissionConfig(**{key: float(value) for key, value in values.items()})
    )
    return []


def tenant(session: Session, names: list[str], values: Values) -> list[str]:
    """tenant NAME weight= max_requests= tokens_per_second= burst_tokens= max_priority="""
    session.core.set_tenant(
        session.now,
        names[0],
        weight=float(values.get("weight", 1)),
        max_requests=int(values.get("max_requests", 0)),
        tokens_per_second=float(values.get("tokens_per_second", 0)),
        burst_tokens=float(values.get("burst_tokens", 0)),
        max_priority=int(values.get("max_priority", 100)),
    )
    return []


def worker(session: Session, names: list[str], values: Values) -> list[str]:
    """worker NAME... role= state= incarnation= pool= fingerprint= blocks= block_tokens= seqs= adapters="""
    for name in names:
        session.core.upsert_worker(
            session.now,
            name,
            int(values.get("incarnation", 1)),
            values.get("pool", "m"),
            values.get("role", "prefill" if name.startswith("p") else "decode"),
            values.get("state", "ready"),
            values.get("fingerprint", "fp"),
            int(values.get("blocks", 1000)),
            int(values.get("block_tokens", 16)),
            int(values.get("seqs", 64)),
            adapters=list(filter(None, values.get("adapters", "").split(","))),
        )
    return []


def remove(session: Session, names: list[str], values: Values) -> list[str]:
    """remove NAME incarnation=: prints the attempts that need the worker, then removes it."""
    incarnation = int(values.get("incarnation", 1))
    lines = [
        f"was on {names[0]}: {session.names[request]} attempt={attempt}"
        for request, attempt in session.core.requests_on(names[0], incarnation)
    ]
    session.core.remove_worker(session.now, names[0], incarnation)
    return lines


def load(session: Session, names: list[str], values: Values) -> list[str]:
    """load NAME running= waiting= prefill_tokens= available= step="""
    session.core.report_load(
        session.now,
        names[0],
        int(values.get("incarnation", 1)),
        int(values.get("running", 0)),
        int(values.get("waiting", 0)),
        int(values.get("prefill_tokens", 0)),
        int(values.get("available", 1000)),
        float(values.get("step", 0)),
    )
    return []


def quarantine(session: Session, names: list[str], values: Values) -> list[str]:
    """quarantine NAME until="""
    session.core.quarantine(session.now, names[0], int(values.get("incarnation", 1)), float(values["until"]))
    return []


def index(session: Session, names: list[str], values: Values) -> list[str]:
    """index stored|removed|cleared NAME hashes="""
    what, name = names
    incarnation = int(values.get("incarnation", 1))
    hashes = chain(values.get("hashes", ""))
    if what == "stored":
        session.core.index_stored(name, incarnation, hashes)
    elif what == "removed":
        session.core.index_removed(name, incarnation, hashes)
    else:
        session.core.index_cleared(name, incarnation)
    return []


def prefix(session: Session, _names: list[str], values: Values) -> list[str]:
    """prefix hashes=: the longest prefix of each worker."""
    found = session.core.longest_prefix(chain(values["hashes"]))
    return [" ".join(f"{name}={blocks}" for name, blocks in found) or "nobody"]


def learn(session: Session, names: list[str], values: Values) -> list[str]:
    """learn NAME seconds_per_token= : enough measurements of prefill for predictions to count."""
    for tokens in range(200, 1200, 100):
        seconds = tokens * float(values["seconds_per_token"])
        session.core.observe_prefill(names[0], int(values.get("incarnation", 1)), tokens, 0, seconds)
    return []


def submit(session: Session, names: list[str], values: Values) -> list[str]:
    """submit NAME... pool= prompt= output= n= priority= tenant= deadline= bytes= preemptible= adapter= hashes="""
    lines = []
    for name in names:
        result = session.submit(name, values)
        if result.accepted:
            lines.append(f"{name}: accepted")
        else:
            limit = f" {result.limit}" if result.limit else ""
            lines.append(f"{name}: refused {result.reason}{limit} retry_after={result.retry_after:.3f}")
    return lines


def extend(session: Session, names: list[str], values: Values) -> list[str]:
    """extend NAME prompt= output= hashes=: what the client has is part of the prompt now."""
    try:
        done = session.core.extend(
            session.ids[names[0]],
            int(values["prompt"]),
            int(values["output"]),
            chain(values.get("hashes", "")),
        )
    except _core.CoreError as error:
        return [f"{names[0]}: error {error}"]
    return [] if done else [f"{names[0]}: not extended"]


def describe(session: Session, action: _core.Action) -> str:
    """An action as a line."""
    name = session.names[action.request]
    if action.kind == "end":
        return f"end {name} attempt={action.attempt} {action.state} {action.cause} retry_after={action.retry_after:.3f}"
    pair = f"{action.prefill[0]} -> {action.decode[0]}"
    if action.kind == "preempt":
        return f"preempt {name} attempt={action.attempt} {pair}"
    fetch = f" fetch_from={action.fetch_from[0]}" if action.fetch_from else ""
    cached = f"cached={action.predicted_cached_blocks}/{action.predicted_decode_cached_blocks}"
    return f"place {name} attempt={action.attempt} {pair} {cached}{' local' if action.local else ''}{fetch}"


def queues(session: Session, _names: list[str], _values: Values) -> list[str]:
    """queues: what waits in each pool."""
    found = session.core.queues().items()
    return [f"{pool}: {requests} requests, {tokens} tokens" for pool, (requests, tokens) in found] or [
        "nothing"
    ]


def plan(session: Session, _names: list[str], _values: Values) -> list[str]:
    """plan: what is to be done now."""
    return [describe(session, action) for action in session.core.plan(session.now)] or ["nothing"]


def event(session: Session, names: list[str], values: Values) -> list[str]:
    """event EVENT NAME... detail= attempt= (default: the newest)"""
    lines = []
    for name in names[1:]:
        request = session.ids[name]
        explained = (
            session.core.explain(request) if "attempt" not in values else {"attempt": values["attempt"]}
        )
        try:
            result = session.core.advance(
                session.now, request, int(str(explained["attempt"])), names[0], values.get("detail", "")
            )
        except _core.CoreError as error:
            lines.append(f"{name}: error {error}")
            continue
        late = "" if result.applied else " (not applied)"
        lines.append(f"{name}: {result.state}{' ' + result.cause if result.cause else ''}{late}")
    return lines


def finish(session: Session, names: list[str], _values: Values) -> list[str]:
    """finish NAME...: runs a placed request to its end."""
    for name in names:
        for step in ("decode_reserved", "first_token", "delivered", "handoff_done", "token", "finished"):
            event(session, [step, name], {})
    return [f"{name}: {session.core.state(session.ids[name])}" for name in names]


def at(session: Session, names: list[str], _values: Values) -> list[str]:
    """at SECONDS: moves the clock."""
    session.now = float(names[0])
    return []


def wake(session: Session, _names: list[str], _values: Values) -> list[str]:
    """wake: when plan has something to do without a new event."""
    when = session.core.next_wake(session.now)
    return ["never" if when is None else f"{when:.3f}"]


def stats(session: Session, names: list[str], _values: Values) -> list[str]:
    """stats KEY...: these counts."""
    counts = session.core.stats()
    return [" ".join(f"{name}={counts[name]}" for name in names)]


def explain(session: Session, names: list[str], values: Values) -> list[str]:
    """explain NAME terms=a,b: the obstacle, or terms of the chosen pair and of the others."""
    why = session.core.explain(session.ids[names[0]])
    if not why["chosen"]:
        return [f"obstacle={why['obstacle']}"]
    rows = [why["chosen"], *why["others"]]  # type: ignore[misc]
    keys = values.get("terms", "total_seconds").split(",")
    return [
        f"{row['prefill'][0]} -> {row['decode'][0]} "
        + " ".join(
            f"{key}={row[key]:.4f}" if isinstance(row[key], float) else f"{key}={row[key]}" for key in keys
        )
        for row in rows
    ]


def forget(session: Session, names: list[str], _values: Values) -> list[str]:
    """forget NAME..."""
    for name in names:
        session.core.forget(session.ids[name])
    return []


def traffic(session: Session, names: list[str], values: Values) -> list[str]:
    """traffic TENANT:PRIORITY:EVERY:PROMPT... seconds= token=: each source submits a request at its interval; a worker
    takes ``token`` seconds for each prompt token, one prompt after the other. Prints what each source got done."""
    end, token = session.now + float(values["seconds"]), float(values["token"])
    sources = [name.split(":") for name in names]
    heap: list[tuple[float, int, str]] = [(session.now, i, "submit") for i in range(len(sources))]
    done: dict[int, list[float]] = {i: [] for i in range(len(sources))}
    owner: dict[int, tuple[int, float]] = {}
    free_at: dict[str, float] = {}
    while heap and heap[0][0] <= end:
        session.now, which, kind = heapq.heappop(heap)
        if kind == "submit":
            tenant_name, priority, every, prompt = sources[which]
            name = f"{tenant_name}-{priority}-{len(session.ids)}"
            result = session.submit(
                name, {"tenant": tenant_name, "priority": priority, "prompt": prompt, "output": "1"}
            )
            if result.accepted:
                owner[result.request] = (which, session.now)
            heapq.heappush(heap, (session.now + float(every), which, "submit"))
        elif kind == "finish":
            finish(session, [session.names[which]], {})
            source, submitted = owner.pop(which)
            done[source].append(session.now - submitted)
        for action in session.core.plan(session.now):
            if action.kind == "place":
                prompt_tokens = int(sources[owner[action.request][0]][3])
                start = max(session.now, free_at.get(action.prefill[0], 0.0))
                free_at[action.prefill[0]] = start + prompt_tokens * token
                heapq.heappush(heap, (free_at[action.prefill[0]], action.request, "finish"))
    total = sum(len(waits) * int(sources[i][3]) for i, waits in done.items())
    session.now = end
    return [
        f"{name}: {len(done[i])} done, {100 * len(done[i]) * int(sources[i][3]) / total:.1f} % of the tokens, "
        f"longest {max(done[i], default=0):.2f} s"
        for i, name in enumerate(names)
    ]


VERBS: dict[str, Verb] = {
    verb.__name__: verb
    for verb in (
        at, config, event, explain, extend, finish, forget, index, learn, load, plan, prefix, quarantine, queues, remove, stats, submit,
        tenant, traffic, wake, worker,
    )
}  # fmt: skip


def run_command(session: Session, line: str) -> list[str]:
    """Output lines of one command."""
    verb, *words = line.split()
    values = dict(word.split("=", 1) for word in words if "=" in word)
    return VERBS[verb](session, [word for word in words if "=" not in word], values)


def replay(text: str) -> str:
    """The transcript with what its commands print now."""
    session = Session()
    blocks = []
    for block in text.strip().split("\n\n"):
        commands = block.split("\n----")[0].splitlines()
        output = [
            printed
            for line in commands
            if line.strip() and not line.startswith("#")
            for printed in run_command(session, line)
        ]
        blocks.append("\n".join([*commands, *(["----", *output] if output else [])]))
    return "\n\n".join(blocks) + "\n"
