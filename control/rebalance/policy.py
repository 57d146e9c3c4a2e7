# SPDX-License-Identifier: Apache-2.0
"""The rebalancer's policy: telemetry, bounds, history and a time in; one decision out. No I/O, no clock.

A role asks for a worker when its load takes ``utilisation_high`` of what its workers can do within the objectives. The other
role gives one if it is better off afterwards than the asking role is now, by the dead band: ``low / high``. So noise alone
can't bring a worker back: both loads would have to change by more than the band. Then what the flip costs (a drain, a worker
less meanwhile) is held against what it wins over the horizon. Guards on time (confirmation, dwell, cooldown, reversals) come
before, so that the message names what holds a change back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from twinpool.config import RebalanceSection
from twinpool.control.rebalance.decision import Decision, Effect
from twinpool.control.rebalance.history import History, Wish
from twinpool.control.rebalance.split import Split, best_split, bounds, served, utilisation, within
from twinpool.control.rebalance.telemetry import ROLES, Role, Telemetry, WorkerLoad, other
from twinpool.v1.control_pb2 import PoolSpec

_PATIENCE = 2.0
"""Windows that a role must ask for at most."""

_MORE: Mapping[Role, Wish] = {"prefill": "more prefill", "decode": "more decode"}
_FEWER: Mapping[Role, Wish] = {"prefill": "fewer prefill", "decode": "fewer decode"}


@dataclass(frozen=True, slots=True)
class _Case:
    """One decision's inputs and what follows from them at once."""

    telemetry: Telemetry
    spec: PoolSpec
    history: History
    now: float
    demand: Mapping[Role, float]
    split: Split
    """Workers that serve; those under way count where they go."""
    wanted: Split
    """Workers that the pool's record asks for: those that start or are unfit for work, too. What a scale is reckoned from, since
    it would otherwise take away those that come back."""

    def used(self, role: Role, split: Split) -> float:
        return utilisation(self.demand[role], split.of(role))


class Policy:
    """Decides by a section of the configuration."""

    def __init__(self, settings: RebalanceSection) -> None:
        self.settings = settings

    def decide(self, telemetry: Telemetry, spec: PoolSpec, history: History, now: float) -> Decision:
        """What to do now. Whoever calls keeps the history: ``asked`` with each decision's wish, ``began`` and ``ended``."""
        settings = self.settings
        if telemetry.seconds < settings.window_seconds / 2:
            seen = f"{telemetry.seconds:.0f} s of load were seen; half a window ({settings.window_seconds / 2:g} s) is needed"
            return Decision("nothing", "Unknown", seen)
        case = _case(telemetry, spec, history, now)
        wish = self._wish(case)
        if wish is None:
            return Decision("nothing", "Balanced", self._describe(case))
        return replace(self._answer(case, wish), wish=wish)

    def target(self, telemetry: Telemetry, spec: PoolSpec, history: History) -> Split:
        """The split of the pool's workers that suits the load best."""
        case = _case(telemetry, spec, history, telemetry.at)
        return best_split(case.demand, case.split, spec)

    def effect(
        self, telemetry: Telemetry, spec: PoolSpec, history: History, after: Split, seconds: float
    ) -> Effect:
        """What another split is predicted to do if getting there takes so long."""
        case = _case(telemetry, spec, history, telemetry.at)
        return self._effect(case, after, case.split, seconds)

    def donors(self, telemetry: Telemetry, role: Role, history: History, now: float) -> list[WorkerLoad]:
        """Workers that the role can give, but for those that got it a short while ago, in the order of ``by_loss``."""
        busy = {move.worker for move in history.moves if move.ended is None}
        free = [
            worker
            for worker in telemetry.workers
            if worker.role == role
            and worker.serving
            and worker.name not in busy
            and now - history.given_at(worker.name) >= self.settings.dwell_seconds
        ]
        return by_loss(free)

    # --- what the load asks for -----------------------------------------------------------

    def _wish(self, case: _Case) -> Wish | None:
        settings = self.settings
        role: Role = "prefill"
        if case.used("decode", case.split) > case.used("prefill", case.split):
            role = "decode"
        if case.used(role, case.split) >= settings.utilisation_high:
            return _MORE[role]
        if settings.scale and not case.history.under_way:
            for role in sorted(ROLES, key=lambda each: case.used(each, case.split)):
                fewer = case.split.added(role, -1)
                least, _ = bounds(case.spec, role)
                kept = case.wanted.of(role) > least and fewer.of(role) >= 1
                if kept and case.used(role, fewer) <= settings.utilisation_low:
                    return _FEWER[role]
        return None

    def _answer(self, case: _Case, wish: Wish) -> Decision:
        for role in ROLES:
            if wish == _FEWER[role]:
                return self._scale_down(case, role, wish)
        to: Role = "prefill" if wish == _MORE["prefill"] else "decode"
        held = self._held_back(case, wish, self._confirm_seconds(case, to))
        if held is not None:
            return held
        flip = self._flip(case, to)
        if flip.kind == "nothing" and self.settings.scale and flip.reason in ("AtBounds", "BothBusy"):
            return self._scale_up(case, to, flip)
        return flip

    def _confirm_seconds(self, case: _Case, role: Role) -> float:
        """How long a role has to ask: the less it is short of, the longer, since small excesses come and go by chance."""
        settings = self.settings
        short = case.used(role, case.split) / settings.utilisation_high - 1.0
        most = max(settings.confirm_seconds, _PATIENCE * settings.window_seconds)
        if short <= 0.0:
            return most
        return min(most, settings.confirm_seconds * max(1.0, 1.0 / short))

    def _held_back(self, case: _Case, wish: Wish, confirm: float) -> Decision | None:
        """The guards on time that hold for every change."""
        settings, history, now = self.settings, case.history, case.now
        what = self._describe(case)
        if history.under_way >= settings.max_flips:
            return Decision(
                "nothing", "UnderWay", f"{what}; {history.under_way} of {settings.max_flips} flips run"
            )
        asked = history.asks_for(wish, now)
        if asked < confirm:
            return Decision("nothing", "Confirming", f"{what}; asked for {asked:.0f} of {confirm:g} s")
        rest = history.last_change + settings.cooldown_seconds - now
        if rest > 0:
            return Decision(
                "nothing", "Cooldown", f"{what}; the last change shows its effect for {rest:.0f} s yet"
            )
        return None

    # --- flips ----------------------------------------------------------------------------

    def _flip(self, case: _Case, to: Role) -> Decision:
        settings, what = self.settings, self._describe(case)
        giver = other(to)
        after = case.split.moved(to)
        if not within(case.spec, after) or not _keeps_least(case, giver):
            return Decision("nothing", "AtBounds", f"{what}; the bounds of the pool allow no {after}")
        band = settings.utilisation_low / settings.utilisation_high
        if case.used(giver, after) > case.used(to, case.split) * band:
            gave = f"{giver} would be at {_percent(case.used(giver, after))} with a worker fewer"
            return Decision("nothing", "BothBusy", f"{what}; {gave}")
        if self._would_reverse(case, to):
            return Decision(
                "nothing",
                "Reversal",
                f"{what}; the last flip went the other way, and the one before that in the last {settings.reversal_seconds:g} s",
            )
        donors = self.donors(case.telemetry, giver, case.history, case.now)
        if not donors:
            return Decision(
                "nothing", "Dwell", f"{what}; every {giver} worker got its role too short a while ago"
            )
        chosen = donors[0]
        takes = self.flip_seconds(chosen, case.history)
        effect = self._effect(case, after, case.split.added(giver, -1), takes)
        worth = f"{_percent(effect.served)} of requests in time now, {_percent(effect.served_after)} after {takes:.0f} s"
        if not effect.pays:
            return Decision(
                "nothing", "NoGain", f"{what}; {worth}: it would cost more than it wins", effect=effect
            )
        target = best_split(case.demand, case.split, case.spec)
        return Decision(
            "flip",
            "MorePrefill" if to == "prefill" else "MoreDecode",
            f"{what}; {case.split} to {after}, best {target}: {worth}",
            worker=chosen.name,
            to=to,
            target=target,
            effect=effect,
        )

    def _would_reverse(self, case: _Case, to: Role) -> bool:
        """Whether a flip would be the second one in the window that goes against the one before it."""
        history, settings = case.history, self.settings
        if history.direction in (None, to):
            return False
        return history.reversals_since(case.now - settings.reversal_seconds) >= 1

    def flip_seconds(self, worker: WorkerLoad, history: History) -> float:
        """What a worker's flip is expected to take: its drain, and the flip itself as configured, or as flips took."""
        return max(worker.drain_seconds + self.settings.flip_seconds, history.flip_seconds(0.0))

    def _effect(self, case: _Case, after: Split, meanwhile: Split, seconds: float) -> Effect:
        high, demand = self.settings.utilisation_high, case.demand
        now_served = served(demand, case.split, high)
        then = served(demand, after, high)
        lost = max(0.0, now_served - served(demand, meanwhile, high)) * seconds
        return Effect(
            case.split,
            after,
            case.used("prefill", case.split),
            case.used("decode", case.split),
            case.used("prefill", after),
            case.used("decode", after),
            now_served,
            then,
            seconds,
            (then - now_served) * max(0.0, self.settings.horizon_seconds - seconds),
            lost,
        )

    # --- scale ----------------------------------------------------------------------------

    def _scale_up(self, case: _Case, role: Role, instead: Decision) -> Decision:
        target = case.wanted.added(role, 1)
        if max(case.telemetry.count(role), case.wanted.of(role)) > case.split.of(role):
            return replace(instead, reason="Starting", message=f"{instead.message}; a {role} worker starts")
        if not within(case.spec, target):
            return replace(instead, reason="AtBounds", message=f"{instead.message}; the pool may not grow")
        effect = self._effect(case, case.split.added(role, 1), case.split, 0.0)
        return Decision(
            "scale", "Grow", f"{instead.message}; one {role} worker more", target=target, effect=effect
        )

    def _scale_down(self, case: _Case, role: Role, wish: Wish) -> Decision:
        held = self._held_back(case, wish, self.settings.horizon_seconds)
        if held is not None:
            return held
        after = case.split.added(role, -1)
        what = f"{self._describe(case)}; {role} would be at {_percent(case.used(role, after))} with a worker fewer"
        target = case.wanted.added(role, -1)
        return Decision("scale", "Shrink", what, target=target, effect=self._effect(case, after, after, 0.0))

    def _describe(self, case: _Case) -> str:
        telemetry, split = case.telemetry, case.split
        return (
            f"prefill at {_percent(case.used('prefill', split))}, decode at {_percent(case.used('decode', split))} of {split}, "
            f"{telemetry.queued} queued ({telemetry.queue_growth:+.1f}/s), first token in {telemetry.ttft:.2f} of "
            f"{self.settings.ttft_seconds:g} s, {telemetry.itl * 1e3:.0f} of {self.settings.itl_seconds * 1e3:.0f} ms a token"
        )


def _case(telemetry: Telemetry, spec: PoolSpec, history: History, now: float) -> _Case:
    demand: dict[Role, float] = {role: telemetry.load[role].demand for role in ROLES}
    leaving: dict[str, Role] = {move.worker: move.to for move in history.moves if move.ended is None}
    counts: dict[Role, int] = dict.fromkeys(ROLES, 0)
    for worker in telemetry.workers:
        if worker.name in leaving:
            counts[leaving[worker.name]] += 1
        elif worker.serving:
            counts[worker.role] += 1
    split = Split(counts["prefill"], counts["decode"])
    # A pool whose workers somebody else starts has no numbers in its record.
    wanted = Split(spec.prefill.desired or split.prefill, spec.decode.desired or split.decode)
    return _Case(telemetry, spec, history, now, demand, split, wanted)


def _keeps_least(case: _Case, giver: Role) -> bool:
    """Whether the workers that serve now, without any that are under way, are more than the role must keep."""
    leaving = {move.worker for move in case.history.moves if move.ended is None}
    there = [
        worker
        for worker in case.telemetry.workers
        if worker.role == giver and worker.serving and worker.name not in leaving
    ]
    return len(there) > bounds(case.spec, giver)[0]


def by_loss(workers: Iterable[WorkerLoad]) -> list[WorkerLoad]:
    """The one that loses least by a flip first: the soonest empty, then the one with the least work, then the one with the fewest
    cached prefixes."""
    return sorted(workers, key=_losses)


def _losses(worker: WorkerLoad) -> tuple[float, float, int, int, str]:
    return (
        round(worker.drain_seconds, 1),
        round(worker.kv_use, 2),
        worker.running + worker.waiting,
        worker.cached_tokens,
        worker.name,
    )


def _percent(share: float) -> str:
    return "no worker" if share == float("inf") else f"{share * 100:.0f} %"
